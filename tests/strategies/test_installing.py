"""Our own strategies are put in the place of DTensor's, and taken back; and what their kernels are made of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import strategies
from strategies.embedding.sharding import LOOKUP, check_ids, count_ids, owned_ids
from strategies.installing import SHARDED_OPS, take_back_remedies
from verifier.core.case import MeshSpec
from verifier.execution.imports import run_imports
from verifier.placements.algebra import local_shape
from verifier.placements.bounds import shard_bounds
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.names import pytree
from verifier.torch_internals.placements import Placements
from verifier.torch_internals.sharded_ops import RankView, ShardedOp
from verifier.torch_internals.simulation import start_simulated_world

WEIGHT, IDS = torch.zeros(7, 3), torch.zeros(4, dtype=torch.long)


def row_wise() -> tuple[str, bool]:
    """Return what DTensor makes of a row-wise lookup, and whether it runs the op as it is."""
    reader = ClaimReader(LOOKUP.op, (WEIGHT, IDS), {}, torch.zeros(4, 3))
    propagation = reader.at(((Shard(0),), (Replicate(),)), (2,))
    assert propagation is not None
    assert propagation.outputs is not None
    return type(pytree.tree_leaves(propagation.outputs)[0]).__name__, propagation.call is None


def test_installed_takes_back_what_it_installs() -> None:
    assert row_wise() == ("_MaskPartial", True)
    with strategies.installed():
        assert row_wise() == ("Partial", False)
        with strategies.installed():
            assert row_wise() == ("Partial", False)
        assert row_wise() == ("Partial", False)
    assert row_wise() == ("_MaskPartial", True)


def test_installed_takes_back_after_an_exception() -> None:
    with pytest.raises(KeyError), strategies.installed():
        raise KeyError
    assert row_wise() == ("_MaskPartial", True)


def test_install_is_for_good_and_has_a_name_for_the_command_line() -> None:
    with strategies.installed():  # which leaves nothing behind, so neither does this test
        assert run_imports(["strategies.install"]) == []  # no rule of torch's has to be moved out of the way
        strategies.install()
        assert row_wise() == ("Partial", False)
    assert row_wise() == ("_MaskPartial", True)


def test_install_all_puts_every_remedy_in_force_once() -> None:
    """The remedy of casts to unsigned integers stands for all: torch 2.13 to 2.15 have its defect."""
    tensor, parts = torch.ones(4, 6), (Partial("max"),)
    reader = ClaimReader(torch.ops.aten._to_copy.default, (tensor,), {"dtype": torch.uint8}, tensor.byte())

    def inputs() -> tuple[Placements, ...]:
        found = reader.at((parts,), (2,))
        assert found is not None
        return found.inputs

    assert inputs() == (parts,)

    with strategies.installed():
        try:
            assert run_imports(["strategies.install_all"]) == []
            strategies.install("all")
            assert (inputs(), row_wise()) == (((Replicate(),),), ("Partial", False))
        finally:
            take_back_remedies()
    assert inputs() == (parts,)
    with pytest.raises(ValueError, match="install\\('al'\\): expected 'embeddings' or 'all'"):
        strategies.install("al")


def test_every_op_is_installed_once() -> None:
    ops = [sharded.op for sharded in SHARDED_OPS]
    assert len(set(ops)) == len(ops)


# --------------------------------------------------------------------------------------------------- rules to decide by
@pytest.fixture
def world() -> Iterator[None]:
    """Make four ranks of this process, which move no data."""
    start_simulated_world(4)
    yield
    dist.destroy_process_group()


def looked_up(weight: Placements, ids: Placements) -> Placements:
    """Return how DTensor places the result of a lookup on a mesh 2x2."""
    mesh = init_device_mesh("cpu", (2, 2))
    given = []
    for value, placements in ((torch.zeros(8, 4), weight), (torch.zeros(8, dtype=torch.long), ids)):
        local = torch.zeros(local_shape(value.shape, placements, (2, 2), (0, 0)), dtype=value.dtype)
        given.append(
            DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
        )
    result = torch.nn.functional.embedding(given[1], given[0])
    assert isinstance(result, DTensor)
    return result.placements


def test_rules_that_want_a_partial_which_nothing_is_decide_nothing(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = list(product((Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")), repeat=2))
    calls = list(product(tables, product((Replicate(), Shard(0), Partial()), repeat=2)))
    numbers: dict[bool, list[int]] = {True: [], False: []}
    fewer = ShardedOp.rules_to_decide_by

    def noted(all_of_them: bool) -> Any:
        def rules(self: ShardedOp, *call: Any) -> Any:
            made = self.rules(*call) if all_of_them else fewer(self, *call)
            numbers[all_of_them].append(len(made))
            return made

        return rules

    results = []
    for all_of_them in (True, False):
        monkeypatch.setattr(ShardedOp, "rules_to_decide_by", noted(all_of_them))
        with strategies.installed():
            results.append([looked_up(*call) for call in calls])
    assert results[0] == results[1]
    assert max(numbers[False]) <= min(numbers[True])
    assert min(numbers[False]) <= min(numbers[True]) / 2


# -------------------------------------------------------------------------------------------------------------- kernels
@pytest.mark.parametrize("rows", [0, 1, 5, 17])
@pytest.mark.parametrize("mesh", ["8", "2x2", "2x3", "2x2x2"])
def test_a_rank_knows_its_rows(rows: int, mesh: str) -> None:
    shape = MeshSpec.parse(mesh).shape
    cuts = (Shard(0),) * len(shape)
    for rank in range(MeshSpec.parse(mesh).world_size):
        coordinate = MeshSpec.parse(mesh).coordinate(rank)
        start, stop = 0, rows
        for extent, index in zip(shape, coordinate, strict=True):
            first, last = shard_bounds(stop - start, extent, index)
            start, stop = start + first, start + last
        view = RankView(shape, coordinate, ((rows, 3),), (cuts,))
        own = view.bounds(0, 0)
        assert own[1] - own[0] == stop - start
        if stop > start:
            assert own == (start, stop)
        assert view.cuts(0, 0) == tuple(range(len(shape)))
        assert view.cuts(0, 1) == ()


def test_ids_are_counted_from_the_first_own_row() -> None:
    own, foreign = owned_ids(torch.tensor([[0, 3, 4], [5, 6, 3]]), 3, 5)
    assert own.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert foreign.tolist() == [[True, False, False], [True, True, False]]


def test_ids_out_of_range_count_for_no_row() -> None:
    assert count_ids(torch.tensor([[1, 1, 4], [-1, 0, 3]], dtype=torch.int32), 3).tolist() == [1, 2, 0]
    assert count_ids(torch.tensor(2), 3).tolist() == [0, 0, 1]
    assert count_ids(torch.tensor([], dtype=torch.long), 0).tolist() == []


@pytest.mark.parametrize("ids", [[3], [-1, 2], [[0], [7]]])
def test_ids_are_checked_against_the_whole_table(ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"index out of range in self: ids from .* in a table of 3 rows"):
        check_ids(torch.tensor(ids), 3)


@pytest.mark.parametrize("ids", [[], [0, 2], 2])
def test_ids_in_range_are_fine(ids: object) -> None:
    assert check_ids(torch.tensor(ids, dtype=torch.long), 3) is None
