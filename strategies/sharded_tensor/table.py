"""Prints the table of ``docs/explanations/sharded-tensor.md``.

Run it with ``python -m strategies.sharded_tensor.table reports/latest/run.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from verifier.records.files import read_record
from verifier.records.schema import FindingRecord

__all__ = ["discrepancies"]


def discrepancies(findings: Iterable[FindingRecord]) -> str:
    """Return the family's findings as a table in Markdown: kernel, call, difference, cause, fingerprint.

    A finding without a reason has not been accepted yet, and its row says so.
    """
    rows = ["| kernel | call | what differs | cause | finding |", "| --- | --- | --- | --- | --- |"]
    found = [finding for finding in findings if finding.family == "sharded_tensor"]
    for finding in sorted(found, key=lambda finding: (finding.op, finding.verdict, finding.fingerprint)):
        difference, *more = finding.message.splitlines()
        if finding.verdict == "DIED":  # the rest is the end of stderr, of any number of lines
            difference = difference.partition(": ")[0]
        begin = f"in {finding.op}("
        call = next(line.strip() for line in more if line.strip().startswith(begin))
        shown = call.removeprefix(begin).partition(") on mesh")[0]
        cells = [
            finding.op.removeprefix("sharded_tensor."),
            f"`{shown}` on {finding.mesh}",
            f"{finding.verdict}: {difference}",
            finding.reason or "not accepted yet",
            f"`{finding.fingerprint}`",
        ]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m strategies.sharded_tensor.table RUN_JSON")
    print(discrepancies(read_record(Path(sys.argv[1])).findings))
