"""Tables whose ranks hold something else than their layout says, each with one fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.layouts.tables import Chunk, LayoutOptions, TableLayout
from strategies.torchrec import checkpoint, lookup, programs
from strategies.torchrec.checks import check_table
from strategies.torchrec.layouts import make_layout
from strategies.torchrec.tables import distribute, held, wrap
from verifier.torch_internals.names import LocalShardsWrapper


def checked(table: torch.Tensor, fault: str = "", name: str = "row-wise-even", plan: bool = True) -> torch.Tensor:
    """Check ``table`` in a layout over 2 ranks with ``fault``, and return it."""
    if not isinstance(table, DTensor):
        return table.clone()
    mesh, values = table.device_mesh, table.to_local()
    layout = make_layout(name, LayoutOptions(table.shape[0], table.shape[1], mesh.size()))
    made, shown = _faulty(fault, values, layout, table)
    if fault == "values" and dist.get_rank() == 1:
        values = values[:1]
    elif fault == "no chunks" and dist.get_rank() == 1:
        made = DTensor.from_local(values[3:].clone(), mesh, [Shard(0)], run_check=False)
    check_table(made, values, shown if plan else None)
    return DTensor.from_local(values.clone(), mesh, [Replicate()], run_check=False)


def _faulty(fault: str, values: torch.Tensor, layout: TableLayout, table: DTensor) -> tuple[DTensor, TableLayout]:
    mesh, last = table.device_mesh, dist.get_rank() == 1
    rows, columns = layout.shape
    other = layout
    if fault == "overlap" and last:  # offsets that are not cumulative
        layout = replace(layout, chunks=(layout.chunks[0], (Chunk((1, rows), (0, columns)),)))
    elif fault == "missing" and last:
        layout = replace(layout, chunks=(layout.chunks[0], ()))
    elif fault == "disagreement" and last:  # this rank was given another split, and sharded by it
        layout = other = make_layout("row-wise-uneven", LayoutOptions(rows, columns, mesh.size(), (1, rows - 1)))
    made = distribute(values, layout, mesh)
    if fault == "shape" and last:
        [(_, shard)] = held(made)
        with torch.no_grad():
            made.to_local().local_shards()[0] = shard[:-1]
    elif fault == "content" and last:
        [(chunk, shard)] = held(made)
        shard.copy_(values[: chunk.shape[0]])  # the rows of rank 0
    elif fault == "another tensor" and last:
        with torch.no_grad():
            made.to_local().local_shards().append(torch.zeros(2, columns))
    elif fault == "no tensor" and last:
        with torch.no_grad():
            made.to_local().local_shards().clear()
    elif fault == "dtype" and last:
        made = wrap([s.double() for _, s in held(made)], [c.offsets for c, _ in held(made)], layout, mesh)
    return made, other


def plain(table: torch.Tensor) -> torch.Tensor:
    """Check a DTensor that holds no chunks at all."""
    if isinstance(table, DTensor):
        check_table(table)
    return table.clone()


def one_dim(table: torch.Tensor) -> torch.Tensor:
    """Check the chunks of a 1-D tensor, such as the states of some optimizers."""
    if isinstance(table, DTensor):
        mesh = table.device_mesh
        half = LocalShardsWrapper([torch.zeros(3)], [(3 * dist.get_rank(),)])
        check_table(DTensor.from_local(half, mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,)))
    return table.clone()


def trained_wrongly(fault: str, **arguments: Any) -> list[torch.Tensor]:
    """Train a table in a layout, with ``fault`` in the ranks' code."""
    with patch.multiple(programs, **_FAULTS[fault]):
        return programs.train(**arguments)


def _without_a_chunk(*arguments: Any) -> TableLayout:
    """Make a layout, and leave out the first chunk of the first rank that has one."""
    made = _MADE(*arguments)
    first = next(rank for rank, chunks in enumerate(made.chunks) if chunks)
    chunks = tuple(held[rank == first :] for rank, held in enumerate(made.chunks))
    return replace(made, chunks=chunks)


def _halved(*arguments: Any, **options: Any) -> torch.Tensor:
    """Pool this rank's bags, and divide by the number of ranks, as for an average."""
    return lookup.pooled(*arguments, **options) / 2


def _not_saved(table: DTensor, layout: TableLayout) -> DTensor:
    """Reload a table from a checkpoint that lacks rows."""
    result = checkpoint.reloaded(table, layout)
    for _, shard in held(result):
        shard[0] = torch.nan
    return result


_MADE = programs._made
_FAULTS: dict[str, dict[str, Any]] = {
    "a chunk less": {"_made": _without_a_chunk},
    "halved": {"pooled": _halved},
    "not summed": {"sum_gradients": lambda leaves, group: None},
    "not saved": {"reloaded": _not_saved},
}
