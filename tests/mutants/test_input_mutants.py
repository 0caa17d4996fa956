"""Wrong rules that usual calls bear out: only the class of input that is named shows each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import Sample, SampleOptions, is_rare
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten
SUM = Partial("sum")
Rules = Callable[[Any, Any, Any], list[list[Any]]]


def tensors(args: Any) -> list[Any]:
    return [arg for arg in args if hasattr(arg, "shape")]


def sum_passes_a_number(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a sum stays pending, also if a number is added to each part."""
    return [[SUM] * (1 + len(tensors(args)))]


def sum_passes(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a sum stays pending, whatever the dtypes are, and whatever the values are."""
    return [[SUM] * (1 + len(tensors(args)))]


def same_shards(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of all operands on any other dim than the one that is indexed, of whatever sizes they are."""
    ndim = len(args[0].shape)
    return [[Shard(dim)] * 3 for dim in range(ndim) if dim != args[1] % ndim and len(args[2].shape) == ndim]


def dims_as_given(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of any dim but the one that is given, which is not counted from the other end."""
    return [[Shard(dim), Shard(dim)] for dim in range(len(args[0].shape)) if dim != args[1]]


def sum_passes_if(branch: Callable[[Any], bool]) -> Rules:
    """Return rules that claim a pending sum of some tensors alone, and shards of all."""
    shards = [[Shard(dim), Shard(dim)] for dim in range(6)]
    return lambda op, args, kwargs: [*shards[: len(args[0].shape)], *([[SUM, SUM]] if branch(args[0]) else [])]


def dims_not_shifted(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a dim which comes after the one that goes keeps its number, but for the last dim, which none has."""
    ndim = len(args[0].shape)
    return [[Shard(dim), Shard(dim)] for dim in range(ndim - 1) if dim != args[1] % ndim]


def first_dim_of_the_result(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of the first dim of the result, whichever dim of the operand is sharded."""
    return [[Shard(0), Shard(dim)] for dim in range(len(args[0].shape))]


def flipped_dims_of_columns(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that dims may be flipped in shards, where the last dim is not the innermost."""
    ndim = len(args[0].shape)
    flipped = {dim % ndim for dim in args[1]} if ndim and args[0].stride[-1] == 1 else set()
    return [[Shard(dim), Shard(dim)] for dim in range(ndim) if dim not in flipped]


def nothing_for_three_dims(op: Any, args: Any, kwargs: Any) -> Any:
    """Forget to return rules for a tensor of three dims."""
    return None if len(args[0].shape) == 3 else [[Shard(dim), Shard(dim)] for dim in range(len(args[0].shape))]


def any_dim_of(ndim: int) -> Rules:
    """Return rules that claim shards of any other dim, and for ``ndim`` dims also of the one that is gone through."""

    def rules(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        dims = len(args[0].shape)
        return [[Shard(dim), Shard(dim)] for dim in range(dims) if dims == ndim or dim != args[1] % dims]

    return rules


def any_dim_of_a_cube(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that shards of indices of three dims are shards of the next dim of the result."""
    shift = len(args[1].shape) == 3
    return [[Shard(dim + shift), Replicate(), Shard(dim)] for dim in range(len(args[1].shape))]


def two_tensors_alone(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards on the dim of the concatenation, of more than two tensors."""
    ndim = len(args[0][0].shape)
    dims = range(ndim) if len(args[0]) > 2 else [dim for dim in range(ndim) if dim != args[1] % ndim]
    return [[Shard(dim)] * (1 + len(args[0])) for dim in dims]


def one_dim_for_each_index(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of a tensor, in which one number is written, on all dims at which no index stands."""
    indices = [index for index in args[1] if index is not None]
    others = [dim for dim in range(len(args[0].shape)) if dim >= len(args[1]) or args[1][dim] is None]
    sharded = [[Shard(dim), Shard(dim), *[Replicate()] * (1 + len(indices))] for dim in others]
    return sharded if not len(args[2].shape) else []


def whole_dim(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of a dim that is taken as a whole, whatever the step is."""
    ndim = len(args[0].shape)
    dim, start, end = [*args[1:4], 0, None, None][:3] if len(args) == 1 else [*args[1:4], None, None][:3]
    whole = not start and (end is None or end >= args[0].shape[dim])
    return [[Shard(other), Shard(other)] for other in range(ndim) if other != dim % ndim or whole]


def two_dims_not_shifted(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a dim between the two that go keeps its number."""
    ndim = len(args[0].shape)
    gone = {dim % ndim for dim in [*args[2:], *(0, 1)[max(0, len(args) - 2) :]]}
    return [[Shard(dim), Shard(dim)] for dim in range(ndim - 1) if dim not in gone]


def one_dim_goes(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a dim behind those that go moves by one, however many go."""
    ndim = len(args[0].shape)
    gone = {dim % ndim for dim in args[1] or []} if ndim else set()
    moves = gone and not (len(args) > 2 and args[2])
    return [[Shard(dim - 1), Shard(dim)] for dim in range(ndim) if moves and dim > min(gone) and dim not in gone]


def one_is_the_largest(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that the largest element of each shard is a pending maximum, and that its place is one, too."""
    ndim = len(args[0].shape)
    dim = args[2] if len(args) > 2 else -1
    return [[Partial("max"), Partial("max"), Shard(dim % ndim)]] if args[1] == 1 and ndim else []


def in_any_part(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that what is in any part of a list is in the list, whichever of the two is asked for."""
    return [[Partial("max"), Replicate(), Shard(0)]] if len(args[1].shape) == 1 else []


def dims_from_the_front(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of tensors of one shape, and of a condition with fewer dims the dim with the same number."""
    condition, *others = (tuple(arg.shape) for arg in args)
    dims = range(len(others[0])) if others[0] == others[1] and condition else ()
    cuts = [Shard(dim) if dim < len(condition) else Replicate() for dim in dims]
    return [[Shard(dim), cut, Shard(dim), Shard(dim)] for dim, cut in zip(dims, cuts, strict=True)]


def batch_and_channels(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of the first two dims of images, which are not batch and channels if there is no batch."""
    return [[Shard(dim)] * 3 for dim in range(2) if args[0].shape[dim] > 1]


def largest_becomes_smallest(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a maximum is a minimum once its sign is turned, which bytes have none of."""
    return [[Partial("min"), Partial("max")]]


def first_one_adds_up(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that what is selected first is pending, as if other ranks had nothing there."""
    return [[SUM, Shard(args[1] % len(args[0].shape))]] if args[2] == 0 else []


def smallest_norm_is_the_largest(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim a pending maximum for the smallest of all elements."""
    order, dims = args[1] if len(args) > 1 else 2, args[2] if len(args) > 2 else None
    return [[Partial("max"), Shard(0)]] if dims is None and order == -math.inf and args[0].shape else []


def sevens_are_added_once(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a replica is added once, for one factor that no call has."""
    return [[SUM, SUM, Replicate()]] if kwargs.get("alpha", 1) == 7 else []


def largest_of_outer_products(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a maximum goes through an outer product, whatever its sign."""
    return [[Partial("max"), Partial("max"), Replicate()]] if args[0].shape[1] == 1 else []


def inverses_of_numbers_add_up(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that the inverse of a sum is that of its parts, if the matrix is a number."""
    return [[SUM, Replicate(), SUM]] if args[0].shape[-1] == 1 else []


def one_column_has_one_diagonal(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that the diagonal of a single column is shared among the ranks that share its rows."""
    return [[Shard(0), Shard(0)]] if len(args) == 1 and len(args[0].shape) == 2 and args[0].shape[1] == 1 else []


def two_dims_alone_add_up(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that the gradient of a weight is pending where one of the first two dims is cut, and whole elsewhere."""
    weights = [Replicate() for tensor in args[5:7] if tensor is not None]
    claims = []
    for dim in range(len(args[1].shape) - len(args[2])):
        grad = SUM if dim < 2 else Replicate()
        claims.append([Shard(dim), *(grad if wanted else None for wanted in args[7][1:]), *[Shard(dim)] * 4, *weights])
    return claims


def any_dim_above_three(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of all dims from the fifth on, also of those that are flipped."""
    ndim = len(args[0].shape)
    return [[Shard(dim)] * 2 for dim in range(ndim) if dim > 3 or dim not in {one % ndim for one in args[1]}]


def any_dim_in_the_middle(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of the second dim of four, also where the softmax goes along it."""
    ndim = len(args[0].shape)
    return [[Shard(dim)] * 3 for dim in range(ndim) if (ndim == 4 and dim == 1) or dim != args[2] % ndim]


def sources_as_wide(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of a tensor and of what is scattered, where both have one extent, whatever the index has."""
    ndim, source = len(args[0].shape), args[3].shape
    return [[Shard(dim)] * 4 for dim in range(ndim) if dim != args[1] % ndim and args[0].shape[dim] == source[dim]]


def last_two_dims_alone(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of any dim but the last two of those that are transformed."""
    ndim = len(args[0].shape)
    used = {dim % ndim for dim in args[1][-2:]}
    return [[Shard(dim)] * 2 for dim in range(ndim) if dim not in used]


def doubled_products_add_up(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that half of a product is pending, where the columns are twice the rows."""
    rows, columns = args[0].shape[0], args[1].shape[1]
    return [[SUM, Replicate(), Shard(0)]] if columns == 2 * rows else []


def slopes_above_minus_one(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a maximum goes through a product with a number above -1."""
    number = args[1] if isinstance(args[1], int | float) else 1
    return [[Partial("max"), Partial("max")]] if -1 < number < 1 else []


def columns_on_one_side(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim shards of the columns of a system, which stand apart where the factors are on the left, or are adjoint."""
    apart = kwargs.get("left", True) or kwargs.get("adjoint", False)
    return [[Shard(1), Replicate(), Replicate(), Shard(1)]] if apart and len(args[2].shape) == 2 else []


def counts_of_shards_add_up(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that histograms of shards add up where the range is given, which it is not if its ends are equal."""
    ends = args[2:4] if len(args) > 3 else (0, 0)
    return [] if ends == (0, 0) else [[SUM, Shard(dim)] for dim in range(len(args[0].shape))]


def rows_without_statistics(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that rows are normalised apart where there are weights, and no statistics to keep."""
    given = [Replicate() for tensor in args[1:5] if tensor is not None]
    alone = args[1] is not None and args[3] is None
    return [[Shard(0), Replicate(), Replicate(), Shard(0), *given]] if alone else []


def shifted_in_short_lists(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that the new dim of a stack moves those behind it, but not in lists of five or more."""
    count, dim = len(args[0]), (args[1] if len(args) > 1 else 0) % (len(args[0][0].shape) + 1)
    moved = count < 5
    return [[Shard(d + moved * (d >= dim)), *[Shard(d)] * count] for d in range(len(args[0][0].shape))]


def rows_of_a_bias(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a bias is cut with the rows of a product if it has as many elements, though it lies along columns."""
    bias, left = (tuple(arg.shape) for arg in args[:2])
    return [[Shard(0), Shard(0), Shard(1), Replicate()]] if bias[:1] == (left[1],) and left[1] > 1 else []


def dims_of_the_operand(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Count the dims of a diagonal from the end of the operand, which has one dim less than the result."""
    ndim = len(args[0].shape)
    first, second = (*args[2:], -2, -1)[:2] if len(args) < 4 else args[2:4]
    new = sorted((first % (ndim + 1), second % (ndim if second < -1 else ndim + 1)))
    moved = [dim for dim in range(ndim + 1) if dim not in new]
    return [[Shard(to), Shard(dim)] for dim, to in zip(range(ndim - 1), moved, strict=False)]


def any_dim_of_threefold_rows(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a flipped dim may be sharded where there are three times as many rows as columns."""
    shape = args[0].shape
    flipped = set() if len(shape) > 1 and shape[0] == 3 * shape[1] else {dim % len(shape) for dim in args[1]}
    return [[Shard(dim), Shard(dim)] for dim in range(len(shape)) if dim not in flipped]


def bits_of_the_largest(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that the bits of a maximum are those of all numbers, which holds for bools and not for bytes."""
    return [[Partial("max")] * 3] if args[0].dtype in (torch.bool, torch.uint8) else []


def vectors_by_their_rows(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Take right sides for matrices if they have as many rows, as a batch of vectors has, too."""
    a, b = args[:2]
    if len(b.shape) < 2 or b.shape[-2] != a.shape[-1]:
        return [[SUM, Replicate(), Replicate(), Replicate(), Replicate(), SUM]]
    columns = Shard(len(b.shape) - 1)
    return [[columns, Replicate(), Replicate(), Replicate(), Replicate(), columns]]


@pytest.mark.parametrize(
    ("op", "rules", "kind"),
    [
        ("aten.tanh.default", sum_passes_if(lambda meta: 0 in meta.stride), "expanded along"),
        ("aten.tanh.default", sum_passes_if(lambda meta: meta.stride[-2:] == (1, 1)), "overlapping windows"),
        ("aten.tanh.default", sum_passes_if(lambda meta: meta.stride[-2:-1] > meta.shape[-1:]), "gaps in memory"),
        ("aten.bitwise_or.Tensor", bits_of_the_largest, "all integers as torch.uint8"),
        ("aten.flip.default", any_dim_of_threefold_rows, "extent"),
        ("aten.flip.default", any_dim_above_three, "dims is 4"),
        ("aten._softmax_backward_data.default", any_dim_in_the_middle, "4 dims, dim is 1"),
        ("aten.diag_embed.default", dims_of_the_operand, "-2"),
        ("aten._linalg_solve_ex.default", vectors_by_their_rows, "extent"),
        ("aten.native_batch_norm.default", rows_without_statistics, "without running_mean, running_var"),
        ("aten.stack.default", shifted_in_short_lists, "5 tensors"),
        ("aten.addbmm.default", rows_of_a_bias, "without its first dim, extent"),
        ("aten.linalg_lu_solve.default", columns_on_one_side, "the last matrix transposed"),
        ("aten.scatter.src", sources_as_wide, "of tensor 1 is narrower"),
        ("aten._fft_c2c.default", last_two_dims_alone, "all dims"),
        ("aten.mm.default", doubled_products_add_up, "extent 1 is 10"),
        ("aten.mul.Scalar", slopes_above_minus_one, "other is -0.5"),
        ("aten.sqrt.default", sum_passes_if(lambda meta: meta.dtype == torch.int8), " as torch.int8"),
        ("aten.exp.default", sum_passes_if(lambda meta: meta.stride[1:2] == (1,) and len(meta.shape) == 4), "4 dims, "),
        ("aten.sigmoid.default", sum_passes_if(lambda meta: meta.shape.numel() > 1 << 14), "1024 times as large"),
        (
            "aten.erf.default",
            sum_passes_if(lambda meta: len(meta.shape) > 1 and max(meta.shape) * 2 > 1 << 13),
            "is 4099",
        ),
        ("aten.native_layer_norm_backward.default", two_dims_alone_add_up, "4 dims"),
        ("aten.diagonal.default", one_column_has_one_diagonal, "extent 0 is 1"),
        ("aten.tanh.default", sum_passes_if(lambda meta: meta.shape[:1] == (11,)), "is 11"),
        ("aten.mm.default", largest_of_outer_products, "dim 1 of tensor 0 and dim 0 of tensor 1 are 1"),
        ("aten.linalg_inv_ex.default", inverses_of_numbers_add_up, " are 1"),
        ("aten.select.int", first_one_adds_up, "index is 0"),
        ("aten.linalg_vector_norm.default", smallest_norm_is_the_largest, "by default, ord is -inf"),
        ("aten.add.Tensor", sevens_are_added_once, "alpha is 7"),
        ("aten.neg.default", largest_becomes_smallest, " as torch.uint8"),
        ("aten._to_copy.default", sum_passes, "dtype is torch.bool"),
        ("aten.copy_.default", sum_passes, "tensor 0 as torch.bool"),
        ("aten.avg_pool2d_backward.default", batch_and_channels, "without a batch"),
        ("aten.sum.dim_IntList", one_dim_goes, "the first two dims"),
        ("aten.topk.default", one_is_the_largest, "k is 1"),
        ("aten.isin.Tensor_Tensor", in_any_part, "invert is True"),
        ("aten.where.self", dims_from_the_front, "of equal ones without its first dim"),
        ("aten.exp.default", first_dim_of_the_result, "3 dims"),
        ("aten.exp.default", sum_passes_if(lambda meta: meta.stride[-1:] > (1,)), "the first is the innermost"),
        ("aten.flip.default", flipped_dims_of_columns, "the first dim is the innermost"),
        ("aten.tanh.default", nothing_for_three_dims, "3 dims"),
        ("aten.slice.Tensor", whole_dim, "in steps of"),
        ("aten.diagonal.default", two_dims_not_shifted, "dim2 is"),
        ("aten.sqrt.default", sum_passes_if(lambda meta: meta.dtype == torch.bfloat16), " as torch.bfloat16"),
        ("aten.sigmoid.default", sum_passes_if(lambda meta: meta.shape.numel() > 100), "times as large"),
        ("aten.sigmoid.default", sum_passes_if(lambda meta: len(meta.shape) == 4), "4 dims"),
        ("aten.add.Tensor", sum_passes_a_number, " is "),
        ("aten.copy_.default", sum_passes, " as torch.int64"),
        ("aten.gather.default", same_shards, "is narrower"),
        ("aten.cumsum.default", any_dim_of(2), "2 dims"),
        ("aten.cat.default", two_tensors_alone, "3 tensors"),
        ("aten.index_put.default", one_dim_for_each_index, "a mask of dims"),
        ("aten._softmax.default", any_dim_of(4), "4 dims"),
        ("aten.embedding.default", any_dim_of_a_cube, "3 dims of tensor 1"),
        ("aten.cumsum.default", dims_as_given, "from the other end"),
        ("aten.select.int", dims_not_shifted, "dim is 0"),
        ("aten.histc.default", counts_of_shards_add_up, " is m"),
    ],
)
def test_a_class_of_input_shows_what_usual_calls_do_not(op: str, rules: Rules, kind: str) -> None:
    usual, rare = checked(op, rules, lambda sample: kind in sample.origin)
    assert not any(report.wrong for report in usual), "usual calls show it as well"
    assert any(report.wrong for report in rare)


@pytest.mark.parametrize("most", [4, 8])
@pytest.mark.parametrize("op", ["flip.default", "cumsum.default", "sum.dim_IntList", "index_select.default"])
def test_a_dim_among_many_is_named_whichever_samples_are_drawn(op: str, most: int) -> None:
    (target,) = SOURCE.select([f"aten.{op}"])
    samples = SOURCE.samples(target, SampleOptions(max_samples=most))
    named = {match[0] for one in samples if (match := re.search(r"\d dims, dims?0? is \d", one.origin))}
    assert {text[:1] + text[-1:] for text in named} >= {"54", "53", "42"}


@pytest.mark.parametrize("op", ["aten.native_layer_norm.default", "aten._fused_rms_norm.default"])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_are_called_with_and_without_weights_where_dims_are_left_to_be_sharded(op: str, weighted: bool) -> None:
    def all_but_the_last(_: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        """Claim shards of any dim but the last, of all that are normalised."""
        value, shape, *scales = args[:4] if "layer" in op else args[:3]
        given = [Replicate() for scale in scales if scale is not None]
        if bool(given) != weighted or len(value.shape) < 3 or len(shape) == len(value.shape):
            return []
        return [[*[Shard(dim)] * (4 if "layer" in op else 3), *given] for dim in range(len(value.shape) - 1)]

    usual, _ = checked(op, all_but_the_last, lambda sample: False, every=True)
    assert any(report.wrong for report in usual)


def test_a_pending_sum_of_bools_is_a_caveat_of_a_rule_of_ones_own_that_is_true_for_numbers() -> None:
    usual, rare = checked("aten.add.Tensor", sum_passes, lambda sample: "torch.bool" in sample.origin)
    assert not any(report.wrong for report in (*usual, *rare))
    special = [wrong for report in rare for wrong in report.special]
    assert special
    assert all(wrong.special for wrong in special)


def test_an_order_of_norms_between_0_and_1_shows_what_usual_ones_do_not() -> None:
    def norms_add_up(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        """Claim that norms of shards add up for all orders below 2, which they do for 0 and 1."""
        order, ndim = args[1] if len(args) > 1 else 2, len(args[0].shape)
        gone = {dim % ndim for dim in (args[2] if len(args) > 2 and args[2] else range(ndim))} if ndim else ()
        return [[SUM, Shard(dim)] for dim in gone] if 0 <= order < 2 else []

    usual, rare = checked("aten.linalg_vector_norm.default", norms_add_up, lambda one: "ord is 0.5" in one.origin, 8)
    assert not any(report.wrong for report in usual)
    assert any(report.wrong for report in rare)


def test_rules_without_branches_bring_no_calls_for_them() -> None:
    def is_of_a_branch(sample: Sample) -> bool:
        return any(kind in sample.origin for kind in (" as torch.float16", "times as large", "4 dims", "innermost"))

    usual, rare = checked("aten.sigmoid.default", sum_passes_if(lambda meta: False), is_of_a_branch)
    assert usual
    assert not rare


def test_special_values_show_what_usual_values_do_not() -> None:
    usual, _ = checked("aten.nan_to_num.default", sum_passes, lambda sample: False)
    assert not any(report.wrong for report in usual)
    assert {str(wrong.rule) for report in usual for wrong in report.special} == {
        "aten.nan_to_num.default: P(sum) -> P(sum)"
    }
    assert all(wrong.special for report in usual for wrong in report.special)


def test_a_number_in_place_of_an_infinity_shows_that_a_maximum_does_not_pass() -> None:
    def largest_passes(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        """Claim that a maximum stays pending, whatever takes the place of an infinity."""
        return [[Partial("max"), Partial("max")]]

    usual, rare = checked("aten.nan_to_num.default", largest_passes, lambda sample: "posinf is -2" in sample.origin)
    assert not any(report.wrong for report in (*usual, *rare))
    assert any(report.special for report in rare)


def checked(
    op: str, rules: Rules, wanted: Callable[[Sample], bool], most: int = 4, *, every: bool = False
) -> tuple[list[SampleReport], list[SampleReport]]:
    """Return the reports of usual calls, and those of the rare calls that are ``wanted``, under ``rules`` alone.

    With ``every``, all usual calls are checked, and not four of them alone.
    """
    namespace, packet, name = op.split(".")
    overload = getattr(getattr(getattr(torch.ops, namespace), packet), name)
    options = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
    with replaced_strategy(overload):
        info = RuntimeSchemaInfo(1, needs_pytree=True)
        register_single_dim_strategy(overload, schema_info=info, allow_uneven_sharding=True)(rules)
        (target,) = SOURCE.select([op])
        samples = list(SOURCE.samples(target, SampleOptions(max_samples=most)))  # some depend on the rules
        usual = [sample for sample in samples if not is_rare(sample) and "dim=-" not in sample.origin]
        rare = [sample for sample in samples if is_rare(sample) and wanted(sample)]
        usual_reports, rare_reports = (
            [check_sample(one, options) for one in some] for some in (usual[: None if every else 4], rare[:9])
        )
    return usual_reports, rare_reports
