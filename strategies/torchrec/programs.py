"""Trains a table for one step and saves it, plain or in a layout; if the layout is right, the results are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.layouts.tables import LayoutOptions, TableLayout
from strategies.torchrec.checkpoint import reloaded
from strategies.torchrec.checks import check_table
from strategies.torchrec.layouts import make_layout
from strategies.torchrec.lookup import pooled, sum_gradients
from strategies.torchrec.tables import assemble, claims_of, distribute, group_of, held
from verifier.placements.bounds import shard_bounds
from verifier.planning.boundary import declares

__all__ = ["OPTIMIZERS", "TRAIN", "train"]

TRAIN = "strategies.torchrec.programs.train"
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
_RATE = 0.5
"""Learning rate of both optimisers; with it SGD is exact for small integers."""


def train(
    table: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    cotangent: torch.Tensor,
    layout: list[object],
    target: list[object],
    mode: str = "sum",
    optimizer: str = "sgd",
) -> list[torch.Tensor]:
    """Return pooled bags, the table's gradient, the table after one step, and the table read back from a checkpoint.

    Plain tensors are the reference. A replicated DTensor is first distributed in ``layout``, and the ranks check their
    chunks; the bags are sharded over the ranks.

    Parameters
    ----------
    table
        Float32 [rows, columns].
    ids, lengths
        The rows that are looked up, i64[n], and the number of rows of each bag, i64[bags]. ``lengths`` of 1 are a
        lookup without pooling.
    cotangent
        Gradient of the bags, [bags, columns].
    layout, target
        Name and options of the layout for training, and of the layout into which the checkpoint is loaded.
    """
    if isinstance(table, DTensor):
        return _sharded(table, ids, lengths, cotangent, layout, target, mode, optimizer)
    leaf = table.detach().clone().requires_grad_()
    offsets = lengths.cumsum(0) - lengths
    bags = torch.nn.functional.embedding_bag(ids, leaf, offsets, mode=mode)
    (bags * cotangent).sum().backward()  # type: ignore[no-untyped-call]
    OPTIMIZERS[optimizer]([leaf], lr=_RATE).step()  # type: ignore[call-arg]
    assert leaf.grad is not None
    trained = leaf.detach()
    return [bags.detach(), leaf.grad, trained, trained.clone()]


def _sharded(
    table: DTensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    cotangent: torch.Tensor,
    layout: list[object],
    target: list[object],
    mode: str,
    optimizer: str,
) -> list[torch.Tensor]:
    mesh = table.device_mesh
    group = group_of(mesh)
    values, ids, lengths, cotangent = (_local(tensor) for tensor in (table, ids, lengths, cotangent))
    made, other = (_made(entry, values, mesh) for entry in (layout, target))
    sharded = distribute(values, made, mesh)
    check_table(sharded, values, made)

    first, last = shard_bounds(len(lengths), dist.get_world_size(group), dist.get_rank(group))
    start, stop = int(lengths[:first].sum()), int(lengths[:last].sum())
    leaves = [(chunk, shard.detach().requires_grad_()) for chunk, shard in held(sharded)]  # in the shards' memory
    bags = pooled(
        leaves, claims_of(sharded), ids[start:stop], lengths[first:last], mode, group, replicated=made.replicated
    )
    (bags * cotangent[first:last]).sum().backward()  # type: ignore[no-untyped-call]
    if made.replicated:
        sum_gradients(leaves, group)
    gradient = assemble([(chunk, _gradient(leaf)) for chunk, leaf in leaves], values, mesh, made.replicated)
    if leaves:
        OPTIMIZERS[optimizer]([leaf for _, leaf in leaves], lr=_RATE).step()  # type: ignore[call-arg]
    trained = assemble(held(sharded), values, mesh, made.replicated)
    loaded = reloaded(sharded, other)
    check_table(loaded, layout=other)  # the verifier compares its values with the reference
    read = assemble(held(loaded), values, mesh, other.replicated)
    whole = [DTensor.from_local(t, mesh, [Replicate()], run_check=False) for t in (gradient, trained, read)]
    shape, stride = torch.Size((len(lengths), values.shape[1])), (values.shape[1], 1)
    return [
        DTensor.from_local(bags.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride), *whole
    ]  # fmt: skip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a replicated argument; only the layout shards it."""
    assert isinstance(tensor, DTensor)
    if any(not placement.is_replicate() for placement in tensor.placements):
        raise NotImplementedError(f"arguments are given as R, not as {tensor.placements}; the layout cuts the table")
    return tensor.to_local().detach()


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _made(entry: list[object], table: torch.Tensor, mesh: DeviceMesh) -> TableLayout:
    name, options = entry
    assert isinstance(name, str)
    assert isinstance(options, Mapping)
    known: dict[str, Any] = {key: value if isinstance(value, int) else tuple(value) for key, value in options.items()}
    return make_layout(name, LayoutOptions(table.shape[0], table.shape[1], mesh.size(), **known))


declares(TRAIN)
