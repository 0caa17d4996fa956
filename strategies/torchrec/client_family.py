"""The family ``torchrec``: collections of tables, sharded by TorchRec and compared with the unsharded collection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.tensors import dim_sizes, filled, rarely, seeds
from strategies.torchrec.client import TRAIN_BAGS, keys_of
from verifier.core.case import OpCase, Trial
from verifier.core.verdict import Verdict
from verifier.planning.boundary import declares
from verifier.planning.families import DrawContext, ReplicatedFamily

__all__ = [
    "COLLECTION",
    "FAMILY",
    "MEAN_BESIDE",
    "MEAN_IN_GRID",
    "MISSING",
    "TorchRecFamily",
    "collection_case",
    "collection_cases",
    "installed",
    "op_of",
]

COLLECTION = "torchrec.EmbeddingBagCollection"
MEAN_BESIDE = "torchrec.EmbeddingBagCollection.mean_by_rows_beside_others"
MEAN_IN_GRID = "torchrec.EmbeddingBagCollection.mean_in_grid"
MISSING = (
    "the family torchrec needs torchrec 1.8.0 and fbgemm-gpu-cpu 1.8.0: install the extra `torchrec`, then "
    "`pip install --no-deps torchrec==1.8.0`; see docs/guides/layouts.md"
)
_COLUMNS = (4, 8, 16)
"""Columns of tables: fbgemm's kernels need multiples of 4, also in each column block."""
_WIDE = 256
"""Least number of columns that ``grid_shard`` of torchrec 1.8.0 splits into two blocks."""
_BY_ROWS = ("row_wise", "table_row_wise")
_OTHERS = ("data_parallel", "table_wise", "column_wise")
_KINDS = (*_OTHERS, *_BY_ROWS, "grid_shard")


def installed() -> bool:
    """Return whether torchrec and its kernels are installed; imports neither."""
    return find_spec("torchrec") is not None and find_spec("fbgemm_gpu") is not None


def op_of(pooling: Sequence[str], plan: Sequence[Sequence[Any]], features: Sequence[Sequence[int]]) -> str:
    """Return the op of a collection. Two kinds that TorchRec 1.8.0 gets wrong are ops of their own, to hide no others.

    The first kind has a row-sharded mean beside a table that is not row-sharded, or that shares a feature and is a sum.

    >>> plan = [["row_wise", {}, "dense"], ["table_wise", {"rank": 0}, "dense"]]
    >>> op_of(["MEAN", "SUM"], plan, [[0], [1]]) == MEAN_BESIDE
    True
    """
    tables = list(zip([entry[0] for entry in plan], pooling, features, strict=True))
    if any(kind == "grid_shard" and how == "MEAN" for kind, how, _ in tables):
        return MEAN_IN_GRID
    means = [set(some) for kind, how, some in tables if kind in _BY_ROWS and how == "MEAN"]
    others = any(kind not in _BY_ROWS for kind, _, _ in tables)
    shared = any(mean & set(some) for mean in means for _, how, some in tables if how == "SUM")
    return MEAN_BESIDE if means and (others or shared) else COLLECTION


@st.composite
def _plan_entries(draw: st.DrawFn, kinds: Sequence[str], columns: int, ranks: int, per_host: int) -> list[Any]:
    """Return a generator of plan entries of one table: a function of TorchRec, its options, and the compute kernel.

    ``row_wise(sizes_placement=...)``, for any splits, is not drawn: TorchRec 1.8.0 supports it only for inference.
    """
    hosts = ranks // per_host
    kind = draw(st.sampled_from(kinds))
    options: dict[str, Any] = {}
    if kind == "table_wise":
        options["rank"] = draw(st.integers(0, ranks - 1))
    elif kind == "column_wise":
        blocks = draw(st.sampled_from([count for count in (1, 2, 4) if columns % (4 * count) == 0]))
        options["ranks"] = draw(st.lists(st.integers(0, ranks - 1), min_size=blocks, max_size=blocks))
    elif kind == "table_row_wise":
        options["host_index"] = draw(st.integers(0, hosts - 1))
    elif kind == "grid_shard":
        options["host_indexes"] = draw(st.permutations(range(hosts)))[: 2 if columns == _WIDE else 1]
    return [kind, options, draw(st.sampled_from(("dense", "fused")))]


def collection_case(
    shapes: list[tuple[int, int]],
    features: list[list[int]],
    pooling: list[str],
    plan: list[list[Any]],
    lengths: list[list[int]],
    ranks_per_host: int,
    seed: int = 0,
) -> OpCase:
    """Return the case of a collection of tables of ``shapes``; ids, values and cotangents come from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    rows_of = {f: min(shapes[t][0] for t, some in enumerate(features) if f in some) for some in features for f in some}
    columns_of = {
        key: shapes[table][1]
        for table, some in enumerate(features)
        for feature in some
        for key in (f"f{feature}", f"f{feature}@t{table}")
    }
    ids = [torch.randint(rows_of[f], (sum(some),), generator=generator) for f, some in enumerate(lengths)]
    bags = len(lengths[0])
    arguments: dict[str, object] = {
        "tables": [filled(shape, torch.float32, seed + number) for number, shape in enumerate(shapes)],
        "ids": ids,
        "lengths": [torch.tensor(some, dtype=torch.int64) for some in lengths],
        "cotangents": [
            filled((bags, columns_of[key]), torch.float32, seed + 7 * number)
            for number, key in enumerate(keys_of(features))
        ],
        "features": features,
        "pooling": pooling,
        "plan": plan,
        "ranks_per_host": ranks_per_host,
    }
    tags = {
        "mixed pooling": len(set(pooling)) > 1,
        "mixed sharding": len({entry[0] for entry in plan}) > 1,
        "shared feature": any("@" in key for key in keys_of(features)),
        "empty bag": any(0 in some for some in lengths),
        "uneven rows": any(rows % 2 for rows, _ in shapes),
    }
    found = frozenset(tag for tag, seen in tags.items() if seen)
    return OpCase(op_of(pooling, plan, features), TRAIN_BAGS, (), arguments, FAMILY.name, False, found)


@st.composite
def collection_cases(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Return a generator of collections of one to three tables over the ranks of ``context``."""
    op, ranks = draw(st.sampled_from(context.ops)), context.mesh.world_size
    per_host = draw(st.sampled_from([count for count in range(1, ranks + 1) if ranks % count == 0][::-1]))
    count = draw(st.integers(2 if op == MEAN_BESIDE else 1, 3))
    shapes, pooling, plan = [], [], []
    by_rows = op == COLLECTION and draw(st.booleans())  # only then may all tables be row-sharded means
    for number in range(count):
        wide = per_host < ranks and draw(rarely(8))
        columns = _WIDE if wide else draw(st.sampled_from(_COLUMNS))
        kinds: tuple[str, ...] = _BY_ROWS if by_rows else _KINDS
        how = draw(st.sampled_from(("SUM", "MEAN")))
        if op == MEAN_IN_GRID and not number:
            kinds, how = ("grid_shard",), "MEAN"
        elif op == MEAN_BESIDE and number < 2:
            kinds, how = (_BY_ROWS, "MEAN") if number else (_OTHERS, how)
        entry = draw(_plan_entries(kinds, columns, ranks, per_host))
        # the other two ops draw these combinations
        grid, rows = entry[0] == "grid_shard" and op != MEAN_IN_GRID, entry[0] in _BY_ROWS and op != MEAN_BESIDE
        if grid or (rows and not by_rows):
            how = "SUM"
        shapes.append((draw(dim_sizes(ranks, smallest=1)), columns))
        pooling.append(how)
        plan.append(entry)
    features: list[list[int]] = []
    known = 0
    for _ in range(count):
        own = list(range(known, known + draw(st.integers(1, 2))))
        known += len(own)
        if own[0] and draw(st.booleans()) and not (by_rows and len(set(pooling)) > 1):
            own.append(draw(st.integers(0, own[0] - 1)))
        features.append(own)
    bags = ranks * draw(st.integers(1, 2))
    lengths = [draw(st.lists(st.integers(0, 3), min_size=bags, max_size=bags)) for _ in range(known)]
    return collection_case(shapes, features, pooling, plan, lengths, per_host, draw(seeds()))


@dataclass(frozen=True)
class TorchRecFamily(ReplicatedFamily):
    """TorchRec's ``EmbeddingBagCollection``, drawn only if a pattern names it, on gloo meshes of one dim."""

    name: str = "torchrec"
    ops: tuple[str, ...] = (COLLECTION, MEAN_BESIDE, MEAN_IN_GRID)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    @property
    def shrinks(self) -> bool:
        """Whether Hypothesis shrinks drawn cases: no, because a trial takes too long."""
        return False

    def left_out(self, context: DrawContext) -> tuple[tuple[str, str], ...]:
        """Return all ops if torchrec is not installed: a glob may select them in a run that has many others."""
        return () if installed() else tuple((op, MISSING) for op in context.ops)

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases, which draws none if torchrec is not installed; see :func:`collection_cases`."""
        context.check(self.ops)
        return collection_cases(context) if installed() else st.nothing()

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return the key or table of the first wrong output, with its sharding and pooling."""
        arguments: Any = trial.case.kwargs
        keys = keys_of(arguments["features"])
        found = re.search(r"output (\d+)", verdict.subject)
        if found is None:
            return ""
        number = int(found[1])
        key = keys[number] if number < len(keys) else ""
        table = number - len(keys)
        if key:
            feature = int(key.split("@")[0][1:])
            holders = [t for t, some in enumerate(arguments["features"]) if feature in some]
            table = int(key.split("@t")[1]) if "@" in key else holders[0]
        (name, _, kernel), pooling = arguments["plan"][table], arguments["pooling"][table]
        what = f"key {key} of table t{table}" if key else f"table t{table} after the step"
        return f"output {number} is {what}, {pooling}, {name}, kernel {kernel}"


def _check_plan(case: OpCase) -> tuple[str, ...]:
    plan: Any = case.kwargs["plan"]
    for kind, *_ in plan:
        if kind not in _KINDS:
            raise ValueError(f"{kind!r} is no way to shard a table")
    return ()


declares(TRAIN_BAGS, _check_plan)
FAMILY = TorchRecFamily()
