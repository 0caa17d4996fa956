"""What a rank remembers of the calls that it has tried."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from fault_trials import MESH, trial
from torch.distributed.tensor import Replicate, Shard

from strategies.embedding.inputs import EMBEDDING, LOOKUP
from strategies.tensors import filled
from verifier.core.case import OpCase, Trial
from verifier.core.observation import Fate
from verifier.core.verdict import Phase
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.worker import REMEMBERED_TRIALS

pytestmark = pytest.mark.ranks

FEW = 60
"""After so many trials the ranks here forget, so that the test need not run thousands."""
FORGETFUL = f"from verifier.meshes import worker\n\nworker.REMEMBERED_TRIALS = {FEW}\n"


def test_ranks_do_not_remember_calls_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DTensor's caches have no limit."""
    assert FEW < REMEMBERED_TRIALS <= 5000
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL)
    trials = [trial("S(0)")] * FEW
    with caplog.at_level("INFO", logger="verifier"), Pool(PoolKey.of(MESH), [str(file)]) as pool:

        def said_after(count: int) -> list[str]:
            """Return what ranks have said so far that they forget, once so many more trials are done, and one more."""
            for some in (trials[:count], trials[:1]):  # what is said after a batch comes with the next
                assert {observation.fate for observation in pool.run(some)} == {Fate.COMPLETED}
            return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "forgets" in text]

        assert said_after(FEW - 2) == []
        said = said_after(1)
        assert said_after(1) == said
    assert sorted(text.partition(":")[0] for text in said) == ["rank 0", "rank 1"]
    wanted = rf"rank \d: forgets [1-9]\d* redistributions after {FEW} trials"
    assert [text for text in said if not re.fullmatch(wanted, text)] == []


def test_a_redistribution_that_is_remembered_has_the_bytes_of_its_own() -> None:
    """Lookups alike but for what a rank holds: DTensor gathers [4, width] of width-wise shards, each again later."""

    def lookup(width: int, dtype: torch.dtype) -> Trial:
        arguments = {"weight": filled((6, width), dtype, 0), "input": torch.arange(4)}
        return Trial(OpCase(EMBEDDING, LOOKUP, (), arguments), MESH, ((Shard(1),), (Replicate(),)))

    wide, narrow, single = lookup(8, torch.float64), lookup(4, torch.float64), lookup(8, torch.float32)
    sizes = {}
    with Pool(PoolKey.of(MESH)) as pool:
        for number, observation in enumerate(pool.run([wide, narrow, single] * 2)):
            for report in observation.reports:
                assert report is not None
                [step] = [step for step in report.redistributions if step.phase is Phase.GATHER]
                assert (step.source, step.target, step.collective) == ("S(1)", "R", "all_gather")
                sizes[number, report.ranks] = step.bytes
    wanted = [4 * 4 * 8, 4 * 2 * 8, 4 * 4 * 4] * 2
    assert sizes == {(number, (rank,)): size for number, size in enumerate(wanted) for rank in (0, 1)}
