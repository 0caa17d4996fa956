"""What a rank remembers of the calls that it has tried."""

from __future__ import annotations

import logging
import re

import pytest
from test_faults import MESH, trial

from verifier.cases import Fate
from verifier.meshes import Pool, PoolKey
from verifier.meshes.worker import REMEMBERED_TRIALS


def test_ranks_do_not_remember_calls_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """DTensor's caches have no limit."""
    trials = [trial("S(0)")] * REMEMBERED_TRIALS
    with caplog.at_level("INFO", logger="verifier"), Pool(PoolKey.of(MESH)) as pool:

        def said_after(count: int) -> list[str]:
            """Return what ranks have said so far that they forget, once so many more trials are done, and one more."""
            for some in (trials[:count], trials[:1]):  # what is said after a batch comes with the next
                assert {observation.fate for observation in pool.run(some)} == {Fate.COMPLETED}
            return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "forgets" in text]

        assert said_after(REMEMBERED_TRIALS - 2) == []
        said = said_after(1)
        assert said_after(1) == said
    assert sorted(text.partition(":")[0] for text in said) == ["rank 0", "rank 1"]
    wanted = rf"rank \d: forgets [1-9]\d* redistributions after {REMEMBERED_TRIALS} trials"
    assert [text for text in said if not re.fullmatch(wanted, text)] == []
