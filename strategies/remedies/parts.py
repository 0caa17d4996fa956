"""Remedies for rules that pass a partial placement through what is not linear, once numbers are rounded or counted."""

from __future__ import annotations

import torch

from strategies.remedies.placing import VALUES, is_partial
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, Placed, replicated_first, vetoed

__all__ = ["REMEDIES"]

_SCALED = ("aten.mul.Scalar", "aten.div.Scalar", "aten.mul.Tensor", "aten.div.Tensor", "aten._foreach_mul.*",
           "aten._foreach_div.*", "aten.xlogy.*", "aten.special_xlog1py.*")  # fmt: skip
_PROMOTING = tuple(f"aten.{name}.*" for name in ("add", "add_", "sub", "sub_", "rsub", "_foreach_add*", "_foreach_sub*",
                   "cat", "stack"))  # fmt: skip
_AVERAGES = tuple(f"aten.{prefix}avg_pool{n}d.*" for prefix in ("", "adaptive_", "_adaptive_") for n in (1, 2, 3))
_INTERPOLATIONS = tuple(f"aten.{name}.*" for name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
                        "upsample_trilinear3d"))  # fmt: skip
_FILLS = ("aten.copy_.default", "aten.index_fill.int_Tensor", "aten.index_fill_.int_Tensor", "aten.masked_fill.Tensor",
          "aten.masked_fill_.Tensor", "aten.slice_scatter.default")  # fmt: skip
_REDUCTIONS = tuple(f"aten.{name}.*" for name in ("sum", "nansum", "mean", "prod", "cumsum", "cumprod"))


def _scales_bools(decision: Decision) -> bool:
    return any(one.dtype == torch.bool and is_partial(one, "sum") for one in decision.inputs)


def _promotes_bools(decision: Decision) -> bool:
    """Return whether parts of a sum of bools meet numbers, and become numbers."""
    return any(one.dtype != torch.bool for one in decision.inputs) and _scales_bools(decision)


def _is_whole_dtype(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_whole(one: Placed) -> bool:
    return _is_whole_dtype(one.dtype)


def _averages_integers(decision: Decision) -> bool:
    return any(_is_whole(one) and is_partial(one) for one in decision.inputs)


def _rounds(parts: Placed, dtype: torch.dtype) -> bool:
    """Return whether a conversion to ``dtype`` takes parts of something else for ``parts``.

    It rounds floating numbers, asks whether numbers are 0, or counts bools, whose sum is OR.
    """
    if not is_partial(parts) or parts.dtype == dtype:
        return False
    return dtype == torch.bool or (
        is_partial(parts, "sum") if parts.dtype == torch.bool else _is_whole_dtype(dtype) and not _is_whole(parts)
    )


def _writes_rounded_parts(decision: Decision) -> bool:
    return _rounds(decision.inputs[-1], decision.inputs[0].dtype)


def _reduces_rounded_parts(decision: Decision) -> bool:
    dtype = decision.kwargs.get("dtype")
    return isinstance(dtype, torch.dtype) and _rounds(decision.inputs[0], dtype)


def _leaves_out_the_tensor(decision: Decision) -> bool:
    """Return whether beta is 0, as it is once it has been rounded for integers."""
    beta = decision.argument(3, "beta", 1)
    return isinstance(beta, int | float) and (int(beta) if _is_whole(decision.inputs[0]) else beta) == 0


REMEDIES = (
    Remedy(
        "bools-that-are-scaled",
        "pass no P(sum) of bools, which is OR, through a multiplication or division that makes numbers of them "
        "(_ops/_pointwise_ops.py)",
        lambda: vetoed(_SCALED, _scales_bools),
        _SCALED,
        VALUES,
    ),
    Remedy(
        "bools-that-are-promoted",
        "pass no P(sum) of bools, which is OR, into a sum, a difference or a list with numbers, among which it becomes "
        "a number (_ops/_pointwise_ops.py, cat_strategy and stack_strategy in _ops/_tensor_ops.py)",
        lambda: vetoed(_PROMOTING, _promotes_bools),
        _PROMOTING,
        VALUES,
    ),
    Remedy(
        "averages-of-integers",
        "pass no partial placement of integers through an average, which is rounded",
        lambda: vetoed(_AVERAGES, _averages_integers),
        _AVERAGES,
        VALUES,
    ),
    Remedy(
        "interpolations-of-integers",
        "pass no partial placement of integers through an interpolation, which rounds "
        "(interp_upsample_1out_1in_strategy in _ops/_math_ops.py)",
        lambda: vetoed(_INTERPOLATIONS, _averages_integers),
        _INTERPOLATIONS,
        VALUES,
    ),
    Remedy(
        "fills-that-round",
        "pass no partial placement of floating values through an op that writes them to integers",
        lambda: vetoed(_FILLS, _writes_rounded_parts),
        _FILLS,
        VALUES,
    ),
    Remedy(
        "reductions-that-round",
        "pass no partial placement through a reduction whose dtype is not that of a sum of the parts "
        "(linear_reduction_strategy in _ops/_math_ops.py)",
        lambda: vetoed(_REDUCTIONS, _reduces_rounded_parts),
        _REDUCTIONS,
        VALUES | {"CRASH"},
    ),
    Remedy(
        "addmv-without-a-tensor",
        "keep the placement of the first argument in rules of addmv whose beta is 0: the decomposition that they are "
        "made from leaves it out, and the kernel still wants its size",
        lambda: replicated_first(("aten.addmv*",), _leaves_out_the_tensor),
        ("aten.addmv*",),
        frozenset({"CRASH"}),
        refuses=True,
    ),
)
