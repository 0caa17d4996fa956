"""Traces of decompositions that are kept say what DTensor says, of this call alone, until a rule changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals import caches
from verifier.torch_internals.caches import clear_caches, traces_of_calls
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.claims.values import Propagation
from verifier.torch_internals.registries import replaced_strategy

OP = torch.ops.aten.mse_loss.default
LETTERS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
PAIRS = [*itertools.product(LETTERS, repeat=2)]


def reader(rows: int = 4, reduction: int = 0) -> ClaimReader:
    args = torch.rand(rows, 6), torch.rand(rows, 6), reduction
    return ClaimReader(OP, args, {}, OP(*args))


def decisions(asked: ClaimReader) -> tuple[Any, list[Propagation | None]]:
    return asked.listed((2,), PAIRS), [
        asked.at(tuple((p,) for p in pair), (extent,)) for extent in (2, 3) for pair in PAIRS
    ]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Return a list that gets the placements of each trace of ``OP`` that DTensor makes."""
    made: list[tuple[object, ...]] = []
    trace = DecompShardingStrategy._propagate_through_decomp

    def counted(self: Any, schema: Any, placements: Any, mesh: Any) -> object:
        made.extend([tuple(placements)] if schema.op is OP else [])
        return trace(self, schema, placements, mesh)

    monkeypatch.setattr(DecompShardingStrategy, "_propagate_through_decomp", counted)
    monkeypatch.setattr(caches, "_OF_TORCH", counted)
    clear_caches()
    return made


def test_each_combination_is_traced_once_whatever_the_mesh(traces: list[tuple[object, ...]]) -> None:
    first = decisions(reader())
    assert first[0]
    once = len(traces)
    assert once == len({*traces}) >= len(PAIRS)
    assert decisions(reader()) == first
    assert len(traces) == once


def test_the_answers_are_those_of_dtensor_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_caches()
    kept = [decisions(reader(rows, how)) for rows, how in ((4, 0), (4, 1), (1, 0))]
    monkeypatch.setattr(caches, "_OF_TORCH", None)  # nothing is kept of what is not torch's own
    clear_caches()
    assert [decisions(reader(rows, how)) for rows, how in ((4, 0), (4, 1), (1, 0))] == kept
    assert not traces_of_calls


def test_calls_that_differ_share_nothing(traces: list[tuple[object, ...]]) -> None:
    for other in (reader(), reader(rows=5), reader(reduction=1)):
        before = len(traces)
        other.listed((2,), PAIRS)
        assert len(traces) - before == len(PAIRS)
    assert len(traces_of_calls) == 3


def test_a_rule_that_is_replaced_changes_what_is_traced() -> None:
    clear_caches()
    assert (Shard(0), Shard(0)) in (reader().listed((2,), PAIRS) or ())
    inner = torch.ops.aten.sub.Tensor
    with replaced_strategy(inner):
        register_sharding(inner)(lambda *args, **kwargs: [([Replicate()], [Replicate(), Replicate(), None])])
        clear_caches()
        assert (Shard(0), Shard(0)) not in (reader().listed((2,), PAIRS) or ())
    clear_caches()


def test_only_the_last_calls_are_kept() -> None:
    clear_caches()
    for rows in range(2, 12):
        reader(rows).listed((2,), PAIRS[:2])
    assert len(traces_of_calls) == 4
    assert "_propagate_through_decomp" not in vars(DTensor._op_dispatcher.sharding_propagator.decomp_strategy)


def test_what_a_decomposition_calls_is_traced_once() -> None:
    """polar is decomposed into calls of complex, which has no strategy of its own either."""
    clear_caches()
    args = torch.rand(4, 6), torch.rand(4, 6)
    asked = ClaimReader(torch.ops.aten.polar.default, args, {}, torch.polar(*args))
    asked.listed((2,), PAIRS)
    (known,) = traces_of_calls.values()
    inner = [key for key in known if isinstance(key[0], tuple)]
    assert torch.ops.aten.complex.default in {key[0][0] for key in inner}


def test_a_composite_op_of_a_decomposition_comes_to_dtensor_as_it_is() -> None:
    """Each rank shuffles other channels than the whole call does; DTensor refuses the reshape, and replicates first."""
    clear_caches()
    args = torch.rand(2, 6, 2, 2), 3
    op = torch.ops.aten.channel_shuffle.default
    asked = ClaimReader(op, args, {}, op(*args))
    decided = {dim: asked.at(((Shard(dim),),), (2,)) for dim in range(4)}
    claimed = {dim: one.outputs for dim, one in decided.items() if one is not None and one.inputs == ((Shard(dim),),)}
    assert claimed == {dim: ((Shard(dim),),) for dim in (0, 2, 3)}
