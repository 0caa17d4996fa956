"""Remedies for the rules of reductions, scans and casts."""

from __future__ import annotations

import math
from typing import Any

import torch

from strategies.remedies.placing import VALUES, is_partial, is_sharded
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, Placed, normalised, vetoed
from verifier.torch_internals.placements import norm_order

__all__ = ["REMEDIES"]

_DIMS = {
    "sum.dim_IntList": 1, "mean.dim": 1, "nansum.default": 1, "amax.default": 1, "amin.default": 1, "amax.out": 1,
    "amin.out": 1, "aminmax.default": 1, "logsumexp.default": 1, "std.correction": 1, "var.correction": 1,
    "var_mean.correction": 1, "std_mean.correction": 1, "linalg_vector_norm.default": 2, "linalg__powsum.default": 2,
}  # fmt: skip
"""Reductions over a list of dims, and the position of the list."""
_SCANS = ("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default")
_SUMS = ("aten.sum.*", "aten.nansum.*", "prims.sum.*")
_DIFFERENCES = (*(f"aten.{op}.*" for op in ("neg", "neg_", "sub", "sub_", "rsub", "_foreach_neg*", "_foreach_sub*")),
                "prims.neg.*", "prims.sub.*")  # fmt: skip
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def _names(*ops: str) -> tuple[str, ...]:
    return tuple(f"aten.{op}" for op in ops)


def _has_no_dims(decision: Decision) -> bool:
    """Return whether the list of dims is empty, or left out where that is its default, and the tensor is sharded."""
    position = _DIMS[decision.op.removeprefix("aten.")]
    extreme = decision.op.startswith(("aten.amax", "aten.amin."))
    dims = decision.argument(position, "dim", [] if extreme else None)
    return dims in ([], ()) and is_sharded(decision.args[0])


def _dim_from_the_front(op: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of a scan with its dim counted from the front."""
    ndim = max(1, len(args[0].shape))
    return (args[0], args[1] + ndim, *args[2:]) if isinstance(args[1], int) and args[1] < 0 else None


def _all_dims_for_none(op: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of a reduction with None for an empty list of dims; both stand for all dims."""
    return (args[0], None, *args[2:]) if len(args) > 1 and isinstance(args[1], list | tuple) and not args[1] else None


def _keeps_dims_by_position(decision: Decision) -> bool:
    """Return whether keepdim is given by position, and the tensor is sharded."""
    return len(decision.args) > 2 and bool(decision.args[2]) and is_sharded(decision.args[0])


def _has_no_range(decision: Decision) -> bool:
    """Return whether the limits of a histogram are equal, which stands for the least and the largest element."""
    least, most = decision.argument(2, "min", 0), decision.argument(3, "max", 0)
    return bool(least == most) and is_sharded(decision.args[0])


def _is_infinite_norm_of_partial(decision: Decision) -> bool:
    order = decision.argument(1, "ord", 2)
    return (
        isinstance(order, int | float)
        and math.isinf(order)
        and any(is_partial(x, "max", "min") for x in decision.inputs)
    )


def _is_partial(decision: Decision) -> bool:
    return any(map(is_partial, decision.inputs))


def _is_extreme(decision: Decision) -> bool:
    return any(is_partial(one, "max", "min") for one in decision.inputs)


def _wraps(decision: Decision) -> bool:
    """Return whether a cast makes unsigned numbers of the parts of a maximum or minimum."""
    source, dtype = decision.args[0], decision.kwargs.get("dtype")
    return dtype in _UNSIGNED and source.dtype not in (*_UNSIGNED, torch.bool) and is_partial(source, "max", "min")


def _keeps_fewer_bits(decision: Decision) -> bool:
    """Return whether a cast wraps the integers of a maximum or minimum, because the new dtype has fewer bits."""
    source, dtype = decision.args[0], decision.kwargs.get("dtype")
    if dtype is None or dtype.is_floating_point or dtype.is_complex or torch.bool in (dtype, source.dtype):
        return False
    whole = not (source.dtype.is_floating_point or source.dtype.is_complex)
    return whole and dtype.itemsize < source.dtype.itemsize and is_partial(source, "max", "min")


def _counts_bools(decision: Decision) -> bool:
    """Return whether the parts of a sum of bools, which is OR, are made numbers before it is taken."""
    source, dtype = decision.args[0], decision.kwargs.get("dtype")
    return source.dtype == torch.bool and dtype not in (None, torch.bool) and is_partial(source, "sum")


def _converts_parts(decision: Decision) -> bool:
    """Return whether the parts of a tensor are made integers or bools."""
    source, dtype = decision.args[0], decision.argument(1, "dtype", None)
    return (
        isinstance(dtype, torch.dtype)
        and dtype != source.dtype
        and not dtype.is_floating_point
        and any(map(is_partial, decision.inputs))
    )


def _drops_imaginary_parts(decision: Decision) -> bool:
    """Return whether a cast takes real parts of complex factors, or rounds real parts of parts."""
    source, dtype = decision.args[0], decision.kwargs.get("dtype")
    if dtype is None or dtype.is_complex or not source.dtype.is_complex:
        return False
    return is_partial(source) if not dtype.is_floating_point else is_partial(source, "product")


def _is_reciprocal_power_of_shards(decision: Decision) -> bool:
    """Return whether negative powers of complex numbers are added up, of which a shard may have one alone."""
    order = decision.argument(1, "ord", 2)
    negative = isinstance(order, int | float) and order < 0
    return negative and any(one.dtype.is_complex and is_sharded(one) for one in decision.inputs)


def _sums_bools(decision: Decision) -> bool:
    source = decision.args[0]
    return source.dtype == torch.bool and is_partial(source, "sum")


def _sums_norms(decision: Decision) -> bool:
    """Return whether parts of norms are added to others before their roots and powers are taken."""
    return any(norm_order(placement) is not None for one in decision.inputs for placement in one.placements)


def _wraps_extremes(decision: Decision) -> bool:
    """Return whether parts of a maximum or minimum of unsigned numbers are negated, which wraps all but 0."""
    return any(one.dtype in _UNSIGNED and is_partial(one, "max", "min") for one in decision.inputs)


def _counts_bytes(decision: Decision) -> bool:
    """Return whether the answers of any are bytes, of which those of shards would be added up."""
    source = decision.args[0]
    return source.dtype == torch.uint8 and any(map(is_sharded, decision.inputs))


def _is_any_of_parts(decision: Decision) -> bool:
    source = decision.args[0]
    return source.dtype != torch.bool and is_partial(source, "sum")


def _splits_complex(decision: Decision) -> bool:
    source = decision.args[0]
    return isinstance(source, Placed) and source.dtype.is_complex and is_partial(source, "product")


REMEDIES = (
    Remedy(
        "empty-lists-of-dims",
        "take an empty or missing list of dims for all dims in the reductions of _ops/_math_ops.py",
        lambda: vetoed(_names(*_DIMS), _has_no_dims),
        _names(*_DIMS),
    ),
    Remedy(
        "keepdim-of-logsumexp",
        "read keepdim from the positional arguments, too, in logsumexp_strategy (_ops/_math_ops.py)",
        lambda: vetoed(_names("logsumexp.default"), _keeps_dims_by_position),
        _names("logsumexp.default"),
    ),
    Remedy(
        "histograms-without-range",
        "claim no shard in histc_strategy where min equals max, because the kernel then takes the limits from its data "
        "(_ops/_math_ops.py)",
        lambda: vetoed(_names("histc.default"), _has_no_range),
        _names("histc.default"),
        VALUES,
    ),
    Remedy(
        "no-dims-of-nansum",
        "take an empty list of dims for all dims in meta_nansum (torch/_meta_registrations.py)",
        lambda: normalised(_names("nansum.default"), _all_dims_for_none),
        _names("nansum.default"),
        VALUES | {"WRONG_SHAPE", "CRASH"},
    ),
    Remedy(
        "negative-dim-of-scans",
        "normalise the dim in scan_strategy (_ops/_math_ops.py)",
        lambda: normalised(_SCANS, _dim_from_the_front),
        _SCANS,
        VALUES,
    ),
    Remedy(
        "infinite-norms-of-parts",
        "pass no P(max) or P(min) through a norm of infinite order, which takes absolute values first",
        lambda: vetoed(_names("linalg_vector_norm.*", "norm.*", "_foreach_norm.*"), _is_infinite_norm_of_partial),
        _names("linalg_vector_norm.*", "norm.*", "_foreach_norm.*"),
        VALUES,
    ),
    Remedy(
        "norms-that-are-summed",
        "pass no _NormPartial through a sum, although its reduce_op is called sum (linear_reduction_strategy in "
        "_ops/_math_ops.py)",
        lambda: vetoed(_SUMS, _sums_norms),
        _SUMS,
        VALUES,
    ),
    Remedy(
        "powers-of-parts",
        "pass no partial placement through a sum of powers, which is not linear",
        lambda: vetoed(_names("linalg__powsum.*", "_foreach_powsum.*"), _is_partial),
        _names("linalg__powsum.*", "_foreach_powsum.*"),
        VALUES,
    ),
    Remedy(
        "any-of-parts",
        "pass P(sum) through any only for bools, whose sum is OR (linear_reduction_strategy in _ops/_math_ops.py)",
        lambda: vetoed(_names("any.*"), _is_any_of_parts),
        _names("any.*"),
        VALUES,
    ),
    Remedy(
        "any-of-bytes",
        "keep the shards of bytes out of any, whose answers are bytes as well, so that they are added up instead of "
        "being taken for OR (_ops/_math_ops.py)",
        lambda: vetoed(_names("any.*"), _counts_bytes),
        _names("any.*"),
        VALUES,
    ),
    Remedy(
        "nan-in-parts-of-sums",
        "pass no P(sum) through nansum, which leaves out the part of a NaN that a rank has, and not the whole element "
        "(linear_reduction_strategy in _ops/_math_ops.py)",
        lambda: vetoed(_names("nansum.*"), lambda decision: any(is_partial(one, "sum") for one in decision.inputs)),
        _names("nansum.*"),
        VALUES,
    ),
    Remedy(
        "sums-of-bools",
        "pass no P(sum) of bools through a sum, which counts (linear_reduction_strategy in _ops/_math_ops.py)",
        lambda: vetoed((*_names("sum.*"), "prims.sum.*"), _sums_bools),
        (*_names("sum.*"), "prims.sum.*"),
        VALUES,
    ),
    Remedy(
        "casts-of-bools",
        "pass no P(sum) of bools through a cast to numbers (_to_copy_single_dim_strategy in _ops/_tensor_ops.py)",
        lambda: vetoed(_names("_to_copy.default"), _counts_bools),
        _names("_to_copy.default"),
        VALUES,
    ),
    Remedy(
        "casts-in-inference-mode",
        "pass no partial placement through a conversion to integers or bools by aten.to.dtype, of which DTensor is "
        "asked in inference mode (all_partial_preserving_unary_ops in _ops/_pointwise_ops.py)",
        lambda: vetoed(_names("to.dtype"), _converts_parts),
        _names("to.dtype"),
        VALUES,
    ),
    Remedy(
        "casts-of-complex-parts",
        "pass no partial placement of complex numbers through a cast to integers, nor P(product) through a cast to "
        "reals (_to_copy_single_dim_strategy in _ops/_tensor_ops.py)",
        lambda: vetoed(_names("_to_copy.default"), _drops_imaginary_parts),
        _names("_to_copy.default"),
        VALUES | {"CRASH"},
        refuses=True,  # no collective multiplies complex numbers
    ),
    Remedy(
        "powers-of-one-complex-number",
        "take the absolute value of a single complex number for a negative power, too (the kernel of powsum takes that "
        "of its real part)",
        lambda: vetoed(_names("linalg__powsum.*", "_foreach_powsum.*"), _is_reciprocal_power_of_shards),
        _names("linalg__powsum.*", "_foreach_powsum.*"),
        VALUES,
    ),
    Remedy(
        "casts-to-unsigned",
        "pass no P(max) or P(min) through a cast to an unsigned integer, which wraps negative numbers",
        lambda: vetoed(_names("_to_copy.default"), _wraps),
        _names("_to_copy.default"),
        VALUES,
    ),
    Remedy(
        "casts-to-fewer-bits",
        "pass no P(max) or P(min) through a cast to an integer of fewer bits, which wraps large numbers "
        "(_to_copy_single_dim_strategy in _ops/_tensor_ops.py)",
        lambda: vetoed(_names("_to_copy.default"), _keeps_fewer_bits),
        _names("_to_copy.default"),
        VALUES,
    ),
    Remedy(
        "extremes-of-unsigned-numbers",
        "pass no P(max) or P(min) of unsigned integers through a negation or a difference, which wraps "
        "(_ops/_pointwise_ops.py)",
        lambda: vetoed(_DIFFERENCES, _wraps_extremes),
        _DIFFERENCES,
        VALUES,
    ),
    Remedy(
        "threshold-of-extremes",
        "take threshold from the list of non-decreasing ops (_ops/_pointwise_ops.py)",
        lambda: vetoed(_names("threshold.*", "threshold_.*"), _is_extreme),
        _names("threshold.*", "threshold_.*"),
        VALUES,
        refuses=True,
    ),
    Remedy(
        "scalars-added-to-parts",
        "pass no partial placement through _foreach_add with a replicated scalar tensor",
        lambda: vetoed(_names("_foreach_add.Tensor", "_foreach_add_.Tensor"), _is_partial),
        _names("_foreach_add.Tensor", "_foreach_add_.Tensor"),
        VALUES,
    ),
    Remedy(
        "products-of-complex-parts",
        "pass no P(product) of complex numbers through view_as_real",
        lambda: vetoed(_names("view_as_real.default"), _splits_complex),
        _names("view_as_real.default"),
        VALUES,
        refuses=True,
    ),
    Remedy(
        "extremes-of-complex-numbers",
        "pass no P(max) or P(min) into a complex number or through a Fourier transform, which has no order",
        lambda: vetoed(_names("complex.*", "_fft_*"), _is_extreme),
        _names("complex.*", "_fft_*", "*fft*"),
        VALUES,
        refuses=True,
    ),
)
