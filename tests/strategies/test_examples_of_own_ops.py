"""Calls of ops of one's own, from examples that are declared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import strategies as st
from ops_of_ones_own import LIBRARY, OPS, peaks, softmax
from torch.distributed.tensor import Replicate, Shard

import verifier
from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.extents import Extents
from strategies.own_ops.family import FAMILY
from strategies.own_ops.source import own_samples
from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase
from verifier.core.errors import SamplesError
from verifier.gate.baseline import Baseline
from verifier.planning.drawing import draw_each
from verifier.planning.families import DrawContext, installed_families, select_registered
from verifier.planning.own_samples import examples_of
from verifier.rules.campaign.request import RulesRequest, make_rules_plan
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions

pytestmark = pytest.mark.usefixtures("samples_taken_back")

R, S = Replicate(), Shard
QUICK = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, products=0, samples_called_again=0)


def test_extents_and_indices_are_varied_together() -> None:
    call = Call(OPS.pick.default, (torch.ones(8, 6), torch.tensor([7, 0, 3, 5, 2]), 8), {})
    extents = Extents.of(call)
    assert [len(group) for group in extents.groups] == [1, 1, 1]
    other = extents.at_size(2)
    assert other is not None
    table, ids, rows = other.args
    assert isinstance(table, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    assert (table.shape[0], table.shape[1], len(ids)) == (2, 3, 1)
    assert rows == 2
    assert int(ids.max()) < 2


def test_extents_keep_the_divisors_that_an_op_asks_for_and_its_results_differ() -> None:
    verifier.samples("test_own_ops::peaks")(lambda: [(torch.randn(6, 64),)])
    sample = next(own_samples("test_own_ops.peaks.default", SampleOptions()))
    cases = [case for size in range(3) if (case := sample.draw(size, 0)) is not None]
    made = [case.args[0] for case in cases]
    assert len({tuple(tensor.shape) for tensor in made if isinstance(tensor, torch.Tensor)}) == 3
    assert all(tensor.shape[1] % 32 == 0 for tensor in made if isinstance(tensor, torch.Tensor))
    assert len(set(peaks(made[0]).flatten().tolist())) > 1


def test_lists_keywords_and_optional_tensors_are_arguments_like_others() -> None:
    def examples() -> Iterator[tuple[object, ...]]:
        yield [torch.randn(4, 6), torch.randn(4, 6)], {"scale": torch.randn(6)}
        yield [torch.randn(4, 6)], {"scale": torch.randn(6), "bias": torch.randn(4, 6)}

    verifier.samples("test_own_ops.mixed")(examples)
    declared = [sample for sample in own_samples("test_own_ops.mixed.default", SampleOptions()) if not sample.rare]
    drawn = [sample.draw(size, 0) for sample in declared for size in range(3)]
    assert len(declared) == 2
    assert all(case is not None for case in drawn)
    assert {len(case.kwargs) for case in drawn if case is not None} == {1, 2}


def test_a_pair_of_arguments_and_keywords_is_an_example_unless_the_op_takes_a_list_first() -> None:
    x, bias = torch.randn(4, 6), torch.randn(4, 6)
    verifier.samples("test_own_ops::softmax")(lambda: [((x,), {"dim": 1})])
    verifier.samples("test_own_ops.mixed")(lambda: [((x, x), {"scale": x, "bias": bias})])
    assert any(len(one.args) == 1 and one.args[0] is x for one in examples_of("test_own_ops.softmax.default"))
    assert any(one.args == ((x, x),) for one in examples_of("test_own_ops.mixed.default"))


def test_hypothesis_generators_are_drawn_from_and_draw_the_same_again() -> None:
    extents = st.tuples(st.integers(2, 9), st.integers(2, 9))
    verifier.samples("test_own_ops::softmax")(lambda: extents.map(lambda shape: (torch.ones(shape),)))
    first, second = (
        [example.args[0].shape for example in examples_of("test_own_ops.softmax.default")] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) > 3


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (
            [torch.ones(2)],
            r"a Tensor is no tuple of arguments; write \(x,\) for a single one \(.*test_examples_of_own_ops.py:\d+\)",
        ),
        ([], r"it gave no example \(.*test_examples_of_own_ops.py:\d+\)"),
        (3, r"it has to yield tuples of arguments, and returned a int \(.*test_examples_of_own_ops.py:\d+\)"),
        ([(torch.ones(2), 3)], "the op does not take example 0: RuntimeError"),
    ],
)
def test_examples_that_are_none_are_refused(examples: object, said: str) -> None:
    name = "test_own_ops.attend.default"
    verifier.samples(name)(lambda: examples)
    from verifier.planning import own_samples as declared

    try:
        with pytest.raises(ValueError, match=said):
            list(own_samples(name, SampleOptions()))
    finally:
        declared._makers[name].pop()


def test_gradients_that_only_a_kernel_knows_are_not_verified() -> None:
    """Autograd looks into the kernel on plain tensors, and not on DTensors, whatever the rules are."""
    LIBRARY.define("doubled(Tensor x) -> Tensor")
    LIBRARY.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
    name = "test_own_ops.doubled.default"
    verifier.samples(name)(lambda: [(torch.randn(4, 3),)])
    verifier.samples("test_own_ops::softmax")(lambda: [(torch.randn(4, 3),)])
    assert OPS.doubled(torch.ones(2, requires_grad=True)).requires_grad
    context = DrawContext(MeshSpec((2,)), (torch.float64,), (name, "test_own_ops.softmax.default"))
    cases: list[OpCase] = []
    draw_each(FAMILY.cases(context), 0, 8, cases.append)
    drawn = [case for case in cases if case.op == name]
    assert drawn
    assert not any(t.requires_grad for case in drawn for t in tensor_arguments(case.args, case.kwargs))
    assert [op for op, why in FAMILY.left_out(context) if "no gradient formula" in why] == [name]


def test_a_name_without_its_namespace_is_completed() -> None:
    verifier.samples("test_own_ops::leaky")(lambda: [(torch.randn(4, 3, 2), 0.5)])
    with pytest.raises(ValueError, match=r"'leaky'; did you mean 'test_own_ops\.leaky\.default'"):
        make_rules_plan(RulesRequest(patterns=["leaky"]), Baseline())


def test_the_line_at_which_an_example_raises_is_named() -> None:
    from verifier.planning import own_samples as declared

    name = "test_own_ops.attend.default"
    verifier.samples(name)(lambda: torch.ones(2).view(3))
    try:
        with pytest.raises(
            SamplesError, match=r"it raised RuntimeError: shape .* \(.*test_examples_of_own_ops.py:\d+\)"
        ):
            select_registered((name,), installed_families())
    finally:
        declared._makers[name].pop()


def test_a_name_that_is_none_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="no op test_own_ops::sofmax is registered; did you mean 'softmax'"):
        verifier.samples("test_own_ops::sofmax")
    with pytest.raises(ValueError, match="'softmax' does not name an op"):
        verifier.samples("softmax")
    with pytest.raises(ValueError, match="give the name of an op"):
        verifier.samples(softmax)  # type: ignore[arg-type]
