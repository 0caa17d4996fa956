"""The family of TorchRec's layouts, and the same layouts for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.layouts.tables import LayoutOptions, TableLayout
from strategies.tensors import dim_sizes, filled, rarely, seeds
from strategies.torchrec.layouts import LAYOUTS, make_layout
from strategies.torchrec.programs import TRAIN
from verifier.core.case import OpCase
from verifier.planning.families import DrawContext, ReplicatedFamily

__all__ = ["FAMILY", "SOURCE", "LayoutFamily", "TorchRecLayouts", "layout_cases", "layout_options", "training_case"]

_PREFIX = "layout."
_TRAININGS = (("sum", "sgd"), ("mean", "sgd"), ("sum", "adagrad"))
"""Modes and optimisers, without mean and Adagrad: it divides by magnitudes, so rounding decides if means cancel."""


def _entry(name: str, options: LayoutOptions) -> list[object]:
    """Return a layout as an argument of :func:`strategies.torchrec.programs.train`."""
    given = {key: getattr(options, key) for key in ("splits", "owners", "ranks_per_host")}
    return [name, {key: list(v) if isinstance(v, tuple) else v for key, v in given.items() if v is not None}]


def training_case(
    layout: list[object],
    target: list[object],
    shape: tuple[int, int],
    lengths: list[int],
    seed: int = 0,
    mode: str = "sum",
    optimizer: str = "sgd",
) -> OpCase:
    """Return a case that trains a table of ``shape`` in ``layout`` for a step and loads its checkpoint into ``target``.

    Values are small integers, and ids come from all rows; ``seed`` fixes both.
    """
    generator = torch.Generator().manual_seed(seed)
    # No row repeats before all rows occur, so that every chunk contributes to the result if there are enough ids.
    rows = torch.cat([torch.randperm(shape[0], generator=generator) for _ in range(-(-sum(lengths) // shape[0]) or 1)])
    arguments: dict[str, object] = {
        "table": filled(shape, torch.float32, seed),
        "ids": rows[: sum(lengths)],
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "cotangent": filled((len(lengths), shape[1]), torch.float32, seed + 1),
        "layout": layout,
        "target": target,
        "mode": mode,
        "optimizer": optimizer,
    }
    exact = mode == "sum" and optimizer == "sgd"
    return OpCase(f"{_PREFIX}{layout[0]}", TRAIN, (), arguments, FAMILY.name, exact)


# --------------------------------------------------------------------------------------------------------------- drawn
@st.composite
def layout_options(draw: st.DrawFn, name: str, rows: int, columns: int, ranks: int) -> LayoutOptions:
    """Return a generator of options that the layout ``name`` takes; shrinks to the layout's defaults."""
    takes = LAYOUTS[name].takes
    per_host = splits = owners = None
    if "ranks_per_host" in takes:
        per_host = draw(st.sampled_from([count for count in range(1, ranks + 1) if ranks % count == 0][::-1]))
    if "splits" in takes:
        cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
        splits = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, rows], strict=True))
    if "owners" in takes and not draw(rarely(3)):
        per_host_or_one = per_host or 1
        hosts = ranks // per_host_or_one
        known = range(ranks)
        if name == "table-column-wise":
            first = draw(st.integers(0, hosts - 1)) * per_host_or_one
            known = range(first, first + per_host_or_one)
        elif name in ("table-row-wise", "grid"):
            known = range(hosts)
        blocks = [count for count in range(1, columns + 1) if columns % count == 0]
        if name in ("table-wise", "table-row-wise"):
            blocks = [1]
        if name == "grid":
            blocks = [count for count in blocks if count <= hosts]
        count = draw(st.sampled_from(blocks))
        # a grid has at most one column block per host, because a rank has one chunk of a block
        owners = tuple(draw(st.lists(st.sampled_from(known), min_size=count, max_size=count, unique=name == "grid")))
    return LayoutOptions(rows, columns, ranks, splits, owners, per_host)


@st.composite
def layout_cases(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Return a generator of cases: a layout of ``context``, a checkpoint into any layout, and bags, some empty."""
    ranks = context.mesh.world_size
    rows, columns = draw(dim_sizes(ranks, smallest=1)), draw(st.sampled_from((2, 4, 6, 1)))
    name = draw(st.sampled_from(context.ops)).removeprefix(_PREFIX)
    target = draw(st.sampled_from(tuple(LAYOUTS)))
    options, others = (draw(layout_options(one, rows, columns, ranks)) for one in (name, target))
    lengths = draw(st.lists(st.sampled_from((1, 2, 0, 5)), min_size=1, max_size=2 * ranks + 1))
    if not sum(lengths):
        lengths[0] = 1
    case = training_case(
        _entry(name, options), _entry(target, others), (rows, columns), lengths, draw(seeds()),
        *draw(st.sampled_from(_TRAININGS)),
    )  # fmt: skip
    return _tagged(case, make_layout(name, options), lengths)


def _tagged(case: OpCase, layout: TableLayout, lengths: list[int]) -> OpCase:
    tags = {
        "several chunks on a rank": any(len(chunks) > 1 for chunks in layout.chunks),
        "rank without chunks": not all(layout.chunks),
        "chunks of several sizes": len({chunk.shape for chunks in layout.chunks for chunk in chunks}) > 1,
        "empty bag": 0 in lengths,
    }
    found = frozenset(tag for tag, seen in tags.items() if seen)
    return OpCase(case.op, case.call, case.args, case.kwargs, case.family, case.exact, found)


@dataclass(frozen=True)
class LayoutFamily(ReplicatedFamily):
    """TorchRec's layouts as ops of our own, such as ``layout.row-wise-even``; drawn only if a pattern names them."""

    name: str = "layouts"
    ops: tuple[str, ...] = tuple(f"{_PREFIX}{name}" for name in LAYOUTS)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`layout_cases`."""
        context.check(self.ops)
        return layout_cases(context)


@dataclass(frozen=True)
class TorchRecLayouts:
    """TorchRec's layouts as a :class:`strategies.layouts.tables.LayoutSource`."""

    name: str = "torchrec"

    def summaries(self) -> Mapping[str, str]:
        """Return a short description of each layout, by name."""
        return {name: kind.summary for name, kind in LAYOUTS.items()}

    def make(self, name: str, options: LayoutOptions) -> TableLayout:
        """Return a layout; see :func:`strategies.torchrec.layouts.make_layout`."""
        return make_layout(name, options)

    def case(self, name: str, options: LayoutOptions) -> OpCase:
        """Return a case of two bags per rank, every other bag empty, with ids of all rows and a row-wise checkpoint."""
        share = -(-options.rows // options.ranks)
        lengths = [share, 0] * options.ranks
        return training_case(
            _entry(name, options), ["row-wise-even", {}], (options.rows, options.columns), lengths
        )  # fmt: skip


FAMILY = LayoutFamily()
SOURCE = TorchRecLayouts()
