"""Generators of calls of ``torch.nn.functional.embedding_bag``."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.indices import index_tensors, padding_indices
from strategies.tensors import Layout, dim_sizes, filled, layouts, rarely, seeds, shard_classes
from verifier.core.case import OpCase
from verifier.planning.boundary import declares
from verifier.planning.families import DrawContext

__all__ = ["BAG", "FORWARD_ONLY", "INPUT_CLASSES", "SCALED", "TRAINED", "bag_cases"]

TRAINED = "aten._embedding_bag.default"
FORWARD_ONLY = "aten._embedding_bag_forward_only.default"
BAG = "torch.nn.functional.embedding_bag"
SCALED = "strategies.embedding_bag.programs.scaled"
declares(SCALED)

TIES = 2
"""Largest magnitude of a table's entries under mode max, so that several rows of a bag have the maximum."""

INPUT_CLASSES = frozenset({
    "bags of one size", "empty bag", "even bag shard", "even index shard", "even shard", "empty bag shard",
    "empty index shard", "empty shard", "ids of two dims", "include_last_offset", "int32 ids", "max", "mean",
    "negative padding_idx", "no grad", "no ids", "non-contiguous weight", "out-of-range ids", "padding id looked up",
    "padding_idx", "per_sample_weights", "row in several bags", "scale_grad_by_freq", "sum", "uneven bag shard",
    "uneven index shard", "uneven shard",
})  # fmt: skip
"""Every tag that a case of this family can have. Shards without a qualifier are shards of the table's rows."""


def bag_cases(context: DrawContext) -> SearchStrategy[OpCase]:
    """Return a generator of calls that reach the ops in ``context``, with or without a gradient of the table.

    Shrinks to the sum of one bag of row 0 in a table ``[1, 1]`` of the first dtype. On a CPU about one call in twenty
    is illegal, with an id out of range. On a GPU such an id would abort the process.

    Raises
    ------
    ValueError
        If ``context`` names no op or no dtype.
    """
    context.check({TRAINED, FORWARD_ONLY})
    return _bags(context)


@st.composite
def _bags(draw: st.DrawFn, context: DrawContext) -> OpCase:
    ranks = context.mesh.world_size
    mode = draw(st.sampled_from(["sum", "sum", "mean", "max", "max"]))
    hazards = ["out of range"] if context.mesh.device == "cpu" else []
    features = {"sum": ["samples"] * 6 + ["scale"] * 2, "mean": ["scale"] * 3, "max": []}[mode]
    feature = draw(st.sampled_from([*["none"] * 10, *features, *hazards]))
    dtype = draw(st.sampled_from(context.dtypes))
    rows = draw(dim_sizes(ranks, smallest=1))
    columns = draw(dim_sizes(ranks, smallest=1, largest=max(5, ranks + 1)))
    layout = draw(layouts(trainable=True))
    if len(context.ops) == 1:
        layout = Layout(layout.contiguous, context.ops[0] == TRAINED, layout.parameter)
    weight = filled((rows, columns), dtype, draw(seeds()), layout)
    if mode == "max":
        with torch.no_grad():
            weight.clamp_(-TIES, TIES)
    padding_idx = draw(padding_indices(rows, ranks))

    broad = draw(st.booleans())
    shape = draw(st.sampled_from(_shapes(ranks, broad=broad)))
    wrong = feature == "out of range" and 0 not in shape
    favoured = [] if padding_idx is None else [padding_idx % rows]
    ids = draw(index_tensors(rows, shape, ranks, favoured=favoured, out_of_range=wrong))
    arguments: dict[str, object] = {"weight": weight, "input": ids, "mode": mode}
    if broad:
        edges = [bag * shape[1] for bag in range(shape[0] + 1)]
    else:
        starts = draw(_starts(ids.shape[0], ranks))
        edges = [*starts, ids.shape[0]]
        last = feature != "scale" and draw(rarely(3))
        arguments["offsets"] = torch.tensor(edges if last else starts, dtype=ids.dtype)
        if last:
            arguments["include_last_offset"] = True
    if padding_idx is not None:
        arguments["padding_idx"] = padding_idx
    if feature == "samples":
        arguments["per_sample_weights"] = filled(tuple(ids.shape), dtype, draw(seeds()), draw(layouts(trainable=True)))

    tags = _tags(context, arguments, edges, rows) | {mode}
    if wrong:
        tags.add("out-of-range ids")
    op = TRAINED if weight.requires_grad else FORWARD_ONLY
    if feature == "scale":
        return OpCase(op, SCALED, (), arguments, "embedding_bag", False, frozenset(tags | {"scale_grad_by_freq"}))
    exact = mode != "mean" and not (feature == "samples" and weight.element_size() < 4)
    return OpCase(op, BAG, (), arguments, "embedding_bag", exact, frozenset(tags))


def _shapes(ranks: int, *, broad: bool) -> list[tuple[int, ...]]:
    """Return shapes of ids, the smallest first: ``[bags, size]`` if ``broad``, else 1-d.

    2-d ids are flattened before the op. 2-d shapes without elements are left out, because torch 2.13.0 never finishes
    flattening a DTensor ``[0, n]``: each trial would end as a hang.
    """
    if broad:
        return [(1, 1), (1, 3), (2, 3), (3, 2), (ranks, 1), (ranks, 3), (ranks + 1, 2), (2 * ranks, 2)]
    return [(size,) for size in (1, 2, 5, 7, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks, 0)]


@st.composite
def _starts(draw: st.DrawFn, ids: int, ranks: int) -> list[int]:
    """Return where bags start, 0 first. Some bags start at the same position or at the end, so some are empty."""
    bags = draw(st.sampled_from([1, 2, 3, 5, ranks, ranks + 1, 2 * ranks]))
    return [0, *sorted(draw(st.lists(st.integers(0, ids), min_size=bags - 1, max_size=bags - 1)))]


def _tags(context: DrawContext, arguments: dict[str, object], edges: list[int], rows: int) -> set[str]:
    weight, ids, padding_idx = arguments["weight"], arguments["input"], arguments.get("padding_idx")
    assert isinstance(weight, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    assert padding_idx is None or isinstance(padding_idx, int)
    flat = ids.flatten().tolist()
    bags = [set(flat[start:stop]) for start, stop in pairwise(edges)]
    found = {
        "bags of one size": len({stop - start for start, stop in pairwise(edges)}) == 1,
        "empty bag": any(not bag for bag in bags),
        "ids of two dims": ids.ndim == 2,
        "include_last_offset": "include_last_offset" in arguments,
        "int32 ids": ids.dtype == torch.int32,
        "no grad": not weight.requires_grad,
        "no ids": not flat,
        "non-contiguous weight": not weight.is_contiguous(),
        "padding_idx": padding_idx is not None,
        "negative padding_idx": padding_idx is not None and padding_idx < 0,
        "padding id looked up": padding_idx is not None and padding_idx % rows in flat,
        "per_sample_weights": "per_sample_weights" in arguments,
        "row in several bags": sum(map(len, bags)) > len(set().union(*bags)),
    }
    tags = {tag for tag, holds in found.items() if holds}
    tags |= set(shard_classes(rows, context.mesh.shape))
    for size, what in ((len(flat), "index"), (len(bags), "bag")):
        tags |= {f"{kind.split()[0]} {what} shard" for kind in shard_classes(size, context.mesh.shape)}
    return tags
