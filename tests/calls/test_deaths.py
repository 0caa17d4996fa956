"""A rank that dies in a call of the fixture: only what happens on new processes as well is the fault of the call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from verifier.calls.result import Died
from verifier.calls.verifier import Verifier
from verifier.core.verdict import VerdictKind

pytestmark = pytest.mark.ranks


def dies(x: torch.Tensor, before: str) -> torch.Tensor:
    """Return twice ``x``; the process ends if it is a rank and finds no file, which it leaves if it has a name."""
    if isinstance(x, DTensor) and not (before and Path(before).exists()):
        if before:
            Path(before).touch()
        os.abort()
    return x * 2


def test_what_kills_a_rank_once_is_run_again_on_new_processes(verify: Verifier, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"(?s)ended with signal SIGABRT.*an earlier call may have broken the memory"):
        result = verify(dies, torch.arange(4.0), str(tmp_path / "died"), mesh=2, placements=["S(0)"], record=False)
    assert result.counts == {VerdictKind.PASS: 1}


def test_what_kills_ranks_each_time_died(verify: Verifier) -> None:
    with pytest.raises(Died, match="SIGABRT"):
        verify(dies, torch.arange(4.0), "", mesh=2, placements=["S(0)"], record=False)
