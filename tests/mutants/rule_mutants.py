"""Sharding rules that are wrong in one way each, among true rules of the same op: what level 1 must tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from rule_strategies import (
    AVG,
    MAX,
    SUM,
    Meta,
    R,
    Register,
    Rule,
    Strategy,
    along,
    as_propagation,
    concatenated,
    dims,
    embedding,
    embedding_gradient,
    flipped,
    for_whole_meshes,
    from_start,
    layer_norm,
    layer_norm_gradient,
    mm,
    per_mesh_dim,
    pointwise,
    publicly,
    reduced_dims,
    reduction,
    selected,
    tensors_among,
    transposed,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import Rule as Claimed
from verifier.rules.results import SampleReport
from verifier.rules.samples import Sample, SampleOptions
from verifier.torch_internals.registries import replaced_strategy

MESHES = (MeshSpec((2,)), MeshSpec((3,)), MeshSpec((2, 2)))
MOST = 2


class ShownBy(StrEnum):
    """On which meshes a mutant is wrong."""

    ANY = "any mesh"
    UNEVEN = "uneven shards"
    TWO_DIMS = "two mesh dims"


@dataclass(frozen=True)
class RuleMutant:
    """A strategy with wrong rules among true ones.

    Parameters
    ----------
    name, fault
        What is wrong, and the class of faults that it stands for.
    op
        The overload; calls are drawn for it alone, so it has to be one that DTensor knows.
    true, mutation
        The rules that hold; and those that take the place of the true ones of the same inputs and do not hold.
    wrong
        The wrong rules as level 1 writes them, over all calls that are drawn.
    known
        Rules of torch's own for the op that are wrong, too.
    register
        How DTensor is told of the rules.
    most
        How many samples are drawn: enough for every one of ``wrong``.
    """

    name: str
    fault: str
    op: str
    true: Strategy
    mutation: Strategy
    wrong: frozenset[str]
    shown_by: ShownBy = ShownBy.ANY
    known: frozenset[str] = frozenset()
    register: Register = per_mesh_dim
    most: int = MOST

    @property
    def overload(self) -> Any:
        packet, overload = self.op.removeprefix("aten.").split(".")
        return getattr(getattr(torch.ops.aten, packet), overload)

    def strategy(self, *args: Any, **kwargs: Any) -> list[Rule]:
        """Return the mutated rules for a call, and the true ones of other inputs."""
        mutated = self.mutation(*args, **kwargs)
        results = len(self.overload._schema.returns)
        taken = [rule[results:] for rule in mutated]
        # replicated first: where costs are equal, DTensor takes the first rule of an element of a list
        return [*(rule for rule in self.true(*args, **kwargs) if rule[results:] not in taken), *mutated]

    @contextmanager
    def registered(self, mutated: bool = True) -> Iterator[None]:
        """Let DTensor have the mutant's rules for the op inside the block, or only the true ones."""
        with replaced_strategy(self.overload):
            if mutated:
                self.register(self.overload, self.strategy)
            else:
                per_mesh_dim(self.overload, self.true)
            yield


def short(claimed: Claimed) -> str:
    """Return a rule as text without its op."""
    return f"{', '.join(claimed.inputs)} -> {', '.join(claimed.outputs)}"


@cache
def samples(op: str, most: int) -> tuple[Sample, ...]:
    """Return ``most`` samples of an overload, and at most as many in other spellings."""
    (target,) = SOURCE.select([op])
    found = SOURCE.samples(target, SampleOptions(max_samples=most, rare=False))
    return tuple(sample for sample in found if sample.op == op)


def check(
    op: str, most: int = MOST, claims_only: bool = False, meshes: tuple[MeshSpec, ...] = MESHES
) -> list[SampleReport]:
    """Return what level 1 says of each sample, with the rules that DTensor has now; no second calls are made."""
    options = CheckOptions(meshes, claims_only=claims_only, samples_called_again=0)
    return [check_sample(sample, options) for sample in samples(op, most)]


BATCH = ("S(0), S(0) -> P(sum)", "S(1), S(1) -> P(sum)")  # torch's own, wrong with scale_grad_by_freq


def mutant(name: str, fault: str, op: str, true: Strategy, mutation: Strategy, *wrong: str, **more: Any) -> RuleMutant:
    more["known"] = frozenset(more.get("known", ()))
    return RuleMutant(name, fault, f"aten.{op}", true, mutation, frozenset(wrong), **more)


def rule(*placements: Placement) -> Strategy:
    return lambda *args, **kwargs: [list(placements)]


def all_partial(given: Placement) -> Strategy:
    """Return the rule that takes an op for linear in all its tensors together."""
    return lambda *args, **kwargs: [[given] * (1 + len(tensors_among(args)) + ("out" in kwargs))]


def own_dim(args: Any, default: int = -1) -> int | None:
    """Return the dim that an op works along, its second argument; None for a tensor without dims."""
    return from_start(args[1] if len(args) > 1 else default, args[0]) if len(dims(args[0])) else None


def cut_along(*results: Placement | None) -> Strategy:
    """Return the rule that cuts all tensors in the dim that the op works along, and so the result where it is None."""

    def rules(*args: Any, **_: object) -> list[Rule]:
        own = own_dim(args)
        if own is None:
            return []
        return [[result or Shard(own) for result in results] + [Shard(own)] * len(tensors_among(args))]

    return rules


def if_negative(mutation: Strategy) -> Strategy:
    return lambda *args, **kwargs: mutation(*args, **kwargs) if len(args) > 1 and args[1] < 0 else []


def unshifted(results: int) -> Strategy:
    """Return the rules of a reduction that forget that the result has fewer dims."""

    def rules(tensor: Meta, dim: Any = None, keepdim: bool = False, **options: Any) -> list[Rule]:
        gone = reduced_dims(tensor, dim)
        if keepdim or options.get("keepdim"):
            return []
        return [[Shard(d)] * results + [Shard(d)] for d in dims(tensor) if d not in gone and d > min(gone)]

    return rules


def broadcast_cut(left: Meta, right: Meta, **_: object) -> list[Rule]:
    """Cut the last dim of both, also where one of them has one column for all of the other's."""
    last = [len(tensor.shape) - 1 for tensor in (left, right)]
    if min(last) < 0 or left.shape[-1] == right.shape[-1]:
        return []
    return [[Shard(max(last)), Shard(last[0]), Shard(last[1])]]


def reduced_to(result: Placement) -> Strategy:
    """Return the rules of a reduction that place its result so where a dim that it reduces over is cut."""
    return lambda x, dim=None, *_, **__: [[result, Shard(d)] for d in reduced_dims(x, dim)]


ROW_WISE = "S(0), MaskP(sum) -> MaskP(sum)"  # torch's own looks up id 0 in an empty shard
SAME = tuple(f"S({dim}) -> S({dim})" for dim in range(4))  # torch's own takes an empty list of dims for no dims

MUTANTS: tuple[RuleMutant, ...] = (
    # ---------------------------------------------------------------------------------------------- where the result is
    mutant(
        "rows_for_columns", "wrong output dim", "mm.default", mm,
        rule(Shard(1), Shard(0), R), "S(0), R -> S(1)",
    ),
    mutant(
        "transposed_stays", "wrong output dim", "transpose.int", transposed,
        lambda x, *pair: [[Shard(d), Shard(d)] for d in {from_start(d, x) for d in pair}] if len(dims(x)) > 1 else [],
        *SAME[:3],
    ),
    mutant(
        "view_follows_the_last_dim", "wrong dim of a view", "view.default", lambda x, size: [[R, R]],
        lambda x, size: [[Shard(1), Shard(0)]] if len(size) == 2 else [], "S(0) -> S(1)",
    ),
    mutant(
        "product_is_whole", "pending claimed as replicated", "mm.default", mm,
        rule(R, Shard(1), Shard(0)), "S(1), S(0) -> R",
    ),
    mutant(
        "max_dim_unshifted", "keepdim forgotten", "max.dim", reduction(2), unshifted(2),
        "S(2) -> S(2), S(2)", most=4,
    ),
    mutant(
        "var_unshifted", "keepdim forgotten", "var.correction", reduction(), unshifted(1),
        "S(2) -> S(2)", known=SAME, most=4,
    ),
    mutant(
        "layer_norm_mean_whole", "one of several results", "native_layer_norm.default", layer_norm,
        lambda *args: [[Shard(0), R, Shard(0), *one[3:]] for one in layer_norm(*args)[1:2]],
        "S(0) -> S(0), R, S(0)", "S(0), R -> S(0), R, S(0)", "S(0), R, R -> S(0), R, S(0)", most=4,
    ),
    mutant(
        "sort_indices_whole", "one of several results", "sort.default", along(2),
        lambda *args: [[Shard(d), R, Shard(d)] for d in dims(args[0]) if d != own_dim(args)],
        "S(0) -> S(0), R", "S(1) -> S(1), R", "S(2) -> S(2), R", most=4,
    ),
    # ------------------------------------------------------------------------------------------- linear where it is not
    mutant("relu_linear", "linear treatment", "relu.default", pointwise, all_partial(SUM), "P(sum) -> P(sum)"),
    mutant(
        "exp_linear", "linear treatment", "exp.default", pointwise, all_partial(SUM),
        "P(sum) -> P(sum)", register=as_propagation,
    ),
    mutant(
        "tanh_averaged", "linear treatment", "tanh.default", pointwise, all_partial(AVG),
        "P(avg) -> P(avg)", register=publicly,
    ),
    mutant("clamp_linear", "linear treatment", "clamp.default", pointwise, all_partial(SUM), "P(sum) -> P(sum)"),
    mutant(
        "product_of_sums", "bilinear taken for linear", "mul.Tensor", pointwise, all_partial(SUM),
        "P(sum), P(sum) -> P(sum)",
    ),
    mutant(
        "add_whole_to_sum", "added on every rank", "add.Tensor", pointwise,
        rule(SUM, SUM, R), "P(sum), R -> P(sum)",
    ),
    mutant(
        "where_one_side", "added on every rank", "where.self", pointwise,
        rule(SUM, R, SUM, R), "R, P(sum), R -> P(sum)",
    ),
    mutant(
        "where_pending_condition", "a pending condition", "where.self", pointwise,
        rule(MAX, MAX, R, R),
        "P(max), R, R -> P(max)",
    ),
    # ---------------------------------------------------------------------------------------------- the wrong reduction
    mutant(
        "mean_summed", "sum where the average is due", "mean.dim", reduction(), reduced_to(SUM),
        *(f"S({dim}) -> P(sum)" for dim in range(4)), known=SAME, most=4,
    ),
    mutant(
        "mean_of_means", "average of uneven parts", "mean.dim", reduction(), reduced_to(AVG),
        *(f"S({dim}) -> P(avg)" for dim in range(4)), known=SAME, shown_by=ShownBy.UNEVEN, most=4,
    ),
    mutant(
        "sum_is_whole", "reduced over a cut dim, claimed as replicated", "sum.dim_IntList", reduction(across=SUM),
        reduced_to(R),
        *(f"S({dim}) -> R" for dim in range(4)), known=SAME, most=4,
    ),
    mutant(
        "max_and_its_indices", "a reduction that picks", "max.dim", reduction(2), cut_along(MAX, MAX),
        "S(1) -> P(max), P(max)",
    ),
    mutant(
        "neg_of_max", "P(max) through a decreasing function", "neg.default", pointwise, all_partial(MAX),
        "P(max) -> P(max)",
    ),
    mutant(
        "abs_of_max", "P(max) through what is not monotone", "abs.default", pointwise, all_partial(MAX),
        "P(max) -> P(max)",
    ),
    mutant(
        "minimum_of_max", "P(max) through min", "minimum.default", pointwise, all_partial(MAX),
        "P(max), P(max) -> P(max)",
    ),
    # -------------------------------------------------------------------------------------------- cut where it is whole
    mutant(
        "softmax_cut", "a dim counted from the end", "_softmax.default", along(1), if_negative(cut_along(None)),
        "S(1) -> S(1)", most=4,
    ),
    mutant(
        "sort_cut", "a dim counted from the end", "sort.default", along(2), if_negative(cut_along(None, None)),
        "S(0) -> S(0), S(0)", "S(1) -> S(1), S(1)", most=4,
    ),
    mutant(
        "topk_cut", "cut along its own dim", "topk.default", along(2, position=2),
        lambda x, k, dim=-1, *_: [[Shard(from_start(dim, x))] * 3] if dims(x) else [],
        "S(1) -> S(1), S(1)", "S(2) -> S(2), S(2)", most=4,
    ),
    mutant(
        "flip_cut", "cut along its own dim", "flip.default", flipped,
        lambda x, over: [[Shard(d)] * 2 for d in reduced_dims(x, over)],
        *SAME[:3], register=publicly,
    ),
    mutant(
        "gather_cut", "cut along the indexed dim", "gather.default", along(1), cut_along(None),
        "S(0), S(0) -> S(0)",
    ),
    mutant(
        "index_select_cut", "cut along the indexed dim", "index_select.default", selected,
        lambda x, dim, i: [[Shard(from_start(dim, x)), Shard(from_start(dim, x)), R]] if dims(x) else [],
        "S(0), R -> S(0)", "S(1), R -> S(1)",
    ),
    mutant(
        "scatter_add_cut", "cut along the indexed dim", "scatter_add.default", along(1), cut_along(None),
        "S(0), S(0), S(0) -> S(0)", "S(1), S(1), S(1) -> S(1)", most=4,
    ),
    mutant(
        "cat_cut", "cut along its own dim", "cat.default", concatenated,
        lambda xs, dim=0: [[Shard(from_start(dim, xs[0]))] * (1 + len(xs))] if len(xs) > 1 else [],
        "S(1), S(1) -> S(1)",
    ),
    mutant(
        "broadcast_cut", "a broadcast dim cut", "mul.Tensor", pointwise, broadcast_cut,
        "S(1), S(0) -> S(1)", "S(1), S(1) -> S(1)", most=4,
    ),
    # --------------------------------------------------------------------------------------------- embedding, gradients
    mutant(
        "rows_without_mask", "row-wise without a mask", "embedding.default", embedding,
        rule(SUM, Shard(0), R),
        "S(0), R -> P(sum)", known=(ROW_WISE,),
    ),
    mutant(
        "columns_on_first_dim", "wrong output dim", "embedding.default", embedding,
        lambda w, i, *_: [[Shard(0), Shard(1), R]] if dims(i) else [],
        "S(1), R -> S(0)", known=(ROW_WISE,),
    ),
    mutant(
        "lookup_of_max", "the wrong reduction", "embedding.default", embedding,
        rule(SUM, MAX, R),
        "P(max), R -> P(sum)", known=(ROW_WISE,),
    ),
    mutant(
        "table_gradient_whole", "a gradient not reduced", "embedding_dense_backward.default", embedding_gradient,
        lambda g, i, *_: [[R, Shard(d), Shard(d)] for d in dims(i)],
        "S(0), S(0) -> R", "S(1), S(1) -> R", known=BATCH,
    ),
    mutant(
        "threshold_gradient_linear", "a gradient linear in the input", "threshold_backward.default", pointwise,
        all_partial(SUM),
        "P(sum), P(sum) -> P(sum)",
    ),
    mutant(
        "softmax_gradient_cut", "a gradient cut along its own dim", "_softmax_backward_data.default",
        along(1, position=2),
        lambda g, o, dim, *_: [[Shard(from_start(dim, g))] * 3],
        "S(0), S(0) -> S(0)", "S(2), S(2) -> S(2)",
    ),
    mutant(
        "layer_norm_gradient_whole", "a gradient not reduced", "native_layer_norm_backward.default",
        layer_norm_gradient,
        lambda *args: layer_norm_gradient(*args, parameters=R)[1:],
        "S(0), S(0), S(0), S(0), R -> S(0), R", "S(0), S(0), S(0), S(0), R, R -> S(0), R, R",
        "S(1), S(1), S(1), S(1), R -> S(1), R", "S(1), S(1), S(1), S(1), R, R -> S(1), R, R", most=4,
    ),
    # ---------------------------------------------------------------------------------------------- variants, mesh dims
    mutant("in_place_linear", "in place", "relu_.default", pointwise, all_partial(SUM), "P(sum) -> P(sum)"),
    mutant(
        "buffer_of_products", "an out argument", "mul.out", pointwise, all_partial(SUM),
        "P(sum), P(sum), P(sum) -> P(sum)",
    ),
    mutant(
        "foreach_product", "lists of tensors", "_foreach_mul.List", pointwise, all_partial(SUM),
        "P(sum), P(sum), P(sum), P(sum) -> P(sum), P(sum)",
    ),
    mutant(
        "mesh_dims_exchanged", "mesh dims in the wrong order", "neg.default", pointwise,
        lambda *_: [],
        "(R, S(0)) -> (S(0), R)", "(R, S(1)) -> (S(1), R)", "(S(0), R) -> (R, S(0))",
        "(S(0), S(1)) -> (S(1), S(0))", "(S(1), R) -> (R, S(1))", "(S(1), S(0)) -> (S(0), S(1))",
        shown_by=ShownBy.TWO_DIMS, register=for_whole_meshes(lambda placements: placements[::-1]),
    ),
)  # fmt: skip
