"""The converter, in one process that plays all ranks: what it makes, what it leaves alone, that it sends nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.arguments import tensor_arguments, unsupported_reason
from verifier.execution.converter import DTensorConverter
from verifier.placements.algebra import combine, take_local
from verifier.placements.alphabet import Alphabet
from verifier.placements.combinations import CombinationSpace
from verifier.torch_internals.dtensors import make_rank_tensors, per_rank
from verifier.torch_internals.names import pytree
from verifier.torch_internals.placements import Placements, strided_shard
from verifier.torch_internals.simulation import paused_simulation, simulated_mode, start_simulated_world
from verifier.torch_internals.watching import count_collectives

WORLD = 4
SHAPES = [(4,), (2, 2), (1, 4)]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A process group that moves no data, gone again for the tests of other files."""
    start_simulated_world(WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with simulated_mode(WORLD):
        yield init_device_mesh("cpu", request.param)


@pytest.fixture
def line() -> Iterator[DeviceMesh]:
    """One mesh dim of four ranks."""
    with simulated_mode(WORLD):
        yield init_device_mesh("cpu", (WORLD,))


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return different integers, made outside of the simulation: a plain tensor."""
    with paused_simulation():
        count = torch.Size(shape).numel()
        return (torch.arange(count).reshape(shape) - count // 3).to(dtype)


def dtensors(*trees: object) -> list[DTensor]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, DTensor)]


def whole(tensor: DTensor) -> torch.Tensor:
    """Return what the local tensors of all ranks stand for, by our own algebra."""
    with paused_simulation():
        locals_ = [local for _, local in sorted(per_rank(tensor.to_local()).items())]
        return combine(locals_, tensor.placements, tuple(tensor.device_mesh.shape), tensor.shape)


VALUES = {
    "uneven": numbers(5, 3),
    "fewer rows than ranks": numbers(2, 1),
    "empty": numbers(0, 3),
    "0-d": numbers(),
    "bool": numbers(5) > 0,
    "integer": numbers(3, 2, dtype=torch.int64),
    "int32": numbers(6, dtype=torch.int32),
    "bfloat16": numbers(7, dtype=torch.bfloat16),
    "complex": torch.complex(numbers(3, 2), numbers(3, 2) + 1),
    "column-major": numbers(3, 4).t(),
}


# ----------------------------------------------------------------------------------------------------- what it converts
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_every_combination_stands_for_the_value(mesh: DeviceMesh, value: torch.Tensor) -> None:
    converter = DTensorConverter(mesh, (value,), seed=3)
    seen: Counter[Placements] = Counter()
    for args, kwargs in converter:
        (tensor,) = args
        assert kwargs == {}
        assert isinstance(tensor, DTensor)
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (value.shape, value.dtype, value.stride())
        assert torch.equal(whole(tensor), value)
        seen[tensor.placements] += 1
    letters = Alphabet().placements(value.ndim, value.dtype)
    legal = [choice for choice in itertools.product(letters, repeat=mesh.ndim) if Alphabet.legal(choice)]
    assert seen == Counter(legal)
    assert len(converter) == converter.converted == len(legal)
    assert converter.left_alone == Counter()


def test_as_many_combinations_come_as_announced(mesh: DeviceMesh) -> None:
    converter = DTensorConverter(mesh, (numbers(3), numbers() > 0))
    announced = len(converter)
    assert converter.describe() == f"all {announced:,} combinations of 2 tensors"
    placements = [tuple(tensor.placements for tensor in dtensors(made)) for made, _ in converter]
    assert len(placements) == len(set(placements)) == announced
    assert converter.converted == 2 * announced


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial(), strided_shard(0, 2)], ids=str)
def test_an_argument_that_is_placed_again_is_a_new_dtensor(placement: Placement) -> None:
    mesh, value = init_device_mesh("cpu", (WORLD,)), numbers(8)
    converter = DTensorConverter(mesh, (value,))

    def local() -> torch.Tensor:
        ((tensor,), _) = converter.convert(((placement,),), seed=1)
        assert isinstance(tensor, DTensor)
        return tensor.to_local()

    first = local()
    before = first.clone()
    first.zero_()
    assert torch.equal(local(), before)
    value.zero_()
    if not placement.is_partial():
        assert not local().any()
    assert torch.equal(local(), take_local(value, (placement,), (WORLD,), (0,), seed=1))


@pytest.mark.parametrize(("placement", "shared"), [(Shard(0), True), (strided_shard(0, 2), False)], ids=str)
def test_dtensors_share_a_description_unless_torch_changes_it(placement: Placement, shared: bool) -> None:
    converter = DTensorConverter(init_device_mesh("cpu", (WORLD,)), (numbers(8),))
    ((first,), _), ((second,), _) = (converter.convert(((placement,),)) for _ in range(2))
    assert isinstance(first, DTensor)
    assert isinstance(second, DTensor)
    assert (first._spec is second._spec) == shared


def test_the_seed_of_a_conversion_goes_before_that_of_the_converter() -> None:
    mesh, value = init_device_mesh("cpu", (WORLD,)), numbers(8)
    converter = DTensorConverter(mesh, (value,), seed=3)
    for seed, expected in ((None, 3), (4, 4)):
        ((tensor,), _) = converter.convert(((Partial(),),), seed)
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.to_local(), take_local(value, (Partial(),), (WORLD,), (0,), expected))


def test_nothing_is_sent(mesh: DeviceMesh) -> None:
    converter = DTensorConverter(mesh, (numbers(5, 3), [numbers(4)]), {"mask": numbers(5) > 0}, cap=40)
    with count_collectives() as counts:
        made = [dtensors(args, kwargs) for args, kwargs in converter]
    assert counts == {}
    assert [len(tensors) for tensors in made] == [3] * 40


def test_the_count_of_collectives_would_show_one(line: DeviceMesh) -> None:
    ((tensor,), _) = DTensorConverter(line, (numbers(8),)).convert(((Shard(0),),))
    assert isinstance(tensor, DTensor)
    with count_collectives() as counts:
        tensor.full_tensor()
    assert sum(counts.values()) == 1


def test_lists_keywords_and_scalars_keep_their_places(line: DeviceMesh) -> None:
    args = ([numbers(3), numbers(4)], 2.5, "sum")
    kwargs = {"weight": numbers(2, 2), "pair": (numbers(1), None), "flag": True}
    converter = DTensorConverter(line, args, kwargs)
    combination = tuple((placement,) for placement in (Shard(0), Replicate(), Partial("max"), Partial("sum")))
    # a pytree walks a dict in the order of its keys as they were given
    made_args, made_kwargs = converter.convert(combination)
    pieces, number, text = made_args
    assert isinstance(pieces, list)
    first, second = pieces
    assert (number, text) == (2.5, "sum")
    weight, pair, flag = made_kwargs["weight"], made_kwargs["pair"], made_kwargs["flag"]
    assert list(made_kwargs) == ["weight", "pair", "flag"]
    assert isinstance(pair, tuple)
    assert (pair[1], flag) == (None, True)
    placed = [tensor.placements for tensor in dtensors(first, second, weight, pair)]
    assert placed == list(combination)
    for tensor, value in zip(dtensors(made_args, made_kwargs), tensor_arguments(args, kwargs), strict=True):
        assert torch.equal(whole(tensor), value)


def test_a_parameter_stays_a_parameter(line: DeviceMesh) -> None:
    trained, frozen = nn.Parameter(numbers(4, 2)), nn.Parameter(numbers(4, 2), requires_grad=False)
    plain = numbers(4, 2).requires_grad_()
    for (first, second, third), _ in DTensorConverter(line, (trained, frozen, plain), cap=20):
        assert isinstance(first, nn.Parameter)
        assert isinstance(second, nn.Parameter)
        assert isinstance(third, DTensor)
        assert not isinstance(third, nn.Parameter)
        assert isinstance(first.data, DTensor)
        assert isinstance(second.data, DTensor)
        assert (first.requires_grad, second.requires_grad, third.requires_grad) == (True, False, True)
        assert first.is_leaf
        assert third.is_leaf


def test_a_tensor_that_occurs_twice_is_one_dtensor_where_its_placements_agree(line: DeviceMesh) -> None:
    value = numbers(4, 2)
    converter = DTensorConverter(line, (value, value))
    (first, second), _ = converter.convert(((Shard(0),), (Shard(0),)))
    assert first is second
    (first, second), _ = converter.convert(((Shard(0),), (Replicate(),)))
    assert first is not second


def test_a_converted_value_is_a_copy(line: DeviceMesh) -> None:
    value = numbers(4)
    ((tensor,), _) = DTensorConverter(line, (value,)).convert(((Replicate(),),))
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        tensor.add_(1)
    assert torch.equal(value, numbers(4))


@pytest.mark.parametrize(
    ("combination", "text"),
    [
        (((Shard(0),),), "places 1 tensor, but the call has 2"),
        (((Shard(0), Replicate()), (Replicate(),)), "2 placements for a mesh of 1 dim"),
        (((Shard(3),), (Replicate(),)), "cannot place a 1-d tensor"),
    ],
)
def test_a_combination_that_does_not_fit_is_refused(line: DeviceMesh, combination: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DTensorConverter(line, (numbers(4), numbers(4))).convert(combination)


# ------------------------------------------------------------------------------------------------ what it leaves alone
class Marked(torch.Tensor):
    """A tensor subclass with no behaviour of its own."""


def unsupported(line: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return a tensor of each kind that cannot be sharded, by how its reason begins."""
    value = numbers(4, 2)
    with paused_simulation():
        return {
            "sparse tensor (torch.sparse_coo)": value.to_sparse(),
            "sparse tensor (torch.sparse_csr)": value.to_sparse_csr(),
            "quantised tensor": torch.quantize_per_tensor(value.float(), 0.5, 0, torch.qint8),
            "nested tensor": torch.nested.nested_tensor([value[0], value[1, :1]]),
            "tensor subclass Marked": value.as_subclass(Marked),
            "meta tensor": value.to("meta"),
            "lazy negative or conjugate view": torch.complex(value, value).conj(),
            "already a DTensor": DTensor.from_local(
                make_rank_tensors([value] * WORLD), line, [Replicate()], run_check=False
            ),
        }


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces changes to nested and quantised tensors
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_unsupported_tensor_is_left_alone_with_a_reason(line: DeviceMesh) -> None:
    tensors = unsupported(line)
    value = numbers(4, 2)
    for beginning, tensor in tensors.items():
        reason = unsupported_reason(tensor)
        assert reason is not None
        assert reason.startswith(beginning), reason
        converter = DTensorConverter(line, (value, tensor))
        assert converter.describe().endswith(f"of 1 tensor; 1 left alone: {reason}")
        made = list(converter)
        assert len(made) == len(converter) == len(Alphabet().placements(2, value.dtype))
        assert all(args[1] is tensor for args, _ in made)
        assert converter.left_alone == {reason: len(made)}
        assert converter.converted == len(made)
    assert len({unsupported_reason(tensor) for tensor in tensors.values()}) == len(tensors)
    assert tensor_arguments((value, *tensors.values()), {}) == [value]


def test_a_parameter_and_a_plain_tensor_are_supported() -> None:
    assert unsupported_reason(numbers(2)) is None
    assert unsupported_reason(nn.Parameter(numbers(2))) is None


# ------------------------------------------------------------------------------------------------------------ sampling
@pytest.mark.parametrize(
    "mesh_ndim",
    [1, 2, 3],
)
def test_a_cap_is_kept_and_announced(mesh_ndim: int) -> None:
    tensors = [numbers(5, 3), numbers(4, dtype=torch.int64), numbers(2)]
    space = CombinationSpace(tensors, mesh_ndim, cap=25, seed=2)
    combinations = list(space)
    assert len(combinations) == len(set(combinations)) == 25
    assert space.describe() == f"sampled 25 of {space.total:,} combinations"
    assert combinations == list(CombinationSpace(tensors, mesh_ndim, cap=25, seed=2))
    assert all(Alphabet.legal(placements) for combination in combinations for placements in combination)
    assert CombinationSpace(tensors, mesh_ndim).describe() == f"all {space.total:,} combinations"


def test_a_cap_of_a_converter_is_its_length(line: DeviceMesh) -> None:
    converter = DTensorConverter(line, (numbers(4, 2), numbers(4, 2)), cap=10, seed=1)
    assert converter.describe() == "sampled 10 of 64 combinations of 2 tensors"
    assert len(converter) == len(list(converter)) == 10


def test_a_narrow_alphabet() -> None:
    space = CombinationSpace([numbers(4, 2)], 2, Alphabet(shard=False, partial=("sum",)))
    assert set(space) == {((a, b),) for a, b in itertools.product([Replicate(), Partial("sum")], repeat=2)}


def test_a_call_without_tensors_has_one_combination(line: DeviceMesh) -> None:
    converter = DTensorConverter(line, (1, "text"))
    assert len(converter) == 1
    assert list(converter) == [((1, "text"), {})]
