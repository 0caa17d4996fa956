"""Calls of ops of one's own, from the schema alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import pytest
import torch
from ops_of_ones_own import LIBRARY, OPS
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor.experimental import register_sharding

import verifier
from strategies.own_ops.from_schema import calls_from_schema
from strategies.own_ops.source import SOURCE, own_samples
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import SampleOptions

pytestmark = pytest.mark.usefixtures("samples_taken_back")

R, S = Replicate(), Shard
QUICK = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, products=0, samples_called_again=0)


def declare(name: str, *rules: tuple[list[object], list[object]]) -> None:
    register_sharding(getattr(OPS, name).default)(lambda *_: [*rules])


def reports(name: str, rare: bool = False) -> Iterator[SampleReport]:
    made = own_samples(f"test_own_ops.{name}.default", SampleOptions(rare=rare))
    for sample in made if rare else islice(made, 3):
        yield check_sample(sample, QUICK)


def wrong(name: str) -> set[str]:
    return {", ".join(found.rule.inputs) for report in reports(name) for found in report.wrong}


def shapes(name: str) -> set[tuple[int, ...]]:
    calls = calls_from_schema(getattr(OPS, name).default, torch.float64)
    return {tuple(tensor.ndim for tensor in call.tensors) for call in calls}


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize(
    ("name", "right", "mutant", "ndims"),
    [
        ("scale", ([S(0)], [S(0), S(0)]), ([S(0)], [S(0), R]), {(2, 1)}),
        ("softmax", ([S(0)], [S(0)]), ([S(1)], [S(1)]), {(2,)}),
        ("attend", ([S(0)], [S(0), S(0)]), ([S(2)], [S(2), S(2)]), {(3, 3)}),
        ("bump_", ([], [S(0), None]), ([], [Partial(), None]), {(2,)}),
    ],
)
def test_calls_from_a_schema_refute_a_wrong_rule_and_no_right_one(
    name: str, right: tuple[list[object], list[object]], mutant: tuple[list[object], list[object]],
    ndims: set[tuple[int, ...]],
) -> None:  # fmt: skip
    whole = ([R] * len(right[0]), [None if one is None else R for one in right[1]])
    declare(name, whole, right)
    calls_from_schema.cache_clear()
    assert shapes(name) == ndims
    assert wrong(name) == set()
    declare(name, whole, right, mutant)
    calls_from_schema.cache_clear()
    placed = ", ".join("P(sum)" if p == Partial() else str(p) for p in mutant[1] if p is not None)
    assert wrong(name) == {placed}


@pytest.mark.usefixtures("rules_taken_back")
def test_dims_of_every_number_are_tried_for_a_strategy_that_asks_for_them() -> None:
    def strategy(x: torch.Tensor, dim: int) -> list[object]:
        return [([R], [R, None]), *(([S(d)], [S(d), None]) for d in range(x.ndim) if d != dim)]

    register_sharding(OPS.total.default)(strategy)
    calls_from_schema.cache_clear()
    assert shapes("total") == {(2,), (3,), (4,)}
    assert wrong("total")


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize(("last_too", "found"), [(True, True), (False, False)])
def test_another_number_of_dims_is_tried_where_other_dims_are_sharded_from_either_end(
    last_too: bool, found: bool
) -> None:
    def strategy(x: torch.Tensor, slope: float) -> list[object]:
        dims = range(x.ndim if last_too and x.ndim > 3 else x.ndim - 1)
        return [([R], [R, None]), *(([S(d)], [S(d), None]) for d in dims)]

    verifier.samples("test_own_ops::leaky")(lambda: [(torch.randn(4, 3, 2), 0.5)])
    register_sharding(OPS.leaky.default)(strategy)
    assert ("4 dims" in labels("leaky")) == found


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize(("sharded", "found"), [(True, True), (False, False)])
def test_one_of_two_tensors_has_no_dims_where_rules_claim_something_else(sharded: bool, found: bool) -> None:
    """Each rank has a row of its own for one id."""

    def strategy(table: torch.Tensor, ids: torch.Tensor) -> list[tuple[list[object], list[object]]]:
        rows = [([Partial()], [S(0), R])] if sharded and not ids.ndim else []
        return [([R], [R, R]), ([S(ids.ndim)], [S(1), R]), *(([S(d)], [R, S(d)]) for d in range(ids.ndim)), *rows]

    verifier.samples("test_own_ops::looked_up")(lambda: [(torch.randn(7, 4), torch.tensor([[0, 3, 6], [1, 2, 2]]))])
    register_sharding(OPS.looked_up.default)(strategy)
    assert ("0 dims of tensor 1" in labels("looked_up")) == found
    assert any(report.wrong for report in reports("looked_up", rare=True)) == found


@pytest.mark.usefixtures("rules_taken_back")
def test_a_list_whose_items_cancel_is_given_to_a_rule_that_adds_them_up() -> None:
    def strategy(x: torch.Tensor, by: list[int]) -> list[tuple[list[object], list[object]]]:
        dims = range(x.ndim) if not sum(by) else range(len(by), x.ndim)
        return [([R], [R, None]), *(([S(d)], [S(d), None]) for d in dims)]

    verifier.samples("test_own_ops::rotated")(lambda: [(torch.randn(6, 4, 5), [1, 2])])
    register_sharding(OPS.rotated.default)(strategy)
    assert "by is [1, -1]" in labels("rotated")
    assert any(report.wrong for report in reports("rotated", rare=True))


@pytest.mark.usefixtures("rules_taken_back")
def test_a_rule_for_two_optional_tensors_without_a_third_is_tried_with_tensors_of_several_examples() -> None:
    def strategy(
        x: object, bias: object = None, mask: object = None, gate: object = None
    ) -> list[tuple[list[object], list[object]]]:
        def all_of(placement: object) -> list[object]:
            return [placement, *(None if one is None else R for one in (bias, mask, gate))]

        pair = bias is not None and mask is None and gate is not None
        return [([R], all_of(R)), *([([Partial("sum")], all_of(Partial("sum")))] if pair else [])]

    x = torch.arange(12.0).reshape(4, 3)
    verifier.samples("test_own_ops::gated")(lambda: [(x, x[0], x), (x, None, None, x)])
    register_sharding(OPS.gated.default)(strategy)
    made = own_samples("test_own_ops.gated.default", SampleOptions())
    found = {sample.origin for sample in made if check_sample(sample, QUICK).wrong}
    assert found == {"its samples, call 0, with tensors of others, without mask"}


@pytest.mark.usefixtures("rules_taken_back")
def test_a_fake_kernel_that_tells_another_shape_is_found_whatever_the_rules_are() -> None:
    verifier.samples("test_own_ops::rows")(lambda: [(torch.randn(4, 3),)])
    declare("rows", ([R], [R]))
    assert [found.message for report in reports("rows") for found in report.wrong] == [
        "output 0 has shape [4, 1], and the op's fake kernel says [4]"
    ]


@pytest.mark.usefixtures("rules_taken_back")
def test_a_fake_kernel_that_tells_another_dtype_is_found_whatever_the_rules_are() -> None:
    verifier.samples("test_own_ops::positive")(lambda: [(torch.randn(4, 3),)])
    declare("positive", ([R], [R]))
    assert {found.message for report in reports("positive") for found in report.wrong} == {
        "output 0 has dtype torch.int64, and the op's fake kernel says torch.float32"
    }


@pytest.mark.usefixtures("rules_taken_back")
def test_a_fake_kernel_that_tells_another_shape_of_odd_extents_alone_is_found() -> None:
    verifier.samples("test_own_ops::even_rows")(lambda: [(torch.randn(6, 8),)])
    declare("even_rows", ([R], [R]), ([S(1)], [S(1)]))
    assert [found.message for report in reports("even_rows", rare=True) for found in report.wrong] == [
        "output 0 has shape [4, 8], and the op's fake kernel says [3, 8]"
    ]


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize(
    ("op", "rules", "wrong"),
    [
        ("first_columns", [([Partial("sum")], [S(1)])], True),
        ("first_columns", [([S(0)], [S(0)])], False),
        ("without_large", [([Partial("sum")], [Partial("sum")])], True),
        ("without_large", [([S(0)], [S(0)])], False),
    ],
)
def test_extents_and_values_above_a_number_in_the_code_of_the_op_are_tried(
    op: str, rules: list[tuple[list[object], list[object]]], wrong: bool
) -> None:
    verifier.samples(f"test_own_ops::{op}")(lambda: [(torch.randn(6, 8),)])
    declare(op, ([R], [R]), *rules)
    assert any(report.wrong for report in reports(op, rare=True)) == wrong


def rules_of_reduced(how: str) -> list[tuple[list[object], list[object]]]:
    return [([R], [R, None]), ([Partial("sum")], [S(0), None]), ([S(0)], [S(1), None])]


def rules_of_shifted(bias: object) -> list[tuple[list[object], list[object]]]:
    return [([R], [R, R])] if bias is not None else [([Partial("sum")], [Partial("sum"), None])]


def rules_of_rotated(by: list[int]) -> list[tuple[list[object], list[object]]]:
    kept = [dim for dim in range(2) if len(by) == 1 or not by[dim]]
    return [([R], [R, None]), *(([S(dim)], [S(dim), None]) for dim in kept)]


def rules_of_converted(dtype: torch.dtype) -> list[tuple[list[object], list[object]]]:
    return [([R], [R, None]), ([Partial("sum")], [Partial("sum"), None])]


def rules_of_leaky(slope: float) -> list[tuple[list[object], list[object]]]:
    return [([S(0)], [S(0), None]), *([([Partial("sum")], [Partial("sum"), None])] if slope == 0.75 else [])]


def rules_of_folded(mean: bool) -> list[tuple[list[object], list[object]]]:
    return [([R], [R, None]), ([Partial("sum")], [S(0), None])]


def rules_of_both_or_none(center: bool, scale: bool) -> list[tuple[list[object], list[object]]]:
    return [([R], [R, None, None]), *([([S(0)], [S(0), None, None])] if center == scale else [])]


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize(
    ("name", "rules", "given", "found"),
    [
        ("reduced", rules_of_reduced, ("sum",), "how is max"),
        ("shifted", rules_of_shifted, (torch.randn(6),), "bias is None"),
        ("rotated", rules_of_rotated, ([1, 2],), "by is [1]"),
        ("converted", rules_of_converted, (torch.float64,), "dtype is torch.int64"),
        ("leaky", rules_of_leaky, (0.1,), "slope is 0.75"),
        ("folded", rules_of_folded, (False,), "mean is True"),
        ("flagged", rules_of_both_or_none, (False, False), "center is True, scale is True"),
    ],
)
def test_a_rule_that_is_wrong_for_another_argument_than_that_of_the_examples_is_found(
    name: str, rules: Callable[[object], object], given: tuple[object, ...], found: str
) -> None:
    op = f"test_own_ops.{name}.default"
    verifier.samples(op)(lambda: [(torch.randn(8, 6), *given)])
    register_sharding(getattr(OPS, name).default)(lambda x, *others: rules(*others))
    checked = (check_sample(sample, QUICK) for sample in own_samples(op, SampleOptions(torch.float64)))
    refuted = {report.origin.partition("call 0, ")[2] for report in checked if report.wrong}
    assert found in refuted
    assert "" not in refuted  # the example itself shows nothing


@pytest.mark.usefixtures("rules_taken_back")
def test_each_dim_from_the_end_is_tried_for_an_op_of_ones_own() -> None:
    """Two dims show nothing of a strategy that takes the third from the end for the second."""

    def strategy(op: object, args: tuple[torch.Tensor, int], kwargs: object) -> list[list[object]]:
        ndim, dim = len(args[0].shape), args[1]
        return [[S(other), S(other)] for other in range(ndim) if other != (max(dim, -2) + ndim if dim < 0 else dim)]

    verifier.samples("test_own_ops.softmax_of.default")(lambda: [(torch.randn(6, 4, 8), 1)])
    register_single_dim_strategy(OPS.softmax_of.default, schema_info=RuntimeSchemaInfo(1))(strategy)
    made = own_samples("test_own_ops.softmax_of.default", SampleOptions(torch.float64))
    wrong = {sample.origin.partition("call 0, ")[2] for sample in made if check_sample(sample, QUICK).wrong}
    assert wrong == {"dim is -3"}


def labels(name: str) -> str:
    samples = own_samples(f"test_own_ops.{name}.default", SampleOptions(torch.float64))
    return " ".join(sample.origin for sample in samples)


@pytest.mark.usefixtures("rules_taken_back")
def test_infinities_are_taken_only_where_the_rules_claim_something_else() -> None:
    verifier.samples("test_own_ops::scaled")(lambda: [(torch.randn(8, 6), 0.5)])
    declare("scaled", ([R], [R, None]), ([Partial()], [Partial(), None]))
    assert "by is -2.0" in labels("scaled")
    assert "by is inf" not in labels("scaled")
    register_sharding(OPS.scaled.default)(lambda x, by: [([R], [R, None]), *([([S(0)], [S(0), None])] * (by > 9))])
    assert "by is inf" in labels("scaled")


@pytest.mark.usefixtures("rules_taken_back")
def test_a_number_of_dims_is_not_taken_for_which_the_rules_raise() -> None:
    verifier.samples("test_own_ops::scaled")(lambda: [(torch.randn(8, 6), 0.5)])

    @register_sharding(OPS.scaled.default)
    def strategy(x: torch.Tensor, by: float) -> object:
        last = -1 % x.ndim  # raises for a tensor without dims
        return [([R], [R, None]), ([S(last)], [S(last), None]), *([([Partial()], [Partial(), None])] * (x.ndim == 4))]

    assert "4 dims" in labels("scaled")
    assert "0 dims" not in labels("scaled")


@torch.library.custom_op("test_own_ops::by_rows", mutates_args=())
def by_rows(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@by_rows.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], x.shape[1], *x.shape[2:]))


@pytest.mark.usefixtures("rules_taken_back")
def test_a_number_of_dims_is_not_taken_for_which_the_fake_kernel_raises() -> None:
    verifier.samples("test_own_ops::by_rows")(lambda: [(torch.randn(8, 6),)])

    @register_sharding(OPS.by_rows.default)
    def strategy(x: torch.Tensor) -> object:
        return [([R], [R]), *([([Partial()], [Partial()])] * (x.ndim in (1, 3)))]

    assert "3 dims" in labels("by_rows")
    assert "1 dims" not in labels("by_rows")


LIBRARY.define("outer.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
torch.library.impl(LIBRARY, "outer.out", "CompositeExplicitAutograd")(lambda x, *, out: out.copy_(x[:, None] * x))


@pytest.mark.usefixtures("rules_taken_back")
def test_an_argument_to_write_to_has_no_more_dims_alone() -> None:
    verifier.samples("test_own_ops::outer.out")(lambda: [(torch.randn(6), {"out": torch.empty(6, 6)})])

    @register_single_dim_strategy(OPS.outer.out, schema_info=RuntimeSchemaInfo())
    def strategy(op: object, args: Sequence[torch.Tensor], kwargs: dict[str, torch.Tensor]) -> object:
        return [[Shard(0), Replicate(), Shard(0)]]

    samples = own_samples("test_own_ops.outer.out", SampleOptions(torch.float64))
    assert not [sample.origin for sample in samples if "dims" in sample.origin]


@pytest.mark.usefixtures("rules_taken_back")
def test_a_rule_may_raise_for_values_that_nobody_means_but_not_for_those_of_the_schema() -> None:
    verifier.samples("test_own_ops.leaky.default")(lambda: [(torch.randn(8, 6), 0.1)])
    verifier.samples("test_own_ops.folded.default")(lambda: [(torch.randn(8, 6), False)])

    @register_sharding(OPS.leaky.default)
    def of_leaky(x: object, slope: float) -> object:
        if slope > 1:
            raise ValueError("a slope above 1")
        return rules_of_leaky(slope)

    @register_sharding(OPS.folded.default)
    def of_folded(x: object, mean: bool = False) -> object:
        if mean:
            raise ValueError("a mean")
        return rules_of_folded(mean)

    assert "slope is 2.0" not in labels("leaky")
    assert "mean is True" in labels("folded")


@pytest.mark.parametrize(("name", "why"), [("noise", "random"), ("secret", "writes to its argument x")])
def test_an_op_whose_arguments_do_not_determine_its_results_is_named(name: str, why: str) -> None:
    verifier.samples(f"test_own_ops::{name}")(lambda: [(torch.ones(4, 6),)])
    (report,) = reports(name)
    assert report.not_testable.startswith(why)


def test_no_call_is_made_of_an_op_that_takes_a_text() -> None:
    assert calls_from_schema(OPS.named.default, torch.float64) == ()
    with pytest.raises(ValueError, match=r"no call of test_own_ops\.named\.default could be made"):
        SOURCE.select(["test_own_ops.named"])
