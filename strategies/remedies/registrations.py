"""Remedies that register something else: handlers, cache keys, arguments that are sizes, an order of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from strategies.remedies.placing import VALUES
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.registrations import (
    adjusted_like,
    cached_by,
    cached_by_keyword,
    empty_choices_refused,
    handled,
    numbers_decided_apart,
    numbers_refused,
    ordered_rules,
    scalars_replicated,
    shape_argument,
    without_handler,
)

__all__ = ["REMEDIES"]

aten = torch.ops.aten

_UPSAMPLING = tuple(
    f"{name}_backward"
    for name in (
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
        "_upsample_lanczos2d_aa", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
        "upsample_trilinear3d",
    )
)  # fmt: skip


_REDUCTIONS = (
    aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.prod.default, aten.prod.dim_int,
    aten.mean.default, aten.mean.dim, aten.cumsum.default, aten.cumprod.default, aten.linalg_vector_norm.default,
)  # fmt: skip
"""Those that take a dtype."""

_FORMATTED = (
    aten._to_copy.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default,
    aten.full_like.default, aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
)  # fmt: skip
"""Those that take a memory format."""


_WITHOUT_META = {
    aten.add.Scalar_out: aten.add.Scalar,
    aten.embedding_dense_backward.out: aten.embedding_dense_backward.default,
    aten.grid_sampler_2d_backward.out: aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.out: aten.grid_sampler_3d_backward.default,
    aten.normal.out: aten.normal_functional.default,
    aten.randint_like.low_dtype_out: aten.randint_like.low_dtype,
    aten.sub.Scalar_out: aten.sub.Scalar,
}
"""Out variants whose meta function does not take ``out`` or the arguments as they are given, and what they write."""

_ARITHMETIC = (
    aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor,
    aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor,
)  # fmt: skip
"""Overloads that take a tensor or a Python number as their second argument."""

_VIEWS_OF_SCALARS = (aten.transpose.int, aten.transpose_copy.int, aten.view_as_real.default)


def _all(*contexts: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def together() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return together


def _out_sizes() -> AbstractContextManager[None]:
    upsampling = [(getattr(aten, name).grad_input, 2) for name in _UPSAMPLING if hasattr(aten, name)]
    shaped = [lambda op=op, n=n: shape_argument(op, n) for op, n in upsampling]
    return _all(*shaped, lambda: adjusted_like(aten.native_group_norm.out, aten.native_group_norm.default))()


def _reduction_dtypes() -> AbstractContextManager[None]:
    return _all(*(lambda op=op: cached_by_keyword(op, "dtype") for op in _REDUCTIONS))()


def _memory_formats() -> AbstractContextManager[None]:
    return _all(*(lambda op=op: cached_by_keyword(op, "memory_format") for op in _FORMATTED))()


def _shifts() -> AbstractContextManager[None]:
    ops = (
        (aten.__lshift__.Tensor, torch.bitwise_left_shift),
        (aten.__lshift__.Scalar, torch.bitwise_left_shift),
        (aten.__rshift__.Tensor, torch.bitwise_right_shift),
        (aten.__rshift__.Scalar, torch.bitwise_right_shift),
    )
    return _all(*(lambda op=op, by=by: handled(op, by) for op, by in ops))()


def _written_after(functional: Callable[..., Any]) -> Callable[..., Any]:
    """Return an out variant that calls ``functional`` and copies its results, one or several."""

    def call(*args: object, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in sorted(kwargs) if name.startswith("out") and name != "output_mask"]
        made = functional(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return outs[0].copy_(made)
        return tuple(out.copy_(one) for out, one in zip(outs, made, strict=True))

    return call


def _metas_of_out_variants() -> AbstractContextManager[None]:
    return _all(*(lambda op=op, by=by: handled(op, _written_after(by)) for op, by in _WITHOUT_META.items()))()


def _item(tensor: DTensor) -> object:
    return tensor.full_tensor().item()


def _allclose(self: torch.Tensor, other: torch.Tensor, *rest: Any) -> bool:
    near = torch.isclose(self, other, *rest).all()
    return bool((near.full_tensor() if isinstance(near, DTensor) else near).item())


REMEDIES = (
    Remedy(
        "order-of-equal-rules",
        "sort the sets of placements in DecompShardingStrategy._get_candidate_placements (_decompositions.py), and in "
        "_get_unique_placements and _get_neighbor_placements (_ops/single_dim_strategy.py), before they are enumerated",
        ordered_rules,
        refuses=True,  # as a rule does that some ranks chose before, and others did not
    ),
    Remedy(
        "argmax-handler",
        "remove argminmax_handler from _custom_op_handlers (_dispatch.py): argmax_argmin_strategy in _ops/_math_ops.py "
        "is right",
        lambda: without_handler(aten.argmax.default, aten.argmin.default),
        ("aten.argmax.default", "aten.argmin.default"),
    ),
    Remedy(
        "sizes-of-out-variants",
        "add the overloads grad_input of the upsampling backward ops to op_to_shape_and_stride_idx, and "
        "native_group_norm.out to op_to_scalar_shape_adjuster (_sharding_prop.py)",
        _out_sizes,
        ("aten.*upsample_*.grad_input", "aten.native_group_norm.out"),
        frozenset({"CRASH", "WRONG_VALUE", "WRONG_SHAPE"}),
    ),
    Remedy(
        "metas-of-out-variants",
        "compute the shapes of results of these out variants by the functional overloads, because torch has registered "
        "functions for fake tensors that do not take their arguments (_propagate_tensor_meta_non_cached in "
        "_sharding_prop.py)",
        _metas_of_out_variants,
        tuple(map(str, _WITHOUT_META)),
        frozenset({"CRASH"}),
        refuses=True,
    ),
    Remedy(
        "names-in-place",
        "ask the schema, not the last character of the name, whether an op writes in place (is_inplace_op in "
        "_op_schema.py, and its counterpart in C++)",
        _shifts,
        ("aten.__lshift__.*", "aten.__rshift__.*"),
    ),
    Remedy(
        "no-rule-left",
        "refuse a call for which no rule is left, instead of taking the least of no costs "
        "(_select_min_redistribute_cost in _sharding_prop.py)",
        empty_choices_refused,
        verdicts=frozenset({"CRASH"}),
        refuses=True,
        beside_rules=True,
    ),
    Remedy(
        "logsumexp-of-scalars",
        "take None of _infer_reduction_dims for all dims in logsumexp_strategy (_ops/_math_ops.py), as the other "
        "reductions do",
        lambda: scalars_replicated(aten.logsumexp.default),
        ("aten.logsumexp.default",),
        frozenset({"CRASH"}),
    ),
    Remedy(
        "views-of-scalars",
        "map the dims of a tensor without dims to none in dim_transpose and dim_view_as_real (_ops/_view_ops.py)",
        lambda: _all(*(lambda op=op: scalars_replicated(op) for op in _VIEWS_OF_SCALARS))(),
        tuple(str(op) for op in _VIEWS_OF_SCALARS),
        frozenset({"CRASH"}),
    ),
    Remedy(
        "complex-numbers-hashed",
        "hash complex Python numbers among the arguments of a call when the cache is asked (the dispatch of DTensor in "
        "C++)",
        lambda: numbers_refused(lambda one: isinstance(one, complex), "takes no complex number"),
        verdicts=frozenset({"CRASH"}),
        refuses=True,
    ),
    Remedy(
        "numbers-taken-for-tensors",
        "tell a Python number from a tensor without dims in the key of the cache: add, sub, mul and div have rules for "
        "two tensors and others for one (the dispatch of DTensor in C++)",
        lambda: numbers_decided_apart(*_ARITHMETIC),
        tuple(str(op) for op in _ARITHMETIC),
        VALUES | {"CRASH"},
    ),
    Remedy(
        "histc-bins-cached",
        "register histc_strategy with RuntimeSchemaInfo(1) (_ops/_math_ops.py)",
        lambda: cached_by(aten.histc.default, 1),
        ("aten.histc.default",),
    ),
    Remedy(
        "dtypes-of-reductions-cached",
        'register the reductions that take a dtype with static_kwargkey=["dtype"] (_ops/_math_ops.py)',
        _reduction_dtypes,
        tuple(str(op) for op in _REDUCTIONS),
    ),
    Remedy(
        "multinomial-samples-cached",
        "register the rule of multinomial with RuntimeSchemaInfo(1)",
        lambda: cached_by(aten.multinomial.default, 1),
        ("aten.multinomial.default",),
    ),
    Remedy(
        "dims-of-crosses-cached",
        'register the rule of linalg_cross with static_kwargkey=["dim"] (_ops/_math_ops.py)',
        lambda: cached_by_keyword(aten.linalg_cross.default, "dim"),
        ("aten.linalg_cross.default",),
    ),
    Remedy(
        "sizes-of-topk-cached",
        "register topk_strategy with RuntimeSchemaInfo(1) (_ops/_math_ops.py)",
        lambda: cached_by(aten.topk.default, 1),
        ("aten.topk.default",),
    ),
    Remedy(
        "dtypes-of-views-cached",
        "register the rule of view.dtype with RuntimeSchemaInfo(1) (_ops/_tensor_ops.py)",
        lambda: cached_by(aten.view.dtype, 1),
        ("aten.view.dtype",),
    ),
    Remedy(
        "memory-formats-cached",
        'register _to_copy and the factories "like" a tensor with static_kwargkey=["memory_format"], beside the '
        "keywords that they have (_ops/_tensor_ops.py)",
        _memory_formats,
        ("composite.in_formats", *map(str, _FORMATTED)),
    ),
    Remedy(
        "numbers-of-parts",
        "redistribute the argument of _local_scalar_dense to Replicate, as its strategy says, instead of leaving the "
        "propagation early (propagate_op_sharding_non_cached in _sharding_prop.py)",
        lambda: handled(aten._local_scalar_dense.default, _item),
        ("*",),
        VALUES | {"CRASH", "WRONG_SHAPE", "RANKS_DISAGREE"},
    ),
    Remedy(
        "allclose-unanswered",
        "answer allclose by isclose and all, or say that it is not supported (_propagate_tensor_meta_non_cached in "
        "_sharding_prop.py)",
        lambda: handled(aten.allclose.default, _allclose),
        ("*",),
        frozenset({"CRASH"}),
    ),
)
