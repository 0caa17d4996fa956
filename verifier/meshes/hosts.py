"""The machine of each rank, and the GPU that the rank gets there."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

__all__ = ["Place", "gpu_problem", "gpus_shared", "local_places", "own_place"]


@dataclass(frozen=True)
class Place:
    """The machine and GPU of a rank.

    Parameters
    ----------
    machine
        Identifies the machine and its network namespace: two ranks with the same value share a loopback interface.
    host
        The machine's name, for messages.
    number
        The rank's number on its machine, which decides what GPU it gets.
    gpu
        An identifier of that GPU, unique on its machine; empty without a GPU.
    """

    machine: str
    host: str
    number: int
    gpu: str = ""


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def own_place(number: int) -> Place:
    """Return the place of the ``number``th rank that this process starts on this machine; ranks get GPUs in turn."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count()
    # a launcher may let each rank see one GPU only, which all of them then number 0
    names = visible if len(visible) == count else [str(index) for index in range(count)]
    return Place(_machine(), socket.gethostname(), number, names[number % count] if count else "")


def local_places(size: int) -> tuple[Place, ...]:
    """Return the places of ``size`` ranks on this machine."""
    return tuple(own_place(number) for number in range(size))


def gpus_shared(places: Sequence[Place]) -> bool:
    """Return whether ranks have to share GPUs.

    >>> gpus_shared([Place("a", "a", 0, "0"), Place("b", "b", 0, "0")])
    False
    >>> gpus_shared([Place("a", "a", 0, "0"), Place("a", "a", 1, "0")])
    True
    """
    return len({(place.machine, place.gpu) for place in places}) < len(places)


def gpu_problem(places: Sequence[Place], backend: str) -> str:
    """Return why ranks at these places cannot run on GPUs over ``backend``; empty if they can.

    >>> gpu_problem([Place("a", "one", 0, "0"), Place("a", "one", 1, "0")], "nccl")
    'nccl needs one GPU per rank: 2 ranks were asked for, and there is 1 GPU; --backend gloo shares them'
    >>> gpu_problem([Place("a", "one", 0, "0"), Place("a", "one", 1, "0")], "gloo")
    ''
    """
    without = sorted({place.host for place in places if not place.gpu})
    if without:
        return f"torch sees no GPU on {', '.join(without)}"
    if backend == "nccl" and gpus_shared(places):
        count = len({(place.machine, place.gpu) for place in places})
        gpus = "there is 1 GPU" if count == 1 else f"there are {count} GPUs"
        return (
            f"nccl needs one GPU per rank: {len(places)} ranks were asked for, and {gpus}; --backend gloo shares them"
        )
    return ""
