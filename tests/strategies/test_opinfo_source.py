"""The source "opinfo": which calls it has, and that their values are valid, telling, and the same when asked again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

from strategies.opinfo import source
from strategies.opinfo.calls.by_op import registered_of
from strategies.opinfo.calls.call import Call
from strategies.opinfo.calls.capture import captured, entries_of, hidden
from strategies.opinfo.calls.op_facts import SAME_AS
from strategies.opinfo.calls.op_names import home_rows, row_names
from strategies.opinfo.calls.providers import PROVIDERS
from strategies.opinfo.coverage import coverage
from strategies.opinfo.samples.derived_overloads import family
from strategies.opinfo.samples.fill_plans import why_not_testable
from strategies.opinfo.samples.input_classes import dtypes
from strategies.opinfo.source import SOURCE
from verifier.core.case import OpCase
from verifier.rules.samples import Sample, SampleOptions, SampleSource, Target, Values, installed_sources
from verifier.torch_internals.names import pytree
from verifier.torch_internals.opinfo import capture_calls, opinfo_entries, opinfo_sizes
from verifier.torch_internals.ops import registered_overloads
from verifier.torch_internals.registries import replaced_strategy

pytestmark = pytest.mark.long

DRAWS = 6


@cache
def samples(name: str, op: str = "", **options: int) -> tuple[Sample, ...]:
    """Return the usual samples of the one target called ``name``, those of one overload if ``op`` is given."""
    (target,) = SOURCE.select([name])
    found = SOURCE.samples(target, SampleOptions(**{"rare": False, **options}))  # type: ignore[arg-type]
    return tuple(sample for sample in found if op in ("", sample.op))


def drawn(sample: Sample, size: int = 0, draw: int = 0, values: Values = Values.USUAL) -> OpCase:
    case = sample.draw(size, draw, values)
    assert case is not None
    return case


def run(case: OpCase) -> object:
    namespace, packet, overload = case.op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)(*case.args, **case.kwargs)


def tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def arguments(case: OpCase) -> list[torch.Tensor]:
    return tensors((case.args, dict(case.kwargs)))


def first(case: OpCase) -> torch.Tensor:
    return arguments(case)[0]


# -------------------------------------------------------------------------------------------------------------- select
def test_the_source_opinfo_is_installed() -> None:
    assert isinstance(SOURCE, SampleSource)
    assert installed_sources()["opinfo"] is SOURCE


def test_names_and_globs_of_opinfos() -> None:
    assert SOURCE.select(["nn.functional.embedding", "add"]) == (
        Target("add", "opinfo"),
        Target("nn.functional.embedding", "opinfo"),
    )
    assert {target.name for target in SOURCE.select(["cum*"])} == {"cummax", "cummin", "cumprod", "cumsum"} | {
        "cumulative_trapezoid"
    }


def test_names_of_overloads() -> None:
    name = "aten.embedding_dense_backward.default"
    assert SOURCE.select([name]) == (Target(name, "opinfo", name),)
    assert Target(name, "opinfo", name) in SOURCE.select(["aten.embedding_dense_backward"])


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("nn.functional.embeding", "nn.functional.embedding"), ("aten.ad.Tensor", "aten.add.Tensor")],
)
def test_unknown_names_get_the_nearest(pattern: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(pattern)}.*did you mean '{re.escape(near)}'"):
        SOURCE.select(["add", pattern])


# ------------------------------------------------------------------------------------------------------------ coverage
def test_most_overloads_with_a_rule_have_samples() -> None:
    found = coverage()
    assert len(found.tested) >= 1095
    assert {"aten.add.Tensor", "aten.convolution_backward.default", "aten._softmax.default"} <= set(found.tested)
    assert found.not_testable["aten.empty_like.default"] == "uninitialised memory"
    assert len(found.missing) < 45


def test_gradients_are_reached_by_the_name_of_the_op() -> None:
    for row, op in [
        ("nn.functional.embedding", "aten.embedding_dense_backward.default"),
        ("native_layer_norm", "aten.native_layer_norm_backward.default"),
        ("_softmax_backward_data", "aten._softmax_backward_data.default"),
        ("nn.functional.threshold", "aten.threshold_backward.default"),
        ("nn.functional.nll_loss", "aten.nll_loss_backward.default"),
    ]:
        assert samples(row, op), op


def test_a_gradient_by_its_own_name() -> None:
    found = samples("aten.embedding_dense_backward.default")
    assert {sample.op for sample in found} == {"aten.embedding_dense_backward.default"}
    assert len(found) > 3


def test_a_helper_by_its_own_name() -> None:
    assert {sample.op for sample in samples("aten._to_copy.default")} == {"aten._to_copy.default"}


def test_an_overload_belongs_to_one_row() -> None:
    ops = {sample.op for sample in samples("nn.functional.threshold")}
    assert ops >= {"aten.threshold.default", "aten.threshold_.default", "aten.threshold.out"}
    assert all("threshold" in op for op in ops)


def test_overloads_that_autograd_takes_apart() -> None:
    assert samples("max", "aten.max.other")


def test_no_more_samples_than_asked_for() -> None:
    captured = [
        sample for sample in samples("sum", "aten.sum.dim_IntList", max_samples=3) if " for " not in sample.origin
    ]
    assert len(captured) == 3
    assert len({len(first(drawn(sample)).shape) for sample in captured}) > 1


def test_numbers_and_tensors_are_complex_in_turn() -> None:
    found = samples("aten.mul.Scalar", rare=True)
    origins = " ".join(sample.origin for sample in found)
    assert "other is complex" in origins
    assert "complex tensors" in origins
    numbers = [drawn(sample).args[1] for sample in found if "other is complex" in sample.origin]
    assert {type(number) for number in numbers} == {complex}
    refused = samples("aten.floor.default", rare=True)
    assert not any("complex" in sample.origin for sample in refused)


def test_renamed_bases_lead_somewhere() -> None:
    for name in SAME_AS:
        assert family(f"aten.{name}.default") not in SAME_AS


# --------------------------------------------------------------------------------------------------------- determinism
@pytest.mark.parametrize("name", ["add", "nn.functional.embedding", "searchsorted", "_foreach_mul"])
def test_the_same_calls_whenever_asked(name: str) -> None:
    (target,) = SOURCE.select([name])
    torch.manual_seed(1)
    ours = list(SOURCE.samples(target, SampleOptions(max_samples=2)))
    torch.manual_seed(2)
    again = list(SOURCE.samples(target, SampleOptions(max_samples=2)))
    assert [sample.origin for sample in ours] == [sample.origin for sample in again]
    backwards = {}
    for sample in reversed(again):
        for size in (2, 1, 0):
            backwards[sample, size] = sample.draw(size, 1)
    for sample, other in zip(ours, again, strict=True):
        for size in range(3):
            case, case_again = sample.draw(size, 1), backwards[other, size]
            assert (case is None) == (case_again is None)
            if case is not None and case_again is not None:
                pairs = zip(arguments(case), arguments(case_again), strict=True)
                assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs)
                assert (case.exact, case.tags) == (case_again.exact, case_again.tags)


def test_draws_and_seeds_differ() -> None:
    sample, other = (samples("add", "aten.add.Tensor", seed=seed)[-1] for seed in (0, 1))
    cases = [drawn(sample), drawn(sample, draw=1), drawn(other)]
    assert len({str(first(case).tolist()) for case in cases}) == 3


def test_neither_the_random_state_nor_the_sizes_of_torch_change() -> None:
    before = torch.get_rng_state()
    samples("addmm", seed=3)
    assert torch.equal(before, torch.get_rng_state())
    entry = next(entry for entry in opinfo_entries() if entry.name == "addmm")
    with opinfo_sizes({"S": 4}, ()):
        pass
    shapes = {tuple(sample.input.shape) for sample in entry.sample_inputs_func(entry, "cpu", torch.float64, False)}
    assert (5, 10) in shapes  # S and M


# --------------------------------------------------------------------------------------------------------------- sizes
def test_sizes_differ_are_uneven_and_smaller_than_the_ranks() -> None:
    shapes: list[set[int]] = [set(), set(), set()]
    for sample in samples("cumsum", "aten.cumsum.default"):
        for size, extents in enumerate(shapes):
            case = sample.draw(size, 0)
            if case is not None:
                extents |= set(first(case).shape)
    assert len({frozenset(extents) for extents in shapes}) == 3
    assert any(extent % 2 and extent % 3 for extent in shapes[0])
    assert max(shapes[1]) <= 3


def test_coinciding_extents_differ_at_one_size() -> None:
    (sample,) = [s for s in samples("abs", "aten.abs.default") if drawn(s).args[0].ndim == 2]  # type: ignore[attr-defined]
    shapes = [tuple(first(drawn(sample, size)).shape) for size in range(3)]
    assert len(set(shapes[2])) == 2


def test_structure_does_not_depend_on_the_draw() -> None:
    for sample in samples("nn.functional.nll_loss"):
        for size in range(3):
            shapes = {str([t.shape for t in arguments(c)]) for k in range(3) if (c := sample.draw(size, k)) is not None}
            assert len(shapes) <= 1


# -------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("name", ["nn.functional.embedding", "gather", "index_select", "nn.functional.nll_loss"])
def test_indices_stay_valid(name: str) -> None:
    for sample in samples(name):
        if not sample.not_testable:
            for size in range(3):
                for draw in range(DRAWS):
                    case = sample.draw(size, draw)
                    if case is not None:
                        run(case)  # raises on an index out of range


def test_values_are_small_integers_of_mixed_sign() -> None:
    case = drawn(samples("mm", "aten.mm.default")[0])
    assert case.exact
    values = torch.cat([tensor.flatten() for tensor in arguments(case)])
    assert torch.equal(values, values.round())
    assert (values > 0).any()
    assert (values < 0).any()


def test_values_that_are_picked_tie() -> None:
    for sample in samples("argmax", "aten.argmax.default"):
        values = first(drawn(sample, draw=1))
        if values.numel() > 6:
            assert (values == values.max()).sum() > 1


def test_the_domain_of_an_op_is_respected() -> None:
    for name in ("log", "acos", "sqrt"):
        for sample in samples(name):
            for draw in range(3):
                case = drawn(sample, draw=draw)
                assert not any(result.isnan().any() for result in tensors(run(case))), (name, sample.origin)


def test_values_that_belong_together_are_generated_anew() -> None:
    (sample, *_) = (s for s in samples("linalg.cholesky_ex") if first(drawn(s)).shape == (5, 5))
    matrices = [first(drawn(sample, draw=draw)) for draw in range(4)]
    assert len({str(matrix.tolist()) for matrix in matrices}) == 4
    for matrix in matrices:
        assert torch.linalg.cholesky_ex(matrix).info == 0


def test_exact_only_where_results_are_integers() -> None:
    assert not any(drawn(sample).exact for sample in samples("exp") if first(drawn(sample)).numel())
    assert all(drawn(sample).exact for sample in samples("neg", "aten.neg.default"))


def test_what_is_not_read_is_poisoned() -> None:
    for sample in samples("zeros_like"):
        case = drawn(sample)
        if first(case).is_floating_point():
            assert first(case).isnan().all()
    for sample in samples("aten.copy_.default"):
        buffer, source = arguments(drawn(sample))[:2]
        if buffer.is_floating_point() and buffer.numel():
            assert buffer.isnan().all()
            assert not source.isnan().all()


def test_what_is_read_is_not_poisoned() -> None:
    for name in ("where", "nn.functional.relu", "lt", "nn.functional.threshold"):
        for sample in samples(name):
            case = drawn(sample)
            outputs = tensors(case.kwargs) if "out=" in case.tags else []
            read = [tensor for tensor in arguments(case) if not any(tensor is output for output in outputs)]
            assert not any(tensor.isnan().any() for tensor in read), (sample.op, sample.origin)


@pytest.mark.parametrize(("dropped", "reason"), [((), ""), ((0.0,), ""), ((0.5,), "random")])
def test_attention_is_random_only_if_it_drops_something(dropped: tuple[float, ...], reason: str) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.rand(1, 2, 3, 4)
    assert why_not_testable(Call(op, (query, query, query, *dropped), {})) == reason


def test_special_values() -> None:
    values = []
    for sample in samples("clamp", "aten.clamp.default"):
        limits = [limit for limit in drawn(sample).args[1:] if isinstance(limit, int | float)]
        for draw in range(8):
            case = drawn(sample, draw=draw, values=Values.SPECIAL)
            assert "special" in case.tags
            values.append(first(case).flatten())
            assert torch.isin(values[-1], torch.tensor(limits, dtype=torch.float64)).any() or draw != 4
    found = torch.cat(values)
    assert found.isnan().any()
    assert found.isposinf().any()
    assert found.isneginf().any()
    assert (torch.signbit(found) & (found == 0)).any()


def test_values_next_to_others_are_compared_exactly() -> None:
    assert all(drawn(sample).exact for sample in samples("nextafter"))


def test_logical_ops_have_elements_that_are_zero() -> None:
    (sample, *_) = [one for one in samples("logical_not") if first(drawn(one)).numel() > 1]
    assert 0 < int((first(drawn(sample)) == 0).sum()) < first(drawn(sample)).numel()


def test_rounding_changes_what_it_is_given() -> None:
    cases = [drawn(sample) for sample in samples("round", "aten.round.decimals")]
    for case in (case for case in cases if case.kwargs["decimals"]):
        assert not torch.equal(torch.round(first(case), **case.kwargs), first(case))


def test_a_threshold_whose_parts_round_is_not_compared_exactly() -> None:
    rounds = {}
    for sample in (*samples("nn.functional.threshold"), *samples("nn.functional.hardshrink")):
        numbers = [number for number in drawn(sample).args[1:] if isinstance(number, float)]
        whole = all((8 * number).is_integer() for number in numbers)
        rounds[whole] = (drawn(sample).exact, drawn(sample, values=Values.SPECIAL).exact)
    assert rounds == {True: (True, True), False: (True, False)}


def test_no_special_values_where_the_op_cannot_take_them() -> None:
    assert all(sample.draw(0, 0, Values.SPECIAL) is None for sample in samples("grid_sampler_2d"))


@pytest.mark.parametrize(("extent", "several"), [(2, True), (0, False)])
def test_operands_of_several_dtypes_are_drawn_where_there_is_something_to_compute(extent: int, several: bool) -> None:
    """A kernel that has nothing to multiply looks at no dtype."""
    operands = (torch.ones(3, 3, 2), torch.ones(3, 3, extent), torch.ones(3, extent, 2))
    call = Call(torch.ops.aten.baddbmm.default, operands, {})
    changed = [one for variation in dtypes(call) if (one := variation.apply(call)) is not None]
    assert changed
    assert any(len({tensor.dtype for tensor in one.tensors}) > 1 for one in changed) is several


def test_factors_of_integers_are_integers() -> None:
    """Addmm of no columns refuses other factors, which it takes of some columns."""
    operands = (torch.ones(3, 2), torch.ones(3, 4), torch.ones(4, 2))
    call = Call(torch.ops.aten.addmm.default, operands, {"beta": 0.2, "alpha": 0.6})
    changed = [one for variation in dtypes(call) if (one := variation.apply(call)) is not None]
    whole = [one for one in changed if not any(tensor.is_floating_point() for tensor in one.tensors)]
    assert {one.tensors[0].dtype for one in whole} == {torch.int64, torch.bool}
    assert all(isinstance(one.values[name], int) for one in whole for name in ("beta", "alpha"))
    assert all(one.values["beta"] == 0.2 for one in changed if one not in whole)


def test_wide_values_lie_on_both_sides_of_a_number() -> None:
    for sample in samples("masked_fill", "aten.masked_fill.Scalar"):
        usual = drawn(sample)
        if usual.args[2] == 10 and first(usual).numel() > 10:
            wide = [drawn(sample, draw=draw, values=Values.WIDE) for draw in range(4)]
            assert first(usual).max() < 10
            assert max(first(case).max() for case in wide) == 11
            assert all(case.exact for case in wide)


def test_wide_values_are_of_both_signs_where_the_op_takes_them() -> None:
    of_one_sign = 0
    for sample in samples("nn.functional.smooth_l1_loss"):
        wide = sample.draw(0, 0, Values.WIDE)
        if wide is not None and first(wide).numel() > 10:
            of_one_sign += bool(first(drawn(sample)).sign().unique().numel() == 1)
            assert torch.isin(torch.tensor([-1.0, 1.0]), first(wide).sign()).all()
    assert of_one_sign
    for sample in samples("log", "aten.log.default"):  # a NaN elsewhere
        assert first(drawn(sample)).min() > 0
        assert sample.draw(0, 0, Values.WIDE) is None


# ----------------------------------------------------------------------------------------------- spellings and siblings
def test_other_spellings_of_a_reduction() -> None:
    cases = [drawn(sample) for sample in samples("sum", "aten.sum.dim_IntList")]
    assert any("negative dim" in case.tags for case in cases)
    assert any("keepdim" in case.tags for case in cases)
    dims = [case.args[1] for case in cases]
    assert [] in dims
    assert None in dims


def test_padding_idx_that_occurs() -> None:
    cases = [drawn(s) for s in samples("nn.functional.embedding", "aten.embedding_dense_backward.default")]
    assert any(isinstance(case.args[3], int) and case.args[3] >= 0 for case in cases)


def test_in_place_and_out_are_made_from_siblings() -> None:
    for op, tag in [("aten.mul_.Tensor", "in-place"), ("aten.mul.out", "out="), ("aten.mul_.Scalar", "in-place")]:
        found = samples("mul", op)
        assert found
        for sample in found:
            case = drawn(sample)
            assert tag in case.tags
            run(case)
    for sample in samples("mul", "aten.mul.out"):
        case = drawn(sample)
        buffer = case.kwargs["out"]
        assert isinstance(buffer, torch.Tensor)
        assert buffer.isnan().all()
        shape = buffer.shape
        run(case)
        assert buffer.shape == shape
        assert not buffer.isnan().any()


def test_foreach_ops() -> None:
    ops = {sample.op for sample in samples("_foreach_add")}
    assert ops >= {"aten._foreach_add.List", "aten._foreach_add_.List", "aten._foreach_add_.Scalar"}
    assert all("foreach" in drawn(sample).tags for sample in samples("_foreach_add"))
    shapes = [tensor.shape for tensor in arguments(drawn(samples("_foreach_add", "aten._foreach_add.List")[0]))]
    assert all(len(set(shape)) == len(shape) for shape in shapes)


# -------------------------------------------------------------------------------------------------------- not testable
@pytest.mark.parametrize(
    ("name", "op", "reason"),
    [
        ("bernoulli", "aten.bernoulli.default", "random"),
        ("uniform", "aten.uniform_.default", "random"),
        ("multinomial", "aten.multinomial.default", "random"),
        ("new_empty", "aten.new_empty.default", "uninitialised memory"),
        ("empty_like", "aten.empty_like.default", "uninitialised memory"),
    ],
)
def test_what_cannot_be_tested_is_named_once(name: str, op: str, reason: str) -> None:
    assert [sample.not_testable for sample in samples(name, op)] == [reason]


def test_slices_that_leave_something_out_are_among_the_samples() -> None:
    left_out = set()
    for sample in SOURCE.samples(Target("aten.slice.Tensor", SOURCE.name, "aten.slice.Tensor"), SampleOptions()):
        tensor, *others = sample.first.args
        assert tensor.numel() <= 4096
        left_out |= {tuple(others)} if torch.ops.aten.slice.Tensor(tensor, *others).shape != tensor.shape else set()
    assert {(1, 1, -2), (1, 1, -2, 3), (0, -10, -2, 2)} <= left_out


# ------------------------------------------------------------------------------------------------------------- capture
@pytest.fixture
def memory_of_nan() -> Iterator[None]:
    """Memory that nobody has written to is NaN, and not what it happens to be."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    "make",
    [
        lambda like: torch.empty(2, 3),
        torch.empty_like,
        lambda like: torch.empty_strided((2, 3), (1, 2)),
        lambda like: torch.empty_permuted((2, 3), (1, 0)),
        lambda like: like.new_empty(2, 3),
        lambda like: like.new_empty_strided((2, 3), (1, 2)),
    ],
    ids=["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"],
)
def test_memory_that_nobody_has_written_to_is_captured_as_zeros(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ones = torch.ones(2, 3)
    with capture_calls(lambda op: op is torch.ops.aten.neg.default, 100) as calls:
        make(ones).neg()
    ((_, (captured,), _),) = calls
    assert torch.equal(captured, torch.zeros(2, 3))


@pytest.mark.usefixtures("memory_of_nan")
def test_noise_that_rrelu_does_not_draw_is_captured_as_zeros() -> None:
    backward = torch.ops.aten.rrelu_with_noise_backward.default
    with capture_calls(lambda op: op is backward, 100) as calls:
        torch.nn.functional.rrelu(torch.ones(5, requires_grad=True), training=False).sum().backward()
    ((_, (_, _, noise, *_), _),) = calls
    assert torch.equal(noise, torch.zeros(5))


@pytest.mark.nightly
def test_providers_are_what_a_look_through_all_opinfos_finds() -> None:
    found: dict[str, dict[str, None]] = {}
    for row in row_names():
        composite = any(hidden(op) for op in registered_of().get(row, ()))
        for _, entry in entries_of(row):
            made = captured(entry, torch.float64, size=0, seed=0, wanted=lambda op: True, composite=composite, most=16)
            for call in (call for calls in made.values() for call in calls):
                found.setdefault(str(call.op), {})[row] = None
    foreign = {op: rows for op, rows in found.items() if not set(home_rows(op)) & set(rows)}
    assert {op: tuple(rows)[:3] for op, rows in foreign.items()} == PROVIDERS


def test_an_op_without_an_opinfo_is_sampled_without_looking_through_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "_reached_by", lambda row: pytest.fail(f"{row} was looked through"))
    assert samples("aten.index.Tensor", max_samples=1)
    assert samples("aten.copy.out", max_samples=1)


def test_an_op_that_gets_its_first_rule_after_the_source_was_prepared_has_calls() -> None:
    """A worker prepares before it runs the files of the user, which may be the first to give an op a rule."""
    SOURCE.prepare()
    op = torch.ops.aten.searchsorted.Tensor
    assert op not in registered_overloads(), "torch has a rule by now, take another op"
    with replaced_strategy(op):
        register_single_dim_strategy(op)(lambda op, args, kwargs: [])
        assert samples("aten.searchsorted.Tensor", max_samples=2)


def test_the_forward_of_embedding_bag_without_gradients_has_the_calls_of_the_other() -> None:
    op = torch.ops.aten._embedding_bag_forward_only.default
    with replaced_strategy(op):
        register_single_dim_strategy(op)(lambda op, args, kwargs: [])
        assert samples("aten._embedding_bag_forward_only.default", max_samples=2)


@pytest.mark.parametrize("name", ["aten.addbmm.default", "aten._trilinear.default"])
def test_an_overload_without_rules_has_samples_if_it_is_named(name: str) -> None:
    assert name not in {str(op) for op in registered_overloads()}
    for pattern in (name, name.removesuffix(".default")):
        (target,) = SOURCE.select((pattern,))
        assert target.overload == name
    found = list(SOURCE.samples(target, SampleOptions(sizes=1, max_samples=2, rare=False)))
    assert found
    assert {sample.op for sample in found} == {name}
    drawn(found[0])
    assert name not in {target.name for target in SOURCE.select(("aten.*",))}
    with pytest.raises(ValueError, match="no OpInfo and no aten overload"):
        SOURCE.select((name.replace("default", "no_such_overload"),))
