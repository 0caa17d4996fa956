"""The ops that an embedding bag is made of, each with communication-free rules and the kernel that they hold for.

A bag is a span of positions in the indices, from ``starts`` to ``stops``; bags follow each other. Offsets alone would
not do: a rank that has some of the bags would need to know where the next rank's bags start. The ops are operators of
the library ``sharded_rows``, so DTensor takes products of their rules over mesh dims, as for any op.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.embedding.sharding import LINEAR, check_ids, comparable_ids, divided_by_counts
from strategies.library import sharded_op
from verifier.torch_internals.sharded_ops import RankView

__all__ = ["BAG_OPS"]

aten = torch.ops.aten
R, S0, S1 = Replicate(), Shard(0), Shard(1)
SUM, MAX, MIN = Partial("sum"), Partial("max"), Partial("min")
MODE_SUM, MODE_MAX = 0, 2

BagRule = list[Placement | None]


def _given(rules: Iterable[BagRule], args: tuple[object, ...], tensors: int) -> list[BagRule]:
    """Return the rules without the placements of arguments that are None, among the first ``tensors`` arguments."""
    missing = {1 + number for number, arg in enumerate(args[:tensors]) if arg is None}
    return [[p for number, p in enumerate(rule) if number not in missing] for rule in rules]


# ------------------------------------------------------------------------------------------------- what a rank looks up
def _looked_up(
    view: RankView,
    indices: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    padding_idx: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions that the rank looks up, and where among them its bags start ``[bags + 1]``.

    A rank looks up the positions of its bags whose id is one of its rows and is not padding. The first tensors of the
    call are weight and indices.
    """
    indices = comparable_ids(indices, view.shapes[0][0])
    check_ids(indices, view.shapes[0][0])
    first_row, last_row = view.bounds(0, 0)
    kept = (indices >= first_row) & (indices < last_row)
    if padding_idx >= 0:
        kept &= indices != padding_idx
    edges = _edges(view.bounds(1, 0)[0], kept, starts, stops)
    return kept.nonzero().squeeze(1)[int(edges[0]) : int(edges[-1])], edges - edges[0]


def _edges(first_position: int, kept: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Return how many ``kept`` positions come before the start of each bag, and before the stop of the last bag."""
    before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    spans = torch.cat([starts, stops[-1:]]).long() if starts.numel() else starts.new_zeros(1, dtype=torch.int64)
    return before[(spans - first_position).clamp(0, kept.numel())]


def _pooled(
    weight: torch.Tensor, ids: torch.Tensor, edges: torch.Tensor, mode: int, samples: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rows of each bag, pooled by aten, ``[bags, columns]``; 0 for an empty bag."""
    bags = edges.numel() - 1
    if not (weight.numel() and bags):  # aten refuses such tables
        return weight.new_zeros(bags, weight.shape[1])
    pooled = aten._embedding_bag_forward_only.default(weight, ids, edges, False, mode, False, samples, True, -1)
    return cast(torch.Tensor, pooled[0])


def _of_bags(weight: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor, *rest: object) -> torch.Tensor:
    return weight.new_empty(starts.shape[0], weight.shape[1])


# --------------------------------------------------------------------------------------------------------- sum and mean
def _sum_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[BagRule]:
    rules: list[BagRule] = [
        # result, weight, indices, starts, stops, samples, counts
        [S1, S1, R, R, R, R, R],
        [SUM, S0, R, R, R, R, R],
    ]
    # Aligned: indices and bags shard together, so each rank has the positions of its bags. Otherwise a rule shards one
    # of them only. Both kinds cannot be mixed over mesh dims: a rank would have other positions than those of its bags.
    rules += [[S0, R, S0, S0, S0, S0, S0]] if args[7] else [[S0, R, R, S0, S0, R, S0], [SUM, R, S0, R, R, S0, R]]
    rules += [[Partial(kind), Partial(kind), R, R, R, R, R] for kind in LINEAR]
    if args[4] is not None:
        rules += [[Partial(kind), R, R, R, R, Partial(kind), R] for kind in LINEAR]
    return _given(rules, args, 6)


def _sum(
    view: RankView,
    weight: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    samples: torch.Tensor | None,
    counts: torch.Tensor | None,
    padding_idx: int,
    aligned: bool,
) -> torch.Tensor:
    """Return the sum of each bag's rows, each times its sample weight if given, divided by ``counts`` if given.

    The counts are global: a rank that has a part of a bag divides its partial sum by the count of the whole bag.
    """
    chosen, edges = _looked_up(view, indices, starts, stops, padding_idx)
    ids = indices[chosen].long() - view.bounds(0, 0)[0]
    result = _pooled(weight, ids, edges, MODE_SUM, None if samples is None else samples[chosen])
    return result if counts is None else divided_by_counts(result, counts.unsqueeze(-1))


# ------------------------------------------------------------------------------------------------------------------ max
def _max_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[BagRule]:
    rules: list[BagRule] = [
        # result, weight, indices, starts, stops, counts
        [S1, S1, R, R, R, R],
        [MAX, S0, R, R, R, R],
        [MAX, MAX, R, R, R, R],
    ]
    # as for a sum
    return rules + ([[S0, R, S0, S0, S0, S0]] if args[6] else [[S0, R, R, S0, S0, S0], [MAX, R, S0, R, R, R]])


def _max(
    view: RankView,
    weight: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    counts: torch.Tensor,
    padding_idx: int,
    aligned: bool,
) -> torch.Tensor:
    """Return the largest entries of each bag's rows; 0 for an empty bag.

    If only other ranks have rows of a bag, the result is the neutral element of the maximum.
    """
    chosen, edges = _looked_up(view, indices, starts, stops, padding_idx)
    result = _pooled(weight, indices[chosen].long() - view.bounds(0, 0)[0], edges, MODE_MAX)
    elsewhere = (edges.diff() == 0) & (counts > 0)
    return result.masked_fill_(elsewhere.unsqueeze(-1), -torch.inf)


def _first_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[BagRule]:
    return [
        # result, weight, indices, starts, stops, values
        [S1, S1, R, R, R, S1],
        [MIN, S0, R, R, R, R],
        [S0, R, R, S0, S0, S0],
        [MIN, R, S0, R, R, R],
    ]


def _first(
    view: RankView,
    weight: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    values: torch.Tensor,
    padding_idx: int,
) -> torch.Tensor:
    """Return, for each bag and column, the first position whose row has ``values[bag]``; N if no row has it."""
    chosen, edges = _looked_up(view, indices, starts, stops, padding_idx)
    nowhere = view.shapes[1][0]
    result = torch.full_like(values, nowhere, dtype=torch.int64)
    if not chosen.numel():
        return result
    rows = weight[indices[chosen].long() - view.bounds(0, 0)[0]]
    bags = torch.repeat_interleave(edges.diff())
    positions = (chosen + view.bounds(1, 0)[0]).unsqueeze(-1)
    wanted = values[bags]
    found = torch.where((rows == wanted) | (rows.isnan() & wanted.isnan()), positions, nowhere)
    return result.scatter_reduce_(0, bags.unsqueeze(-1).expand_as(found), found, "amin")


# --------------------------------------------------------------------------------------------------------------- counts
def _count_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[BagRule]:
    # result, indices, starts, stops
    return [[SUM, S0, R, R], [S0, R, S0, S0]]


def _count(
    view: RankView, indices: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor, padding_idx: int
) -> torch.Tensor:
    """Return how many ids of each bag are not padding ``[bags]``."""
    return _edges(view.bounds(0, 0)[0], indices != padding_idx, starts, stops).diff()


# ------------------------------------------------------------------------------------------------------------ gradients
def _weight_gradient_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[BagRule]:
    rules: list[BagRule] = [
        # result, grad_output, indices, bags, samples
        [S1, S1, R, R, R],
        [SUM, S0, R, R, R],
        [SUM, R, S0, S0, S0],
    ]
    rules += [[Partial(kind), Partial(kind), R, R, R] for kind in LINEAR]
    if args[3] is not None:
        rules += [[Partial(kind), R, R, R, Partial(kind)] for kind in LINEAR]
    return _given(rules, args, 4)


def _weight_gradient(
    view: RankView,
    grad_output: torch.Tensor,
    indices: torch.Tensor,
    bags: torch.Tensor,
    samples: torch.Tensor | None,
    num_weights: int,
    padding_idx: int,
) -> torch.Tensor:
    """Return the gradient of the table under mode sum; ``bags`` has the bag of each position."""
    first, last = view.bounds(0, 0)
    chosen = ((bags >= first) & (bags < last)).nonzero().squeeze(1)
    rows = grad_output[bags[chosen] - first]
    if samples is not None:
        rows = rows * samples[chosen].unsqueeze(-1)
    result = aten.embedding_dense_backward.default(rows, indices[chosen], num_weights, padding_idx, False)
    return cast(torch.Tensor, result)


def _max_gradient_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[BagRule]:
    # result, grad_output, winners
    rules: list[BagRule] = [[S1, S1, S1], [SUM, S0, S0]]
    rules += [[Partial(kind), Partial(kind), R] for kind in LINEAR]
    return rules


def _max_gradient(view: RankView, grad_output: torch.Tensor, winners: torch.Tensor, num_weights: int) -> torch.Tensor:
    """Return the gradient of the table under mode max: the winning row gets all of it; -1 stands for no winner."""
    result = grad_output.new_zeros(num_weights, grad_output.shape[1])
    if not num_weights:
        return result
    return result.scatter_add_(0, winners.clamp(min=0), grad_output.masked_fill(winners < 0, 0))


def _sample_gradient_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[BagRule]:
    rules: list[BagRule] = [
        # result, grad_output, weight, indices, bags
        [SUM, S1, S1, R, R],
        [SUM, R, S0, R, R],
        [SUM, S0, R, R, R],
        [S0, R, R, S0, S0],
    ]
    rules += [[Partial(kind), Partial(kind), R, R, R] for kind in LINEAR]
    rules += [[Partial(kind), R, Partial(kind), R, R] for kind in LINEAR]
    return rules


def _sample_gradient(
    view: RankView,
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    bags: torch.Tensor,
    padding_idx: int,
) -> torch.Tensor:
    """Return the gradient of the per-sample weights: each row times the gradient of its bag; 0 for padding."""
    first_bag, last_bag = view.bounds(0, 0)
    first_row, last_row = view.bounds(1, 0)
    indices = comparable_ids(indices, view.shapes[1][0])
    kept = (bags >= first_bag) & (bags < last_bag) & (indices >= first_row) & (indices < last_row)
    if padding_idx >= 0:
        kept &= indices != padding_idx
    chosen = kept.nonzero().squeeze(1)
    products = grad_output[bags[chosen] - first_bag] * weight[indices[chosen].long() - first_row]
    result = grad_output.new_zeros(indices.shape[0])
    result[chosen] = products.sum(-1)
    return result


BAG_OPS = (
    sharded_op(
        "sum_bags",
        "(Tensor weight, Tensor indices, Tensor starts, Tensor stops, Tensor? samples, Tensor? counts,"
        " int padding_idx, bool aligned) -> Tensor",
        _sum_rules,
        _sum,
        _of_bags,
        6,
    ),
    sharded_op(
        "max_bags",
        "(Tensor weight, Tensor indices, Tensor starts, Tensor stops, Tensor counts, int padding_idx, bool aligned)"
        " -> Tensor",
        _max_rules,
        _max,
        _of_bags,
        5,
    ),
    sharded_op(
        "first_of_max",
        "(Tensor weight, Tensor indices, Tensor starts, Tensor stops, Tensor values, int padding_idx) -> Tensor",
        _first_rules,
        _first,
        lambda weight, indices, starts, stops, values, *_: torch.empty_like(values, dtype=torch.int64),
        5,
    ),
    sharded_op(
        "count",
        "(Tensor indices, Tensor starts, Tensor stops, int padding_idx) -> Tensor",
        _count_rules,
        _count,
        lambda indices, starts, *_: starts.new_empty(starts.shape, dtype=torch.int64),
        3,
    ),
    sharded_op(
        "weight_gradient",
        "(Tensor grad_output, Tensor indices, Tensor bags, Tensor? samples, int num_weights, int padding_idx)"
        " -> Tensor",
        _weight_gradient_rules,
        _weight_gradient,
        lambda grad_output, indices, bags, samples, num_weights, *_: grad_output.new_empty(
            num_weights, grad_output.shape[1]
        ),
        4,
    ),
    sharded_op(
        "max_gradient",
        "(Tensor grad_output, Tensor winners, int num_weights) -> Tensor",
        _max_gradient_rules,
        _max_gradient,
        lambda grad_output, winners, num_weights: grad_output.new_empty(num_weights, grad_output.shape[1]),
        2,
    ),
    sharded_op(
        "sample_gradient",
        "(Tensor grad_output, Tensor weight, Tensor indices, Tensor bags, int padding_idx) -> Tensor",
        _sample_gradient_rules,
        _sample_gradient,
        lambda grad_output, weight, indices, *_: grad_output.new_empty(indices.shape[0]),
        4,
    ),
)
"""The ops ``torch.ops.sharded_rows.NAME``, each with its rules and its kernel."""
