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
from torch.distributed.tensor._op_schema import OpSpec
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
from torch.distributed.tensor.experimental import register_sharding

from verifier.torch_internals.claims import ClaimReader, Propagation
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


def claims(op: OpOverload, args: tuple[object, ...], tensors: int, alone: bool) -> dict[Combination, Propagation]:
    reader = reader_of(op, *args)
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


@pytest.mark.parametrize(
    ("op", "rules", "tensors", "least"),
    [
        (aten.trunc.default, rows, 1, 6),
        (aten.trunc.default, by_placements, 1, 4),
        (aten.atan2.default, of_two, 2, 8),
    ],
)
def test_claims_are_the_same(op: OpOverload, rules: Rules, tensors: int, least: int) -> None:
    args = tuple(torch.randn(4, 4) for _ in range(tensors))
    with registered(op, rules):
        every = claims(op, args, tensors, alone=False)
        assert claims(op, args, tensors, alone=True) == every
    assert len(every) >= least


def expanded(schema: Any) -> Any:
    return utils.expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, [[R, R], [S, S], [MAX, MAX]])


def expanding(schema: Any) -> Any:
    return expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, [[R, R], [S, S], [MAX, MAX]])


def adding(schema: Any) -> Any:
    """Return the rules, and one more for what is placed so."""
    found = expanding(schema)
    spec = schema.args_strategy[0].strategies[0].output_spec
    if all(p == P for p in spec.placements):
        found.strategies.append(OpSpec(spec, [spec], redistribute_cost=[[0.0]]))
    return found


def counting_on_all(schema: Any) -> Any:
    found = expanding(schema)
    assert len(found.strategies) > 2
    return found


def exchanging(schema: Any) -> Any:
    """Return rules for other placements than it lets torch make of them."""
    found = expanding(schema)
    for one in found.strategies:
        spec = DTensorSpec(one.mesh, tuple(P if p == S else p for p in one.input_specs[0].placements))
        one.input_specs = [spec]
        one.output_specs = spec
        one.redistribute_cost = [
            [0.0 if spec.placements == schema.args_strategy[0].strategies[0].output_spec.placements else 1.0]
        ]
    return found


@pytest.mark.parametrize(
    ("strategy", "least", "shortened"),
    [
        (expanding, 6, True),
        (expanded, 6, False),
        (adding, 8, True),
        (counting_on_all, 6, False),
        (exchanging, 6, False),
    ],
)
def test_claims_of_a_strategy_for_all_mesh_dims_are_the_same(
    strategy: Callable[..., Any], least: int, shortened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, args = aten.trunc.default, (torch.randn(4, 4),)
    with replaced_strategy(op):
        register_op_strategy(op)(strategy)
        every = claims(op, args, 1, alone=False)
        asked: list[object] = []
        monkeypatch.setattr(utils, "redistribute_cost", lambda *specs: asked.append(specs) or 1.0)
        reader_of(op, *args).at(((Partial("avg"),),), (2,))
        of_all = len(asked)
        monkeypatch.undo()
        assert claims(op, args, 1, alone=True) == every
        assert len(every) >= least
        reader = reader_of(op, *args)
        reader.at(((R,),), (2,), only_claims=True)
        asked.clear()
        monkeypatch.setattr(utils, "redistribute_cost", lambda *specs: asked.append(specs) or 1.0)
        reader.at(((Partial("avg"),),), (2,), only_claims=True)
    assert (0 < len(asked) < of_all) == shortened
    assert expand_to_full_mesh_op_strategy is utils.expand_to_full_mesh_op_strategy


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
