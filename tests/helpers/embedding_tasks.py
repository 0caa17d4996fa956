"""Tasks of ranks on embeddings under our own strategies, for what trials cannot do."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.functional import embedding, embedding_bag

from verifier.torch_internals.placements import strided_shard

IDS = torch.tensor([0, 4, 3, 1, 1, 2, 4])
OFFSETS = torch.tensor([0, 0, 3, 4])
TABLE = torch.arange(15.0).reshape(5, 3) - 7


def on_a_part(mesh: DeviceMesh) -> list[tuple[list[int], str]]:
    """Look bags up on a mesh without the last rank; return the global shapes and placements of the results."""
    part = DeviceMesh("cpu", list(range(mesh.size() - 1)))

    def placed(value: torch.Tensor, placement: Replicate | Shard) -> DTensor:
        return distribute_tensor(value, part, [placement], src_data_rank=None)

    made = []
    for mode in ("sum", "mean", "max"):
        for last in (False, True):
            weight = placed(TABLE, Shard(1)).requires_grad_()
            ids, offsets = placed(IDS, Replicate()), placed(OFFSETS, Replicate())
            made.append(embedding_bag(ids, weight, offsets, mode=mode, include_last_offset=last, padding_idx=1))
    return [(list(value.shape), str(value.placements)) for value in made]


def plain_arguments(mesh: DeviceMesh) -> list[bool]:
    """Return whether plain ids act as replicated ones under ``implicit_replication``."""
    weight = distribute_tensor(TABLE.clone(), mesh, [Shard(1)], src_data_rank=None)
    with implicit_replication():
        bags = embedding_bag(IDS, weight, OFFSETS, mode="sum", per_sample_weights=torch.ones(7))
        scaled = embedding(IDS, weight, max_norm=3.0)
    expected_bags = embedding_bag(IDS, TABLE, OFFSETS, mode="sum")
    expected = embedding(IDS, TABLE.clone(), max_norm=3.0)
    return [torch.equal(bags.full_tensor(), expected_bags), torch.allclose(scaled.full_tensor(), expected)]


def filled_with_strides(mesh: DeviceMesh) -> list[bool]:
    """Return whether strided shards, as under data and tensor parallelism, are filled in place."""
    rank = mesh.get_rank()
    rows = torch.arange(18.0).reshape(6, 3)[[rank, 3 + rank]]
    tensor = DTensor.from_local(
        rows.clone(), mesh, [strided_shard(0, 2)], run_check=False, shape=torch.Size((6, 3)), stride=(3, 1)
    )
    columns = distribute_tensor(torch.tensor([True, False, True]), mesh, [Replicate()], src_data_rank=None)
    capped = rows.masked_fill(rows > 9, 1.0)
    found = [torch.equal(tensor.masked_fill_(tensor > 9, 1.0).to_local(), capped)]
    found.append(torch.equal(tensor.masked_fill_(columns, 5.0).to_local(), capped.masked_fill(columns.to_local(), 5.0)))
    found.append(torch.equal(torch.nn.init.constant_(tensor, 2.0).to_local(), torch.full((2, 3), 2.0)))
    return [*found, tensor.placements == (strided_shard(0, 2),)]


def filled_through_views(mesh: DeviceMesh) -> list[bool]:
    """Return whether views are filled that share memory with their base, and no others.

    To select a sharded dim DTensor redistributes the base, so that the base would not see what is written to the view.
    """
    rows, columns = (distribute_tensor(TABLE.clone(), mesh, [Shard(dim)], src_data_rank=None) for dim in (0, 1))
    columns[0] = 3.0
    columns[1].masked_fill_(columns[1] > 0, 4.0)
    expected = TABLE.clone()
    expected[0] = 3.0
    expected[1].masked_fill_(expected[1] > 0, 4.0)
    refused = []
    for write in (lambda: rows[0].fill_(3.0), lambda: rows[0].masked_fill_(rows[0] < 9, 3.0)):
        try:
            write()
        except NotImplementedError:
            refused.append(True)
    try:
        rows[0] = 3.0
    except NotImplementedError:
        refused.append(True)
    return [torch.equal(columns.full_tensor(), expected), torch.equal(rows.full_tensor(), TABLE), *refused]


def without_values(mesh: DeviceMesh) -> list[list[int]]:
    """Return the shapes of a lookup, its gradient and bags, for tensors with only shapes."""
    placements = [Shard(0)]
    table, ids, offsets = (
        distribute_tensor(value, mesh, placement, src_data_rank=None).to_local()
        for value, placement in ((TABLE, placements), (IDS, [Replicate()]), (OFFSETS, [Replicate()]))
    )
    with FakeTensorMode() as mode:
        weight = DTensor.from_local(
            mode.from_tensor(table), mesh, placements, run_check=False, shape=TABLE.shape, stride=TABLE.stride()
        ).requires_grad_()
        rows, starts = (
            DTensor.from_local(mode.from_tensor(value), mesh, [Replicate()], run_check=False)
            for value in (ids, offsets)
        )
        found = embedding(rows, weight)
        (gradient,) = torch.autograd.grad(found.sum(), weight)
        bags = [embedding_bag(rows, weight, starts, mode=pooling) for pooling in ("sum", "mean", "max")]
    return [list(value.shape) for value in (found, gradient, *bags)]


def like_a_call_before(mesh: DeviceMesh) -> list[object]:
    """Make calls for which DTensor uses its cached decision on a different call, and return the results.

    The key of the cache lacks whether a gradient is required. Gradients with and without frequencies have the same
    placements, shapes and dtypes.
    """
    weight = distribute_tensor(TABLE, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    ids = distribute_tensor(IDS, mesh, [Replicate()], src_data_rank=None)
    found: list[object] = []
    with torch.no_grad():
        for _ in range(2):
            found.append(torch.equal(embedding(ids, weight, sparse=True).full_tensor(), TABLE[IDS]))
    for _ in range(2):
        try:
            embedding(ids, weight, sparse=True)
        except NotImplementedError as error:
            found.append(str(error))
    whole = TABLE.clone().requires_grad_()
    for scaled in (False, True, False, True):
        for table, rows in ((whole, IDS), (weight, ids)):
            table.grad = None
            embedding(rows, table, scale_grad_by_freq=scaled).sum().backward()
        assert isinstance(weight.grad, DTensor)
        assert whole.grad is not None
        found.append(torch.equal(weight.grad.full_tensor(), whole.grad))
    return found


def compiled(mesh: DeviceMesh) -> list[bool]:
    """Return whether a row-wise lookup and its gradient are right as one graph."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def reduced(ids: torch.Tensor, weight: DTensor) -> DTensor:
        return embedding(ids, weight).redistribute(placements=[Replicate()]) * 2

    weight = distribute_tensor(TABLE, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    result = reduced(distribute_tensor(IDS, mesh, [Replicate()], src_data_rank=None), weight)
    result.sum().backward()
    local = TABLE.clone().requires_grad_()
    (embedding(IDS, local) * 2).sum().backward()
    assert weight.grad is not None
    assert local.grad is not None
    return [
        torch.equal(result.full_tensor(), 2 * embedding(IDS, TABLE)),
        torch.equal(weight.grad.full_tensor(), local.grad),
    ]


def compiled_bags(mesh: DeviceMesh) -> dict[str, list[bool]]:
    """Return by mode whether row-wise bags and their gradient are right in a compiled function."""
    found = {}
    for mode in ("sum", "mean", "max"):

        @torch.compile(backend="aot_eager")
        def doubled(ids: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, mode: str = mode) -> torch.Tensor:
            return embedding_bag(ids, weight * 2, offsets, mode=mode, padding_idx=1) * 2

        weight = distribute_tensor(TABLE, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        ids, offsets = (distribute_tensor(v, mesh, [Replicate()], src_data_rank=None) for v in (IDS, OFFSETS))
        result = doubled(ids, weight, offsets)
        result.sum().backward()
        local = TABLE.clone().requires_grad_()
        expected = embedding_bag(IDS, local * 2, OFFSETS, mode=mode, padding_idx=1) * 2
        expected.sum().backward()
        assert isinstance(result, DTensor)
        assert isinstance(weight.grad, DTensor)
        assert local.grad is not None
        found[mode] = [
            torch.equal(result.full_tensor(), expected),
            torch.allclose(weight.grad.full_tensor(), local.grad),
        ]
    return found
