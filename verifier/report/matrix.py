"""Tables of verdicts by the placements of the first two tensor arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verifier.core.placement_text import placement_order
from verifier.records.schema import FindingRecord, MatrixRecord
from verifier.report.words import OUTCOMES, Outcome, outcome, worst_verdict

__all__ = ["MatrixCell", "MatrixView", "matrix_views"]


@dataclass(frozen=True)
class MatrixCell:
    """A cell that was tried. ``hits`` of ``trials`` trials had the worst verdict."""

    worst: Outcome
    hits: int
    trials: int
    counts_text: str
    anchor: str = ""
    """Fingerprint of a finding with these placements on this mesh."""

    @property
    def text(self) -> str:
        """Return the text of the cell: ``31``, or ``4/31`` if verdicts are mixed."""
        return str(self.trials) if self.hits == self.trials else f"{self.hits}/{self.trials}"


@dataclass(frozen=True)
class MatrixView:
    """A matrix as a table: ``rows`` has each row's placements and its cells; a cell that was not tried is None."""

    op: str
    mesh: str
    row_name: str
    column_name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[MatrixCell | None, ...]], ...]
    tried: int
    bad: int
    not_tried: int
    outcomes: tuple[Outcome, ...]
    """The legend: the outcomes that are the worst of a cell, worst first."""


def matrix_views(matrices: Sequence[MatrixRecord], findings: Sequence[FindingRecord]) -> list[MatrixView]:
    """Return a view for each matrix, in order; a cell links to its finding."""
    anchors: dict[tuple[str, str, tuple[str, ...]], str] = {}
    for finding in findings:
        placements = tuple(finding.input_placements.values())
        anchors.setdefault((finding.op, finding.mesh, placements[:2]), finding.fingerprint)
    return [_view(matrix, anchors) for matrix in matrices]


def _view(matrix: MatrixRecord, anchors: dict[tuple[str, str, tuple[str, ...]], str]) -> MatrixView:
    columns = tuple(sorted({column for row in matrix.cells.values() for column in row}, key=placement_order))
    rows = []
    for row in sorted(matrix.cells, key=placement_order):
        cells = []
        for column in columns:
            counts = matrix.cells[row].get(column, {})
            anchor = anchors.get((matrix.op, matrix.mesh, (row, column) if matrix.column_name else (row,)), "")
            cells.append(_cell(counts, anchor))
        rows.append((row, tuple(cells)))
    tried = [cell for _, cells in rows for cell in cells if cell is not None]
    worst = {cell.worst.name for cell in tried}
    return MatrixView(
        matrix.op,
        matrix.mesh,
        matrix.row_name,
        matrix.column_name,
        columns,
        tuple(rows),
        len(tried),
        sum(cell.worst.tone == "fail" for cell in tried),
        len(rows) * len(columns) - len(tried),
        tuple(shown for name, shown in OUTCOMES.items() if name in worst),
    )


def _cell(counts: dict[str, int], anchor: str) -> MatrixCell | None:
    worst = worst_verdict(counts)
    if worst is None:
        return None
    text = ", ".join(f"{counts[name]:,} {name}" for name in OUTCOMES if counts.get(name))
    shown = outcome(worst)
    return MatrixCell(shown, counts[worst], sum(counts.values()), text, anchor if shown.tone == "fail" else "")
