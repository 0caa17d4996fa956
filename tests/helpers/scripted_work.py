"""Tasks of level 1's workers that crash, hang or run out of memory as a script says."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

import torch

from verifier.rules.campaign.worker_process import InFlight, Position

PARTS = 3
POSITIONS = 4

Script = dict[Position, str]
"""An item of the tasks below: its number, and the behaviour at some of its positions."""


def misbehave(how: str) -> None:
    match how:
        case "abort":
            os.write(2, b"earlier noise\ndouble free or corruption (out)\n")
            os.abort()
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "hang":
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock, as native code may
        case "raise":
            raise LookupError("a mistake of the task")
        case "allocate":
            torch.empty(8 << 30, dtype=torch.uint8)
        case _:
            raise AssertionError(how)


def scripted(item: tuple[int, Script], in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    """Yield for each part the positions that were run."""
    number, script = item
    for part in range(resume, PARTS):
        done = []
        for combination in range(POSITIONS):
            position = (number, part, 0, combination)
            if position in skip:
                continue
            in_flight.enter(position)
            if position in script:
                misbehave(script[position])
            done.append(position)
        in_flight.leave()
        yield done


def scripts(*bad: tuple[Position, str], items: int = 4) -> list[tuple[int, Script]]:
    """Return items whose numbers are their indices, some of which misbehave."""
    return [(number, {position: how for position, how in bad if position[0] == number}) for number in range(items)]


def loaded(item: str, in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    """Yield whether the worker has loaded the module."""
    yield item in sys.modules
