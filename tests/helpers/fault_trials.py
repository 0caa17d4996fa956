"""Trials on two ranks, one of which may have a fault, and checks whether their processes have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from strategies.embedding.inputs import EMBEDDING, LOOKUP
from strategies.tensors import filled
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.verdict import VerdictKind
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements

MESH = MeshSpec((2,))
CASE = OpCase(
    EMBEDDING,
    LOOKUP,
    (),
    {"weight": filled((4, 2), torch.float64, 0).requires_grad_(), "input": torch.tensor([0, 3, 1])},
)


def trial(weight: str, fault: str | None = None) -> Trial:
    """Return a trial; a weight of ``P(sum)`` makes the ranks run a collective in the forward call."""
    combination = (parse_placements(weight), parse_placements("R"))
    return Trial(CASE, MESH, combination, cotangents=((parse_placements("R"),),), fault=fault)


BATCH = [trial("S(1)"), trial("R"), trial("P(sum)"), trial("S(0)"), trial("S(1)")]
FAULTY = 2


def kinds(observations: Sequence[Observation]) -> list[VerdictKind]:
    reference = make_reference(CASE)
    return [judge(observation, reference).kind for observation in observations]


def running(pid: int) -> bool:
    """Return whether a process exists and is no zombie, because the new parent of an orphan may never wait for it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for_end(pids: Sequence[int], seconds: float) -> list[int]:
    """Return those of ``pids`` that still run after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
