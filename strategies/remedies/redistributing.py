"""Remedies for redistributions that rules ask for, whether the rules are torch's or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor.placement_types import Placement

from strategies.remedies.placing import VALUES, is_partial, partials
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.moving import (
    complex_products_not_scattered,
    complex_reductions_refused,
    conjugates_resolved,
    integers_not_divided,
    nan_kept,
    norms_in_float32,
    products_before_sums,
    products_cost,
    uneven_gathers_apart,
)
from verifier.torch_internals.amending.propagation import Decision, Placed, replicated_first, tensors, vetoed
from verifier.torch_internals.amending.watching import keywords_replicated
from verifier.torch_internals.placements import masked_extent

__all__ = ["REMEDIES"]


def _changes(decision: Decision) -> Iterator[tuple[Placed, list[tuple[Placement, Placement]]]]:
    """Yield each tensor argument as it is given, and its placements before and after, by mesh dim."""
    for given, placed in zip(tensors(decision.given), tensors(decision.args), strict=True):
        yield given, list(zip(given.placements, placed.placements, strict=True))


def _divides_products(decision: Decision) -> bool:
    """Return whether a replica becomes a part of a sum on one mesh dim while another waits for a product."""
    for _, changes in _changes(decision):
        divided = any(before.is_replicate() and partials((after,)) & {"sum", "avg"} for before, after in changes)
        if divided and any(partials((before,)) == {"product"} for before, _ in changes):
            return True
    return False


def _divides_integers(decision: Decision) -> bool:
    return any(
        not (given.dtype.is_floating_point or given.dtype.is_complex)
        and any(
            before.is_replicate() and partials((after,)) & {"sum", "avg"} and masked_extent(after) is None
            for before, after in changes
        )
        for given, changes in _changes(decision)
    )


def _divides_for_products(decision: Decision) -> bool:
    """Return whether a replica becomes the factors of a product, which no redistribution can do."""
    return any(
        before.is_replicate() and partials((after,)) == {"product"}
        for _, changes in _changes(decision)
        for before, after in changes
    )


def _turns_into_parts(decision: Decision) -> bool:
    """Return whether shards, or parts of another reduction, become parts of one, which no redistribution can do."""
    return any(
        after.is_partial() and before != after and not before.is_replicate()
        for _, changes in _changes(decision)
        for before, after in changes
    )


@contextmanager
def _no_factors_of_replicas() -> Iterator[None]:
    """Let torch's rules not ask for factors of replicas, and choose none of others that does."""
    with vetoed(("aten.*",), _divides_for_products), products_cost():
        yield


@contextmanager
def _integers_not_divided() -> Iterator[None]:
    """Let torch's rules not ask for parts of integers, and divide none where others do."""
    with vetoed(("aten.*",), _divides_integers), integers_not_divided():
        yield


@contextmanager
def _products_not_divided() -> Iterator[None]:
    """Let torch's rules not ask for parts of a pending product, and divide none before it is reduced."""
    with vetoed(("aten.*",), _divides_products), products_before_sums():
        yield


_SHARING = ("aten._foreach_mul.Tensor",)  # _foreach_div asks for replicas, and the others take the number out


def _lists_share_what_waits(decision: Decision) -> bool:
    """Return whether several tensors of a list are taken together with one tensor that waits for a reduction."""
    given, shared = decision.given[:2]
    return len(given) > 1 and isinstance(shared, Placed) and is_partial(shared)


REMEDIES = (
    Remedy(
        "products-divided-for-sums",
        "reduce what is pending before a replica is divided for P(sum) (_gen_transform_infos in _redistribute.py)",
        _products_not_divided,
        verdicts=VALUES,
    ),
    Remedy(
        "uneven-gathers-merged",
        "merge no all-gathers over a flattened mesh if the tensor dim cannot be cut evenly by it, as is asked of "
        "reduce-scatters (_optimize_transform_infos in _redistribute.py)",
        uneven_gathers_apart,
        ("composite.flattened_mesh", "dtensor.*"),
    ),
    Remedy(
        "replicas-divided-for-products",
        "give the redistribution of a replica to P(product), which raises, an infinite cost (_collective_utils.py), so "
        "that no rule is chosen that needs one",
        _no_factors_of_replicas,
        verdicts=frozenset({"CRASH"}),
        beside_rules=True,
    ),
    Remedy(
        "parts-turned-into-others",
        "offer Replicate as well in cat_strategy (_ops/_tensor_ops.py), so that parts beside shards, or parts of "
        "another reduction, are reduced",
        lambda: vetoed(("aten.cat.*",), _turns_into_parts),
        ("aten.cat.*",),
        frozenset({"CRASH"}),
    ),
    Remedy(
        "complex-products-scattered",
        "refuse a reduce-scatter of complex numbers by product, as the all-reduce does (Partial._reduce_shard_value in "
        "placement_types.py)",
        complex_products_not_scattered,
        verdicts=VALUES,
        refuses=True,
    ),
    Remedy(
        "complex-reductions-that-assert",
        "say that an all-reduce by product, minimum or maximum does not support complex tensors, instead of failing "
        "while the reduction is named in the message (all_reduce in Functional.cpp)",
        complex_reductions_refused,
        verdicts=frozenset({"CRASH"}),
        refuses=True,
    ),
    Remedy(
        "conjugates-that-are-sent",
        "resolve the conjugate of a local tensor before a collective, which views it as real (_to_replicate_tensor, "
        "_make_shard_tensor and _make_replicate_tensor in placement_types.py)",
        conjugates_resolved,
        verdicts=frozenset({"CRASH", "DIED", "HANG"}),
    ),
    Remedy(
        "integers-divided-for-sums",
        "give one rank the value and the others 0, or keep the dtype, where a replica of integers becomes the parts of "
        "a sum (Partial._partition_value in placement_types.py)",
        _integers_not_divided,
    ),
    Remedy(
        "nan-lost-in-extremes",
        "let a maximum or minimum over ranks be NaN where one of them has a NaN, which the collective may pass over "
        "(Partial._reduce_value and _reduce_shard_value in placement_types.py)",
        nan_kept,
        verdicts=VALUES,
    ),
    Remedy(
        "norms-of-16-bits",
        "take the powers of 16-bit norms in 32 bits, because they overflow where the norm does not "
        "(_NormPartial._reduce_value and _reduce_shard_value in _ops/_math_ops.py)",
        norms_in_float32,
        verdicts=VALUES,
    ),
    Remedy(
        "keyword-tensors-not-redistributed",
        "redistribute tensors among the keyword arguments as well (redistribute_local_args in _dispatch.py)",
        keywords_replicated,
        ("aten.linalg_pinv.atol_rtol_tensor*", "aten._fused_adam*"),
        beside_rules=True,
    ),
    Remedy(
        "tensors-shared-by-lists",
        "replicate a tensor that all tensors of a list share unless the rules of all of them ask for the same "
        "placements of it (ShardingPropagator.propagate_op_sharding_non_cached in _sharding_prop.py asks the first)",
        lambda: replicated_first(_SHARING, _lists_share_what_waits),
        _SHARING,
        VALUES,
    ),
)
