"""The eight layouts of TorchRec's embedding tables over ranks, as chunks without tensors.

The chunks follow the source of torchrec 1.8.0 (``distributed/sharding``). The placement of each layout is the one that
TorchRec gives its DTensor. This placement matches the chunks only for the layouts by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

from strategies.layouts.tables import Chunk, LayoutOptions, TableLayout
from verifier.core.wording import did_you_mean, plural

__all__ = ["LAYOUTS", "LayoutKind", "make_layout"]

Range = tuple[int, int]
_MOST_ELEMENTS = (1 << 63) - 1


def make_layout(name: str, options: LayoutOptions) -> TableLayout:
    """Return the layout called ``name`` of a table [``options.rows``, ``options.columns``].

    Raises
    ------
    ValueError
        If there is no such layout or an option does not fit. The message has the nearest name or a value that fits.

    >>> layout = make_layout("row-wise-uneven", LayoutOptions(8, 2, 4, splits=(1, 3, 1, 3)))
    >>> [str(chunk) for chunks in layout.chunks for chunk in chunks]
    ['[0:1, 0:2]', '[1:4, 0:2]', '[4:5, 0:2]', '[5:8, 0:2]']
    """
    if name not in LAYOUTS:
        hint = did_you_mean(name, LAYOUTS) or f"; layouts are {', '.join(LAYOUTS)}"
        raise ValueError(f"no layout is called {name!r}{hint}")
    kind = LAYOUTS[name]
    for field, least in (("rows", 1), ("columns", 1), ("ranks", 1)):
        if getattr(options, field) < least:
            raise ValueError(f"{field}={getattr(options, field)} must be at least {least}")
    if options.rows * options.columns > _MOST_ELEMENTS:
        raise ValueError(
            f"rows={options.rows} and columns={options.columns} make more elements than a tensor can have; use "
            f"{_MOST_ELEMENTS} at most"
        )
    for field in ("splits", "owners", "ranks_per_host"):
        if getattr(options, field) is not None and field not in kind.takes:
            takers = [other for other, one in LAYOUTS.items() if field in one.takes]
            raise ValueError(f"{name} takes no {field}={getattr(options, field)!r}; it is for {', '.join(takers)}")
    held = kind.cut(options)
    return TableLayout(
        name,
        (options.rows, options.columns),
        tuple(tuple(chunk for chunk in chunks if not chunk.empty) for chunks in held),
        kind.replicated,
        _per_host(options) if "ranks_per_host" in kind.takes else 0,
        kind.placement,
    )


# ------------------------------------------------------------------------------------------------------------- cutting
def _blocks(size: int, parts: int) -> list[Range]:
    """Return blocks of ceil(size / parts): 10 over 4 is 3, 3, 3, 1; 5 over 4 is 2, 2, 1, 0."""
    width = -(-size // parts)
    return [(min(part * width, size), min((part + 1) * width, size)) for part in range(parts)]


def _equal(columns: int, parts: int, most: int | None = None) -> list[Range]:
    """Return ``parts`` equal blocks. If there are none, the message names a count that fits, at most ``most``."""
    if columns % parts:
        # counts in order of distance from ``parts``; 1 always fits
        near = (count for step in range(1, parts) for count in (parts - step, parts + step))
        nearest = next(count for count in near if columns % count == 0 and (most is None or count <= most))
        raise ValueError(
            f"{plural(columns, 'column')} cannot be cut into {plural(parts, 'equal block')}; {nearest} would do, "
            f"with {plural(nearest, 'owner')}"
        )
    width = columns // parts
    return [(part * width, (part + 1) * width) for part in range(parts)]


def _per_host(options: LayoutOptions) -> int:
    per_host = options.ranks_per_host
    if per_host is None:
        return 2 if options.ranks % 2 == 0 and options.ranks > 2 else options.ranks
    if per_host < 1 or options.ranks % per_host:
        fitting = [str(count) for count in range(1, options.ranks + 1) if options.ranks % count == 0]
        raise ValueError(
            f"ranks_per_host={per_host} does not divide {plural(options.ranks, 'rank')}; use {', '.join(fitting)}"
        )
    return per_host


def _owners(options: LayoutOptions, known: Sequence[int], what: str, default: Sequence[int]) -> Sequence[int]:
    owners = default if options.owners is None else options.owners
    if not owners:
        raise ValueError(f"owners is empty; name at least one {what} of {_listed(known)}")
    for owner in owners:
        if owner not in known:
            raise ValueError(f"owners={list(owners)}: there is no {what} {owner}; use {_listed(known)}")
    return owners


def _listed(known: Sequence[int]) -> str:
    return f"{known[0]} to {known[-1]}" if len(known) > 1 else str(known[0])


def _one_owner(options: LayoutOptions, known: Sequence[int], what: str) -> int:
    owners = _owners(options, known, what, known[:1])
    if len(owners) != 1:
        raise ValueError(f"owners={list(owners)}: this layout has one {what} as its owner")
    return owners[0]


def _dividing_ranks(columns: int, ranks: Sequence[int]) -> Sequence[int]:
    """Return the first of ``ranks``: the largest number of them among which the columns divide equally."""
    return ranks[: max(count for count in range(1, len(ranks) + 1) if columns % count == 0)]


def _no_chunks(options: LayoutOptions) -> list[list[Chunk]]:
    return [[] for _ in range(options.ranks)]


def _row_wise_even(options: LayoutOptions) -> list[list[Chunk]]:
    return [[Chunk(rows, (0, options.columns))] for rows in _blocks(options.rows, options.ranks)]


def _row_wise_uneven(options: LayoutOptions) -> list[list[Chunk]]:
    splits = options.splits
    if splits is None:  # every other rank has three times the rows
        shares = list(accumulate((1 + 2 * (rank % 2) for rank in range(options.ranks)), initial=0))
        splits = tuple(b - a for a, b in pairwise(options.rows * share // shares[-1] for share in shares))
    if len(splits) != options.ranks:
        raise ValueError(f"splits={list(splits)} has {plural(len(splits), 'part')}; there are {options.ranks} ranks")
    if min(splits) < 0 or sum(splits) != options.rows:
        raise ValueError(f"splits={list(splits)} must be counts that add up to {options.rows} rows, not {sum(splits)}")
    ends = list(accumulate(splits, initial=0))
    return [[Chunk(rows, (0, options.columns))] for rows in pairwise(ends)]


def _table_wise(options: LayoutOptions) -> list[list[Chunk]]:
    held = _no_chunks(options)
    held[_one_owner(options, range(options.ranks), "rank")].append(Chunk((0, options.rows), (0, options.columns)))
    return held


def _by_columns(options: LayoutOptions, owners: Sequence[int]) -> list[list[Chunk]]:
    held = _no_chunks(options)
    for owner, columns in zip(owners, _equal(options.columns, len(owners)), strict=True):
        held[owner].append(Chunk((0, options.rows), columns))
    return held


def _column_wise(options: LayoutOptions) -> list[list[Chunk]]:
    ranks = range(options.ranks)
    return _by_columns(options, _owners(options, ranks, "rank", _dividing_ranks(options.columns, ranks)))


def _table_column_wise(options: LayoutOptions) -> list[list[Chunk]]:
    per_host, ranks = _per_host(options), range(options.ranks)
    owners = _owners(options, ranks, "rank", _dividing_ranks(options.columns, ranks[:per_host]))
    if len({owner // per_host for owner in owners}) > 1:
        raise ValueError(f"owners={list(owners)} are on several hosts of {plural(per_host, 'rank')}; use those of one")
    return _by_columns(options, owners)


def _table_row_wise(options: LayoutOptions) -> list[list[Chunk]]:
    per_host = _per_host(options)
    host = _one_owner(options, range(options.ranks // per_host), "host")
    held = _no_chunks(options)
    for local, rows in enumerate(_blocks(options.rows, per_host)):
        held[host * per_host + local].append(Chunk(rows, (0, options.columns)))
    return held


def _grid(options: LayoutOptions) -> list[list[Chunk]]:
    per_host = _per_host(options)
    hosts = range(options.ranks // per_host)
    owners = _owners(options, hosts, "host", _dividing_ranks(options.columns, hosts))
    if len(set(owners)) < len(owners):
        raise ValueError(f"owners={list(owners)}: a host holds one column block of a grid")
    held = _no_chunks(options)
    for host, columns in zip(owners, _equal(options.columns, len(owners), len(hosts)), strict=True):
        for local, rows in enumerate(_blocks(options.rows, per_host)):
            held[host * per_host + local].append(Chunk(rows, columns))
    return held


def _data_parallel(options: LayoutOptions) -> list[list[Chunk]]:
    return [[Chunk((0, options.rows), (0, options.columns))] for _ in range(options.ranks)]


# ------------------------------------------------------------------------------------------------------------ the list
@dataclass(frozen=True)
class LayoutKind:
    """A kind of layout: ``cut`` returns its chunks, ``takes`` are the options that not all layouts take."""

    summary: str
    cut: Callable[[LayoutOptions], list[list[Chunk]]]
    placement: str
    takes: tuple[str, ...] = ()
    replicated: bool = False


LAYOUTS: dict[str, LayoutKind] = {
    "row-wise-even": LayoutKind("blocks of ceil(rows / ranks) rows, the last ones empty", _row_wise_even, "S(0)"),
    "row-wise-uneven": LayoutKind("any split of the rows, in order of ranks", _row_wise_uneven, "S(0)", ("splits",)),
    "table-wise": LayoutKind("the whole table on one rank", _table_wise, "R", ("owners",)),
    "column-wise": LayoutKind("equal column blocks, several of them on one rank", _column_wise, "S(1)", ("owners",)),
    "table-column-wise": LayoutKind(
        "equal column blocks within one host", _table_column_wise, "S(1)", ("owners", "ranks_per_host")
    ),
    "table-row-wise": LayoutKind(
        "blocks of ceil(rows / ranks of a host) rows within one host", _table_row_wise, "S(1)",
        ("owners", "ranks_per_host"),
    ),
    "grid": LayoutKind(
        "column blocks over hosts, blocks of rows within a host", _grid, "S(1)", ("owners", "ranks_per_host")
    ),
    "data-parallel": LayoutKind("all of the table on every rank", _data_parallel, "R", replicated=True),
}  # fmt: skip

assert {name for kind in LAYOUTS.values() for name in kind.takes} <= {field.name for field in fields(LayoutOptions)}
