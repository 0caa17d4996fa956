"""A reader that wants claims alone says the same of them, and does without what decisions to redistribute cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.experimental import register_sharding

from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.claims.values import Propagation
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.placements import Combination, placement_text
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten
Rules = Callable[..., list[tuple[list[Any], list[Any]]]]
R, P, S, MAX = Replicate(), Partial(), Shard(0), Partial("max")
LETTERS = (R, S, Shard(1), P, Partial("avg"), MAX)


@contextmanager
def registered(op: OpOverload, rules: Rules) -> Iterator[None]:
    with replaced_strategy(op):
        register_sharding(op)(rules)
        yield


def reader_of(op: OpOverload, *args: object) -> ClaimReader:
    return ClaimReader(op, args, {}, op(*args))


def placed(tensors: int, *letters: Any) -> list[Combination]:
    """Return all combinations of ``letters`` on one mesh dim, and some on two."""
    columns = list(itertools.product(letters, repeat=tensors))
    pairs = [*zip(columns, columns, strict=True), *itertools.pairwise(columns)]
    return [tuple((p,) for p in column) for column in columns] + [tuple(zip(*pair, strict=True)) for pair in pairs]


def claims(
    op: OpOverload, args: tuple[object, ...], tensors: int, alone: bool, everywhere: bool = True
) -> dict[Combination, Propagation]:
    reader = reader_of(op, *args)
    reader.asks_everywhere = everywhere
    found = {}
    for combination in placed(tensors, *LETTERS):
        decided = reader.at(combination, (2,) * len(combination[0]), only_claims=alone)
        if decided is not None and decided.inputs == combination:
            found[combination] = decided
    return found


def rows(x: Any) -> list[tuple[list[Any], list[Any]]]:
    return [([R], [R]), ([S], [S]), ([MAX], [MAX])]


def by_placements(x: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return a rule that it has only for what is placed so."""
    return [([R], [R]), *([([P], [P])] if x.placements[0] == P else [])]


def of_two(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    return [([R], [R, R]), ([S], [S, S]), ([S], [S, R]), ([P], [P, R])]


def by_both(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return a rule that it has only for what is placed so."""
    return [*of_two(x, y), *([([MAX], [MAX, R])] if y.placements[0] == R and x.placements[0] == MAX else [])]


@pytest.mark.parametrize(
    ("op", "rules", "tensors", "least"),
    [
        (aten.trunc.default, rows, 1, 6),
        (aten.trunc.default, by_placements, 1, 4),
        (aten.atan2.default, of_two, 2, 8),
        (aten.atan2.default, by_both, 2, 6),
    ],
)
def test_claims_are_the_same(op: OpOverload, rules: Rules, tensors: int, least: int) -> None:
    args = tuple(torch.randn(4, 4) for _ in range(tensors))
    with registered(op, rules):
        every = claims(op, args, tensors, alone=False)
        for everywhere in (True, False):
            assert claims(op, args, tensors, alone=True, everywhere=everywhere) == every
    assert len(every) >= least


def test_indices_that_are_masked_on_the_way_are_claimed() -> None:
    """DTensor masks replicated indices by itself, so that a rule which wants them masked is claimed."""
    from torch.distributed.tensor._ops._embedding_ops import _MaskPartial

    def masked(weight: Any, indices: Any, *_: Any) -> list[tuple[list[Any], list[Any]]]:
        partial = _MaskPartial(offset_shape=weight.shape, offset_dim=0)
        return [([R], [R, R]), ([partial], [S, partial])]

    weight, ids = torch.randn(4, 3), torch.tensor([0, 3])
    with registered(aten.embedding.default, masked):
        reader = reader_of(aten.embedding.default, weight, ids)
        decided = reader.at(((S,), (R,)), (2,), only_claims=True)
        assert decided is not None
        assert [placement_text(one) for one in decided.inputs] == ["S(0)", "MaskP(sum)"]
        assert reader.at(((P,), (R,)), (2,), only_claims=True) is None
        reader.asks_everywhere = False
        again = reader.at(((S,), (R,)), (2,), only_claims=True)
        assert again is not None
        assert repr(again) == repr(decided)
        assert reader.at(((P,), (R,)), (2,), only_claims=True) is None


def test_what_decisions_to_redistribute_cost_is_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(utils, "redistribute_cost", lambda *specs: asked.append(specs) or 0.0)
    with registered(aten.trunc.default, rows):
        reader = reader_of(aten.trunc.default, torch.randn(4, 4))
        assert reader.at(((P,),), (2,), only_claims=True) is None
        assert not asked
        assert reader.at(((P,),), (2,)) is not None
        assert asked
        assert reader.at(((S,),), (2,), only_claims=True) is not None


def test_a_function_that_fails_or_writes_is_found_out_where_nothing_is_claimed() -> None:
    def fails(x: Any) -> list[tuple[list[Any], list[Any]]]:
        assert x.placements[0] != P, "not this"
        return rows(x)

    def strange(x: Any) -> list[tuple[list[Any], list[Any]]]:
        return [([R], [R]), ([S], ["S(0)"])]

    def lacks_one(x: Any) -> list[tuple[list[Any], list[Any]]]:
        return [([R], [R]), ([S], [])]

    for rules in (fails, strange, lacks_one):
        with registered(aten.trunc.default, rules):
            for alone in (True, False):
                reader = reader_of(aten.trunc.default, torch.randn(4, 4))
                assert reader.at(((P,),), (2,), only_claims=alone) is None
                assert len(reader.failures) == 1, rules

    def writes(x: Any, dims: Any) -> list[tuple[list[Any], list[Any]]]:
        dims[:] = [0]
        return [([R], [R, None])]

    with registered(aten.flip.default, writes):
        for alone in (True, False):
            reader = reader_of(aten.flip.default, torch.randn(4, 4), [1])
            assert reader.at(((S,),), (2,), only_claims=alone) is not None
            assert reader.written, "DTensor would run the op with other dims"


LISTS = [torch.randn(4, 4), torch.randn(4, 4)]
OF_TORCH: list[tuple[OpOverload, tuple[object, ...], int]] = [
    (aten.add.Tensor, (torch.randn(4, 4), torch.randn(4)), 2),
    (aten.add_.Tensor, (torch.randn(4, 4), torch.randn(4, 1)), 2),
    (aten.mul.Scalar, (torch.randn(4, 4), 2), 1),
    (aten.clamp.Tensor, (torch.randn(4, 4), torch.randn(4, 4)), 2),
    (aten._foreach_add.List, (LISTS[:1], LISTS[1:]), 2),
    (aten._foreach_mul_.Scalar, (LISTS[:1], 2.0), 1),
    (aten.mm.default, (torch.randn(4, 4), torch.randn(4, 4)), 2),
    (aten.scatter.value, (torch.randn(4, 4), 0, torch.zeros(4, 4, dtype=torch.long), 1.0), 2),
    (aten.mse_loss.default, (torch.randn(4, 4), torch.randn(4, 4)), 2),
    (aten.squeeze.dim, (torch.randn(4, 1, 4), 1), 1),
]


@pytest.mark.parametrize(("op", "args", "tensors"), OF_TORCH, ids=[str(op) for op, *_ in OF_TORCH])
def test_claims_of_torchs_own_rules_are_the_same(op: OpOverload, args: tuple[object, ...], tensors: int) -> None:
    every = claims(op, args, tensors, alone=False)
    for everywhere in (True, False):
        assert claims(op, args, tensors, alone=True, everywhere=everywhere) == every
    assert len(every) > 1


def test_a_strategy_that_adds_to_rules_is_asked_about_all_of_them() -> None:
    """What the user does with rules that torch's function has expanded is not known."""

    def adds(schema: OpSchema) -> OpStrategy:
        made = utils.replicate_op_strategy(schema)
        assert isinstance(made, OpStrategy)
        (rule,) = made.strategies
        sharded = DTensorSpec(rule.output_spec.mesh, (S,) * rule.output_spec.mesh.ndim)
        placed = schema.args_strategy[0]
        costs = [utils.generate_redistribute_costs(placed, placed.strategies[0].output_spec)]
        made.strategies.append(OpSpec(sharded, [sharded], costs))
        return made

    with replaced_strategy(aten.trunc.default):
        utils.register_op_strategy(aten.trunc.default)(adds)
        every = claims(aten.trunc.default, (torch.randn(4, 4),), 1, alone=False)
        assert claims(aten.trunc.default, (torch.randn(4, 4),), 1, alone=True) == every
    assert ((S,),) in every


def counted(rules: Rules) -> tuple[Rules, list[int]]:
    """Return ``rules`` and a list that gets longer each time they are asked for."""
    asked: list[int] = []

    def counting(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        asked.append(len(asked))
        return rules(*args)

    return counting, asked


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_a_strategy_that_looks_at_no_placements_is_asked_where_it_lists_rules(mesh_shape: tuple[int, ...]) -> None:
    rules, asked = counted(of_two)
    with registered(aten.atan2.default, rules):
        reader = reader_of(aten.atan2.default, torch.randn(4, 4), torch.randn(4, 4))
        reader.asks_everywhere = False
        pairs = [((x,) * len(mesh_shape), (y,) * len(mesh_shape)) for x, y in itertools.product(LETTERS, repeat=2)]
        found = [pair for pair in pairs if reader.at(pair, mesh_shape, only_claims=True) is not None]
        assert [(x[0], y[0]) for x, y in found] == [(R, R), (S, R), (S, S), (P, R)]
        assert len(asked) == 2 + len(found)
        assert reader.at(pairs[1], mesh_shape) is not None, "DTensor redistributes"


def looks(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    return [*of_two(x, y), *([([MAX], [MAX, R])] if not (x.is_replicated() or x.is_sharded()) else [])]


def compares(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return a rule that it has only for what equals a spec of its own."""
    return [*of_two(x, y), *([([MAX], [MAX, R])] if x == DTensorSpec(x.mesh, (MAX,), x.tensor_meta) else [])]


def prints(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    return [*of_two(x, y), *([([MAX], [MAX, R])] if "max" in str(y) else [])]


def takes_apart(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    return [*of_two(x, y), *([([MAX], [MAX, R])] if vars(x)["placements"] == (MAX,) else [])]


def keeps_count() -> Rules:
    """Return rules of which one is listed each second time."""
    calls = itertools.count()
    return lambda x, y: [*of_two(x, y), *([([MAX], [MAX, R])] if next(calls) % 2 else [])]


def weighs(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return a rule that it has only where what it asks for costs nothing."""
    asked = DTensorSpec(x.mesh, (MAX,), tensor_meta=x.tensor_meta)
    (cost,) = utils.generate_redistribute_costs(OpStrategy([OpSpec(x)]), asked)
    return [*of_two(x, y), *([([MAX], [MAX, R])] if cost == 0 else [])]


def lacks_one(x: Any, y: Any) -> list[tuple[list[Any], list[Any]]]:
    return [*of_two(x, y), ([MAX], [MAX])]


@pytest.mark.parametrize("rules", [looks, compares, prints, takes_apart, keeps_count(), weighs, lacks_one])
def test_a_strategy_that_may_list_other_rules_elsewhere_is_asked_everywhere(rules: Rules) -> None:
    counting, asked = counted(rules)
    with registered(aten.atan2.default, counting):
        reader = reader_of(aten.atan2.default, torch.randn(4, 4), torch.randn(4, 4))
        reader.asks_everywhere = False
        for pair in itertools.product(LETTERS, repeat=2):
            reader.at(tuple((letter,) for letter in pair), (2,), only_claims=True)
    assert len(asked) > len(LETTERS) ** 2


@pytest.mark.parametrize(("rules", "expected"), [(rows, False), (keeps_count(), False), (None, True)])
def test_a_strategy_that_lists_more_rules_each_time(rules: Rules | None, expected: bool) -> None:
    kept = [([R], [R])]

    def grows(x: Any) -> list[tuple[list[Any], list[Any]]]:
        kept.append(([S], [S]))
        return list(kept)

    op, tensors = (aten.atan2.default, 2) if rules is not None and rules is not rows else (aten.trunc.default, 1)
    with registered(op, rules or grows):
        clear_caches()
        assert reader_of(op, *(torch.randn(4, 4) for _ in range(tensors))).grows() is expected
    clear_caches()


def test_torchs_function_is_its_own_again() -> None:
    before = utils.expand_to_full_mesh_op_strategy
    claims(aten.mul.Scalar, (torch.randn(4, 4), 2), 1, alone=True)
    assert utils.expand_to_full_mesh_op_strategy is before
