"""How ids of two dims are flattened: the guard of the rule for that, and what is replicated first."""

from __future__ import annotations

import inspect
import math
from itertools import product
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import strategies
from strategies import reshape_rules as flattening
from strategies.reshape_rules import embedding_bag, flattens, refuse_another_number
from verifier.placements.algebra import local_shape
from verifier.torch_internals.claims.reader import ClaimReader

VIEW = torch.ops.aten.view.default
BOTH = (Shard(0), Shard(0))


def claimed(rows: int) -> bool:
    """Return whether DTensor goes by its rule to flatten ``[rows, 3]`` that both dims of a mesh 2x2 cut."""
    reader = ClaimReader(VIEW, (torch.zeros(rows, 3), [3 * rows]), {}, torch.zeros(3 * rows))
    propagation = reader.at((BOTH,), (2, 2))
    return propagation is not None and propagation.outputs == (BOTH,)


@pytest.mark.parametrize("sizes", [[18], [-1]])
def test_rows_that_two_mesh_dims_cut_unevenly_are_refused(sizes: list[int]) -> None:
    refused = r"a tensor \[6, 3\] placed as \(S\(0\), S\(0\)\) cannot be viewed as \[18\] on its shards"
    with pytest.raises(NotImplementedError, match=refused):
        refuse_another_number(VIEW, [(6, 3), sizes], (2, 2), BOTH, BOTH)


@pytest.mark.parametrize(
    ("shape", "sizes", "before", "after"),
    [
        ((8, 3), [24], BOTH, BOTH),
        ((6, 1), [6], BOTH, BOTH),  # a rank's rows are its elements
        ((6, 3), [6, 3, 1], BOTH, BOTH),
        ((6, 3), [-1], (Shard(0), Replicate()), (Shard(0), Replicate())),
        ((0, 3), [-1], BOTH, BOTH),
        ((4, 0), [0], BOTH, BOTH),
        ((), [1], (Replicate(), Replicate()), (Replicate(), Replicate())),
    ],
)
def test_shards_that_stay_as_large_as_they_were_are_fine(
    shape: tuple[int, ...], sizes: list[int], before: tuple[Placement, ...], after: tuple[Placement, ...]
) -> None:
    refuse_another_number(VIEW, [shape, sizes], (2, 2), before, after)
    viewed = tuple(torch.empty(shape).view(sizes).shape)
    for at in product(range(2), repeat=2):  # so that a rank can view what it has
        held, left = (local_shape(*of, (2, 2), at) for of in ((shape, before), (viewed, after)))
        assert math.prod(held) == math.prod(left)


def test_the_guard_is_installed_and_taken_back() -> None:
    functional = torch.nn.functional
    theirs, theirs_of_tensors = functional.embedding_bag, DTensor.reshape
    assert claimed(6)
    with strategies.installed():
        assert functional.embedding_bag is embedding_bag
        assert DTensor.reshape is theirs_of_tensors, "what is written to a reshape has to arrive in the tensor"
        assert not claimed(6)
        assert claimed(8)
        with strategies.installed():
            assert not claimed(6)
        assert not claimed(6)
    assert claimed(6)
    assert functional.embedding_bag is theirs


def test_what_takes_the_place_of_torchs_function_hands_every_argument_on() -> None:
    given = {name: object() for name in inspect.signature(embedding_bag).parameters}
    asked: list[object] = []
    with mock.patch.object(flattening, "torch_embedding_bag", lambda *args: asked.extend(args)):
        embedding_bag(**given)
    assert asked == list(given.values())
    theirs = inspect.signature(flattening.torch_embedding_bag)
    ours = inspect.signature(embedding_bag, follow_wrapped=False)
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("mesh", [(2,), (3,), (8,), (2, 2), (2, 3)])
def test_what_is_said_to_have_a_flat_form_is_what_dtensor_flattens(mesh: tuple[int, ...]) -> None:
    kinds = (Replicate(), Shard(0), Shard(1), Partial())
    refused = 0
    with strategies.installed():
        for shape in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4)):
            size = math.prod(shape)
            reader = ClaimReader(VIEW, (torch.zeros(shape), [size]), {}, torch.zeros(size))
            for placements in product(kinds, repeat=len(mesh)):
                claims = reader.at((placements,), mesh) is not None
                refused += not claims
                if len(mesh) == 1:
                    assert flattens(shape, placements, mesh) == claims
                else:  # a few that DTensor flattens are replicated nevertheless
                    assert claims or not flattens(shape, placements, mesh)
    assert refused
