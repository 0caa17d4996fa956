"""The table of where the legacy kernels differ, as a run has it."""

from __future__ import annotations

from dataclasses import replace

from plain_records import a_finding

from strategies.sharded_tensor.table import discrepancies
from verifier.records.schema import FindingRecord


def ours(fingerprint: str, reason: str = "") -> FindingRecord:
    op = "sharded_tensor.embedding.rows"
    message = f"output [0, 0]: got nan, expected 0.0\n  in {op}(dim=0, a|b) on mesh (2,), backend gloo"
    return a_finding(
        fingerprint,
        family="sharded_tensor",
        op=op,
        verdict="WRONG_VALUE",
        message=message,
        mesh="2",
        reason=reason,
    )


def test_a_row_for_each_finding_of_the_family() -> None:
    _, _, *rows = discrepancies([ours("b"), a_finding("c"), ours("a", "Divides by 0.")]).splitlines()
    shown = "| embedding.rows | `dim=0, a\\|b` on 2 | WRONG_VALUE: output [0, 0]: got nan, expected 0.0 |"
    assert rows == [f"{shown} Divides by 0. | `a` |", f"{shown} not accepted yet | `b` |"]


def test_the_stderr_of_a_rank_that_died_is_left_out() -> None:
    died = "rank 1 ended with signal SIGABRT in forward: [rank1]: W1121 16:16\n  what():  enforce fail"
    finding = replace(ours("d"), verdict="DIED", message=f"{died}\n  in {ours('d').op}(dim=0) on mesh (2,)")
    row = (
        "| embedding.rows | `dim=0` on 2 | DIED: rank 1 ended with signal SIGABRT in forward | not accepted yet | `d` |"
    )
    assert discrepancies([finding]).splitlines()[-1] == row
