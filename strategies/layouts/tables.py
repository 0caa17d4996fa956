"""Layouts of a table: which rank holds which chunks, and the interface by which a package declares layouts.

Placements shard a tensor dim like ``torch.chunk``. Layouts of recommender systems do not: rows in any split, several
column blocks on one rank, a whole table on one rank. Only their chunks describe them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from verifier.core.case import OpCase
from verifier.core.entry_points import load_entry_points

__all__ = ["ENTRY_POINT_GROUP", "Chunk", "LayoutOptions", "LayoutSource", "TableLayout", "installed_layouts"]

ENTRY_POINT_GROUP = "dtensor_verifier.layouts"


@dataclass(frozen=True, order=True)
class Chunk:
    """A box of a table: rows and columns as half-open ranges.

    >>> str(Chunk((1, 4), (0, 2)))
    '[1:4, 0:2]'
    """

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def offsets(self) -> tuple[int, int]:
        return self.rows[0], self.columns[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def empty(self) -> bool:
        return min(self.shape) <= 0

    def __str__(self) -> str:
        return f"[{self.rows[0]}:{self.rows[1]}, {self.columns[0]}:{self.columns[1]}]"


@dataclass(frozen=True)
class TableLayout:
    """Which rank holds which chunks of a table of ``shape`` [rows, columns].

    Parameters
    ----------
    chunks
        The chunks of each rank, without empty chunks.
    replicated
        Whether every rank has all of the table; otherwise one rank has each element.
    ranks_per_host
        Ranks that count as one host; 0 if hosts do not matter.
    placement
        The placement of the DTensor, as ``S(0)``. It need not match the chunks.
    """

    name: str
    shape: tuple[int, int]
    chunks: tuple[tuple[Chunk, ...], ...]
    replicated: bool = False
    ranks_per_host: int = 0
    placement: str = "S(0)"

    @property
    def ranks(self) -> int:
        return len(self.chunks)

    def host(self, rank: int) -> int | None:
        """Return the host of ``rank``; None if hosts do not matter."""
        return rank // self.ranks_per_host if self.ranks_per_host else None


@dataclass(frozen=True)
class LayoutOptions:
    """Options of a layout. Each layout takes some of the options after ``ranks`` and refuses the others.

    Parameters
    ----------
    splits
        Rows of each rank, in order; None for the layout's default.
    owners
        Ranks that hold the column blocks, in order. In a grid these are hosts. A layout with one block has one owner.
    ranks_per_host
        How many ranks in a row share a host.
    """

    rows: int
    columns: int
    ranks: int
    splits: tuple[int, ...] | None = None
    owners: tuple[int, ...] | None = None
    ranks_per_host: int | None = None


@runtime_checkable
class LayoutSource(Protocol):
    """Layouts that a package declares."""

    @property
    def name(self) -> str:
        """Name of the source, such as ``torchrec``."""
        ...

    def summaries(self) -> Mapping[str, str]:
        """Return a short description of each layout, by the name of the layout."""
        ...

    def make(self, name: str, options: LayoutOptions) -> TableLayout:
        """Return the layout called ``name``.

        Raises
        ------
        ValueError
            If there is no such layout (the message has the nearest name), or if an option does not fit.
        """
        ...

    def case(self, name: str, options: LayoutOptions) -> OpCase:
        """Return a case that checks the layout on a mesh of ``options.ranks``: chunks, lookup, training, checkpoint."""
        ...


def installed_layouts() -> dict[str, LayoutSource]:
    """Return every source that an installed package declares under ``dtensor_verifier.layouts``, by name.

    Raises
    ------
    TypeError
        If an entry point loads something that is not a :class:`LayoutSource`.
    """
    return load_entry_points(ENTRY_POINT_GROUP, LayoutSource)  # type: ignore[type-abstract]
