"""The check of one sample, on calls made by hand: what it confirms, refutes, and finds missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._ops.utils import register_op_strategy
from torch.distributed.tensor.experimental import register_sharding

from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import VerdictKind
from verifier.rules.check import check_sample
from verifier.rules.options import DRAWS_FOR_MISSING, CheckOptions, Position
from verifier.rules.products import Products
from verifier.rules.results import SampleReport
from verifier.rules.samples import Values
from verifier.torch_internals.registries import replaced_strategy

TWO = MeshSpec((2,))
THREE = MeshSpec((3,))
SQUARE = MeshSpec((2, 2))
SIZES = ((5, 3, 4), (4, 2, 5), (6, 5, 3))

Make = Callable[[torch.Generator, tuple[int, int, int]], tuple[tuple[object, ...], dict[str, object]]]


@dataclass
class HandMade:
    """A sample whose calls a function makes; ``wide`` makes those with wide values, if there are any."""

    op: str
    make: Make
    exact: bool = True
    origin: str = "by hand"
    not_testable: str = ""
    claims_only: str = ""
    sizes: tuple[tuple[int, int, int], ...] = field(default=SIZES)
    wide: Make | None = None

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        make = {Values.USUAL: self.make, Values.WIDE: self.wide}.get(values)
        if size >= len(self.sizes) or make is None:
            return None
        generator = torch.Generator().manual_seed(1000 * size + draw)
        args, kwargs = make(generator, self.sizes[size])
        return OpCase(self.op, f"torch.ops.{self.op}", args, kwargs, exact=self.exact)


def floats(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=generator).double()


def embedding(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
    return (floats(g, s[0], s[1]), torch.randint(0, s[0], (s[2],), generator=g)), {}


def pair(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
    return (floats(g, s[0], s[1]), floats(g, s[0], s[1])), {}


def check(sample: HandMade, *meshes: MeshSpec, **options: object) -> SampleReport:
    return check_sample(sample, CheckOptions(meshes or (TWO,), **options))  # type: ignore[arg-type]


def texts(report: SampleReport, what: str) -> set[str]:
    if what == "confirmed":
        return {f"{', '.join(r.inputs)} -> {', '.join(r.outputs)}" for r in report.confirmed}
    rules = [wrong.rule for wrong in report.wrong] if what == "wrong" else report.missing
    return {f"{', '.join(r.inputs)} -> {', '.join(r.outputs)}" for r in rules}


# ------------------------------------------------------------------------------------------------------------- verdicts
def test_the_rules_of_embedding_are_confirmed_and_its_partial_weights_are_missing() -> None:
    report = check(HandMade("aten.embedding.default", embedding))
    assert texts(report, "confirmed") == {
        "R, R -> R",
        "S(1), R -> S(1)",
        "R, S(0) -> S(0)",
        "S(0), MaskP(sum) -> MaskP(sum)",
    }
    assert not report.wrong
    assert texts(report, "missing") == {f"P({r}), R -> P({r})" for r in ("sum", "avg", "product", "min", "max")}
    for missing in report.missing.values():
        assert missing.draws >= DRAWS_FOR_MISSING
        assert missing.sizes == 3
        assert missing.calls == ["weight=f[n, n], indices=i[n]"]
        assert [transfer.argument for transfer in missing.saves] == [0]
        assert missing.bytes_saved > 0


def test_a_row_wise_lookup_in_an_empty_shard_is_a_wrong_rule() -> None:
    report = check(HandMade("aten.embedding.default", embedding), TWO, THREE)
    assert texts(report, "wrong") == {"S(0), MaskP(sum) -> MaskP(sum)"}
    (wrong,) = report.wrong
    assert wrong.verdict is VerdictKind.CRASH
    assert wrong.mesh == "3"
    assert wrong.shapes[0] == (4, 2)  # 4 rows on 3 ranks: 2, 2, 0


def test_a_rule_that_dtensor_reaches_by_cutting_locally_is_not_missing() -> None:
    # (S(0), R) -> S(0) holds for mm and is claimed; (R, R) -> anything else needs no communication either.
    report = check(HandMade("aten.mm.default", lambda g, s: ((floats(g, s[0], s[1]), floats(g, s[1], s[2])), {})))
    assert not report.wrong
    assert not report.missing
    assert "S(1), S(0) -> P(sum)" in texts(report, "confirmed")


def test_what_is_claimed_at_one_size_is_not_missing_at_another() -> None:
    report = check(HandMade("aten.add.Tensor", pair), TWO, THREE)
    assert texts(report, "missing") == {"R, P(max) -> P(max)", "R, P(min) -> P(min)"}


@pytest.mark.parametrize("meshes", [(TWO,), (TWO, SQUARE)], ids=str)
@pytest.mark.parametrize(("infinite", "accused"), [({0}, False), ({1}, False), ({*range(1000)}, True)])
def test_a_draw_that_came_upon_an_infinity_is_left_out_if_another_did_not(
    infinite: set[int], accused: bool, meshes: tuple[MeshSpec, ...]
) -> None:
    def make(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        most = torch.inf if g.initial_seed() % 1000 in infinite else 3.0
        return (floats(g, s[0], s[1]), torch.full((s[0], s[1]), most).double()), {}

    wrong = texts(check(HandMade("aten.mul.Tensor", make), *meshes), "wrong")
    assert ("P(sum), R -> P(sum)" in wrong) is accused
    assert accused or not wrong


def test_an_infinity_that_a_zero_hides_accuses_nobody() -> None:
    """0 * log(0) is 0 by definition, and each part of that 0 times log(0) is infinite."""
    op, other = "aten.special_xlog1py.default", torch.tensor(-1.0).double()
    made = HandMade(op, lambda g, s: ((torch.zeros(s[0]).double(), other), {}))
    report = check(made, claims_only=True)
    assert not report.wrong
    assert {"P(sum), R -> P(sum)"} <= {str(one.rule).partition(": ")[2] for one in report.special}


def test_a_rule_that_fails_by_nan_alone_is_accused() -> None:
    """The root of the maximum is no maximum of roots: a negative part has none."""
    with replaced_strategy(torch.ops.aten.sqrt.default, lambda op, args, kwargs: [[Partial("max"), Partial("max")]]):
        report = check(HandMade("aten.sqrt.default", lambda g, s: ((floats(g, s[0]).abs(),), {})), claims_only=True)
    assert texts(report, "wrong") == {"P(max) -> P(max)"}


def test_claims_alone_are_tried_on_request() -> None:
    everything = check(HandMade("aten.add.Tensor", pair))
    claims = check(HandMade("aten.add.Tensor", pair), claims_only=True)
    assert claims.confirmed == everything.confirmed
    assert not claims.missing
    assert claims.combinations < everything.combinations


def masked(most: int) -> Make:
    """Return what makes calls that fill 10 into values up to ``most``."""

    def make(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        values = torch.randint(-4, most + 1, (s[0], s[1]), generator=g).double()
        return (values, torch.randint(2, (s[0], s[1]), generator=g).bool(), 10), {}

    return make


def test_a_rule_that_holds_because_of_what_is_drawn_is_not_missing() -> None:
    """Among smaller values the maximum is 10 wherever any rank fills it in; among larger ones it is not."""
    narrow = check(HandMade("aten.masked_fill.Scalar", masked(4)))
    wide = check(HandMade("aten.masked_fill.Scalar", masked(4), wide=masked(12)))
    true = {f"P({kind}), R -> P({kind})" for kind in ("avg", "max", "min")}
    lucky = {f"R, P({kind}) -> P({result})" for kind, result in (("max", "max"), ("min", "min"), ("product", "min"))}
    assert texts(narrow, "missing") == true | lucky | {"P(max), P(max) -> P(max)"}
    assert texts(wide, "missing") == true
    assert wide.confirmed == narrow.confirmed


def test_too_few_sizes_are_not_enough_for_a_missing_rule() -> None:
    report = check(HandMade("aten.embedding.default", embedding, sizes=SIZES[:2]))
    assert not report.missing
    assert report.untested["that hold, but in too few draws or sizes to be called missing"] == 5


def test_an_output_of_zeros_proves_nothing() -> None:
    report = check(HandMade("aten.mul.Tensor", lambda g, s: ((torch.zeros(s[0], s[1]), floats(g, s[0], s[1])), {})))
    assert not report.missing


# -------------------------------------------------------------------------------------------------------- kinds of call
def test_an_in_place_op_has_to_keep_the_placement_of_what_it_writes_to() -> None:
    report = check(HandMade("aten.add_.Tensor", pair))
    assert "S(0), S(0) -> S(0)" in texts(report, "confirmed")
    assert not report.wrong
    for rule in report.missing:
        assert rule.inputs[0] == rule.outputs[0]


def test_an_out_buffer_has_the_placement_of_what_is_written_to_it() -> None:
    def make(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return pair(g, s)[0], {"out": torch.full((s[0], s[1]), float("nan"), dtype=torch.float64)}

    report = check(HandMade("aten.add.out", make))
    assert "S(0), S(0), S(0) -> S(0)" in texts(report, "confirmed")
    assert not report.wrong
    for rule in report.missing:
        assert rule.inputs[2] == rule.outputs[0]


def test_lists_are_placed_element_by_element() -> None:
    def make(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return ([floats(g, s[0], s[1]), floats(g, s[2])], [floats(g, s[0], s[1]), floats(g, s[2])]), {}

    report = check(HandMade("aten._foreach_add.List", make))
    assert "S(0), S(0), S(0), S(0) -> S(0), S(0)" in texts(report, "confirmed")
    assert not report.wrong


def test_an_in_place_foreach_is_judged_by_what_it_writes() -> None:
    def make(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return ([floats(g, s[0], s[1]), floats(g, s[2])],), {}

    report = check(HandMade("aten._foreach_neg_.default", make))
    assert "S(0), S(0) -> S(0), S(0)" in texts(report, "confirmed")
    assert not report.wrong


def test_sizes_among_the_arguments_are_rewritten_as_dtensor_does() -> None:
    view = HandMade("aten.view.default", lambda g, s: ((floats(g, 6, s[1]), [6 * s[1]]), {}))
    report = check(view)
    assert not report.wrong
    assert "S(0) -> S(0)" in texts(report, "confirmed")
    assert "S(1) -> _S(0, 6)" in texts(check(HandMade(view.op, view.make, sizes=((1, 4, 1),))), "confirmed")
    zeros = check(HandMade("aten.new_zeros.default", lambda g, s: ((floats(g, s[0], s[1]), [s[0], s[1]]), {})))
    assert "S(0) -> S(0)" in texts(zeros, "confirmed")
    assert not zeros.wrong


def test_several_results_have_a_placement_each() -> None:
    def make(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return (floats(g, s[0], s[1]), [s[1]], floats(g, s[1]), floats(g, s[1]), 1e-5), {}

    report = check(HandMade("aten.native_layer_norm.default", make, exact=False))
    assert "S(0), R, R -> S(0), S(0), S(0)" in texts(report, "confirmed")
    assert not report.wrong


def test_norms_of_shards_are_understood() -> None:
    report = check(HandMade("aten.linalg_vector_norm.default", lambda g, s: ((floats(g, s[0], s[1]), 2), {}), False))
    assert "S(0) -> _NormP(2)" in texts(report, "confirmed")
    assert not report.wrong


@pytest.mark.parametrize("mesh", [TWO, SQUARE], ids=str)
def test_a_norm_may_write_to_parts_of_a_norm_and_nothing_else_takes_them(mesh: MeshSpec) -> None:
    def norm(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return (floats(g, s[0], s[1]), 2), {"out": floats(g)}

    op = torch.ops.aten.linalg_vector_norm.out
    with replaced_strategy(op, lambda op, args, kwargs: [[_NormPartial(2), Shard(0), _NormPartial(2)]]):
        report = check(HandMade(str(op), norm, False), TWO, mesh)
    assert "S(0), _NormP(2) -> _NormP(2)" in texts(report, "confirmed")
    assert not report.wrong

    with replaced_strategy(torch.ops.aten.neg.default, lambda op, args, kwargs: [[_NormPartial(2), _NormPartial(2)]]):
        report = check(HandMade("aten.neg.default", lambda g, s: ((floats(g, s[0]),), {})))
    assert texts(report, "confirmed") == {"R -> R"}
    assert not report.wrong
    assert report.untested["a placement that a tensor of this dtype and shape cannot have"]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda: [([[Replicate()]], [[Replicate()]])], "unhashable"),
        (lambda: [([Replicate()], ["R"])], "'str' object has no attribute 'is_replicate'"),
        (lambda: sys.exit(3), "3"),
    ],
    ids=["a list", "a text", "the end of the process"],
)
def test_a_strategy_that_gives_no_placements_is_what_fails(result: Callable[[], object], says: str) -> None:
    op = torch.ops.aten.neg.default
    with replaced_strategy(op):
        register_sharding(op)(lambda x: result())
        report = check(HandMade(str(op), lambda g, s: ((floats(g, s[0]),), {})))
    assert {wrong.verdict for wrong in report.wrong} == {VerdictKind.CRASH}
    assert any(says in wrong.message for wrong in report.wrong)


def test_an_op_without_a_strategy_is_traced_through_its_decomposition() -> None:
    report = check(HandMade("aten.mse_loss.default", lambda g, s: ((*pair(g, s)[0], 0), {})))
    assert "S(0), S(0) -> S(0)" in texts(report, "confirmed")
    assert not report.wrong


def test_products_of_rules_are_tried_on_a_mesh_of_two_dims() -> None:
    report = check(HandMade("aten.mm.default", lambda g, s: ((floats(g, 5, 3), floats(g, 3, 4)), {})), TWO, SQUARE)
    assert not report.wrong
    both = {rule for rule in report.confirmed if rule.inputs[0].startswith("(")}
    assert len(both) >= 6


@pytest.mark.parametrize(("limit", "tried"), [(16, 16), (15, 15), (5, 5)])
def test_every_product_is_tried_if_the_limit_allows(limit: int, tried: int) -> None:
    rules = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)]
    place = SimpleNamespace(ledger=SimpleNamespace(options=SimpleNamespace(products=limit)), mesh=MeshSpec((2, 2)))
    chosen = Products._chosen(place, rules, seed=0)  # type: ignore[arg-type]
    assert len(set(chosen)) == len(chosen) <= tried
    assert len(chosen) == 16 or limit < 16
    assert {index for choice in chosen for index in choice} == set(range(4)) or limit < 8


@pytest.mark.parametrize("dim", range(5))
def test_each_tensor_dim_is_cut_by_both_mesh_dims(dim: int) -> None:
    """A strategy for a whole mesh that forgets the second of two cuts of one tensor dim."""

    def strategy(schema: OpSchema) -> OpStrategy:
        given = schema.args_schema[0]
        assert isinstance(given, OpStrategy)
        spec = given.strategies[0].output_spec
        twice = spec.placements == (Shard(dim), Shard(dim))
        result = DTensorSpec(
            spec.mesh, (Shard(dim), Replicate()) if twice else spec.placements, tensor_meta=spec.tensor_meta
        )
        return OpStrategy([OpSpec(result, input_specs=(spec,), redistribute_cost=[[0.0]])])

    clone = torch.ops.aten.clone.default
    sample = HandMade("aten.clone.default", lambda g, s: ((floats(g, *s, 5, 3),), {}))
    with replaced_strategy(clone):
        register_op_strategy(clone)(strategy)
        report = check(sample, TWO, SQUARE)
    at = {tuple(wrong.rule.inputs): wrong.verdict for wrong in report.wrong if wrong.mesh == "2x2"}
    assert at == {(f"(S({dim}), S({dim}))",): VerdictKind.WRONG_SHAPE}


# ------------------------------------------------------------------------------------------------------------ precision
def test_the_same_seed_gives_the_same_report() -> None:
    first = check(HandMade("aten.embedding.default", embedding), TWO, THREE)
    second = check(HandMade("aten.embedding.default", embedding), TWO, THREE)
    assert first.confirmed == second.confirmed
    assert first.missing == second.missing
    assert [w.message for w in first.wrong] == [w.message for w in second.wrong]


def test_what_ended_a_process_is_left_out_and_counts_as_died() -> None:
    visited: list[Position] = []
    sample = HandMade("aten.add.Tensor", pair)
    whole = check_sample(sample, CheckOptions((TWO,)), enter=visited.append)
    fatal = next(p for p in visited if p[3] == 8)
    rest: list[Position] = []
    report = check_sample(sample, CheckOptions((TWO,)), enter=rest.append, skip=frozenset({fatal}))
    assert not any(position[3] == fatal[3] for position in rest)
    assert report.untested["DIED: it ended the process"] == 3  # sizes: it is not tried at the others either
    assert len(report.died) == 3
    assert report.combinations == whole.combinations - 3 * 8  # which have no verdict


def test_a_claim_that_ended_a_process_is_an_accusation() -> None:
    visited: list[Position] = []
    sample = HandMade("aten.neg.default", lambda g, s: ((floats(g, s[0], s[1]),), {}))
    check_sample(sample, CheckOptions((TWO,)), enter=visited.append)
    sharded = next(p for p in visited if p[2:] == (0, 1))  # S(0), which neg claims
    report = check_sample(sample, CheckOptions((TWO,)), skip=frozenset({sharded}))
    assert [(w.verdict, w.rule.inputs) for w in report.wrong] == [(VerdictKind.DIED, ("S(0)",))]


def test_an_op_that_ends_the_process_again_and_again_has_its_claims_tried_and_nothing_else() -> None:
    sample = HandMade("aten.add.Tensor", pair)
    whole = check(sample)
    fatal = frozenset((0, 0, 0, number) for number in (20, 21, 22, 23))
    report = check_sample(sample, CheckOptions((TWO,)), skip=fatal)
    assert report.confirmed == whole.confirmed
    assert not report.missing
    assert report.untested == {"it ended the process 4 times: only what DTensor claims is tried": 1}
    trusting = HandMade("aten.add.Tensor", pair, claims_only="its kernel trusts sizes")
    assert check(trusting).untested == {"its kernel trusts sizes": 1}


def test_random_ops_are_named_and_not_run() -> None:
    report = check(HandMade("aten.rand_like.default", pair, not_testable="random"))
    assert report.not_testable == "random"
    assert report.runs == 0


@pytest.mark.parametrize("meshes", [(TWO,), (THREE,), (TWO, THREE)])
def test_every_missing_rule_has_held_often_enough(meshes: tuple[MeshSpec, ...]) -> None:
    assert CheckOptions(meshes).draws * len(meshes) * 3 >= DRAWS_FOR_MISSING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rule_is_missing_because_a_narrow_dtype_hides_what_is_wrong_with_it(dtype: torch.dtype) -> None:
    def make(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return tuple(tensor.to(dtype) for tensor in pair(g, s)[0] if isinstance(tensor, torch.Tensor)), {}

    exact = texts(check(HandMade("aten.mul.Tensor", pair)), "missing")
    for is_exact in (True, False):
        report = check(HandMade("aten.mul.Tensor", make, exact=is_exact))
        assert texts(report, "missing") <= exact
        assert not report.wrong


def test_an_exception_without_a_message_is_named_with_the_function_that_raised_it() -> None:
    """The handler of convolutions wants lists, which DTensor makes tuples where it flattens the arguments."""

    def convolution(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return (floats(g, s[0], 1, 3), floats(g, 1, 1, 1), None, [1], [0], [1], False, [0], 1), {}

    op = torch.ops.aten.convolution.default
    with replaced_strategy(op):
        info = RuntimeSchemaInfo(3, needs_pytree=True)
        register_single_dim_strategy(op, schema_info=info)(lambda op, args, kwargs: [])
        options = CheckOptions((TWO,), sizes=1, claims_only=True, samples_called_again=0)
        wrong = check_sample(HandMade(str(op), convolution), options).wrong
    messages = {one.message for one in wrong}
    assert messages == {"a rank raised AssertionError: no message, in tp_convolution of _tp_conv.py"}


def rows_on_one_mesh_dim_only(schema: OpSchema) -> OpStrategy:
    """Claim S(0) and S(1), and on meshes of several dims no product of the two."""
    mesh = schema.get_mesh_from_args()
    some = [(Shard(0),), (Shard(1),)] if mesh.ndim == 1 else [(Shard(0), Replicate()), (Shard(0), Shard(0))]
    strategies = [(Replicate(),) * mesh.ndim, *some]
    specs = [DTensorSpec(mesh, placements) for placements in strategies]
    given = schema.args_schema[0]
    assert isinstance(given, OpStrategy)
    costs = [[float(placements != one.output_spec.placements) for one in given.strategies] for placements in strategies]
    return OpStrategy([OpSpec(spec, (spec,), [cost]) for spec, cost in zip(specs, costs, strict=True)])


def test_products_that_hold_and_that_dtensor_does_not_claim_are_missing() -> None:
    def whole(g: torch.Generator, s: tuple[int, int, int]) -> tuple[tuple[object, ...], dict[str, object]]:
        return (floats(g, s[0], s[2]),), {}

    sample = HandMade("aten.neg.default", whole)
    with replaced_strategy(torch.ops.aten.neg.default):
        register_op_strategy(torch.ops.aten.neg.default)(rows_on_one_mesh_dim_only)
        report = check_sample(sample, CheckOptions((TWO, THREE, SQUARE), products=99))
    two_dims = {rule.inputs: record for rule, record in report.missing.items() if "," in rule.inputs[0]}
    assert ("(S(0), S(1))",) in two_dims
    assert ("(S(0), S(0))",) not in two_dims
    record = two_dims["(S(0), S(1))",]
    assert record.output_placements == ["(S(0), S(1))"]
    assert record.world_sizes == [4]
    assert record.collectives_saved > 0
    assert record.bytes_saved > 0
    assert record.draws >= 8
    assert not report.wrong


def test_a_rule_that_asks_for_the_inference_mode_is_checked_in_it_as_well() -> None:
    """A strategy that leaves the flipped dim cut where nothing is trained."""
    flip = torch.ops.aten.flip.default

    def strategy(_op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
        return [[Shard(dim), Shard(dim)] for dim in range(2) if dim not in args[1] or torch.is_inference_mode_enabled()]

    sample = HandMade("aten.flip.default", lambda g, s: ((floats(g, 4, 6), [1]), {}))
    with replaced_strategy(flip):
        register_single_dim_strategy(flip)(strategy)
        training, inferring = (check_sample(sample, CheckOptions(meshes=(TWO,)), number) for number in (0, 1))
    assert training.wrong == []
    assert {(wrong.rule.inputs, wrong.verdict) for wrong in inferring.wrong} == {(("S(1)",), VerdictKind.WRONG_VALUE)}


def test_a_rule_that_asks_for_the_number_of_ranks_is_told_that_of_the_mesh() -> None:
    """A strategy that leaves the flipped dim cut where the world has three ranks, and one that never does."""
    flip = torch.ops.aten.flip.default

    def strategy(wrong: int, _op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
        cut = dist.get_world_size() == wrong and dist.get_rank() < wrong
        return [[Shard(dim), Shard(dim)] for dim in range(2) if dim not in args[1] or cut]

    sample = HandMade("aten.flip.default", lambda g, s: ((floats(g, 4, 6), [1]), {}))
    found = {}
    for wrong in (3, 99):
        with replaced_strategy(flip):
            register_single_dim_strategy(flip)(partial(strategy, wrong))
            found[wrong] = check_sample(sample, CheckOptions(meshes=(TWO, MeshSpec((3,)))))
    assert not dist.is_initialized()
    assert {(wrong.rule.inputs, str(wrong.mesh)) for wrong in found[3].wrong} == {(("S(1)",), "3")}
    assert found[99].wrong == []
    assert {rule.inputs for rule in found[99].confirmed} == {("R",), ("S(0)",)}
