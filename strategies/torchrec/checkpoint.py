"""Tables in a layout through ``torch.distributed.checkpoint``: saved in one layout, loaded into another."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from strategies.layouts.tables import TableLayout
from strategies.torchrec.tables import claims_of, distribute, dtype_of, group_of

__all__ = ["reloaded"]

_KEY = "table"


def reloaded(table: DTensor, layout: TableLayout) -> DTensor:
    """Return ``table`` after a round trip through a checkpoint into ``layout``; every rank has to call this.

    The checkpoint is loaded into a table of NaN, so that missing elements show. The table has the dtype of the local
    tensors. A rank without local tensors gets the dtype from the other ranks.
    """
    mesh = table.device_mesh
    dtype = dtype_of(claims_of(table))
    group = group_of(mesh)
    with _shared_folder(group) as folder:
        save({_KEY: table}, checkpoint_id=folder, process_group=group)
        target = distribute(torch.full(layout.shape, torch.nan, dtype=dtype), layout, mesh)
        load({_KEY: target}, checkpoint_id=folder, process_group=group)
    return target


@contextmanager
def _shared_folder(group: dist.ProcessGroup) -> Iterator[Path]:
    """Give all ranks a folder that rank 0 makes, and removes when all ranks are done."""
    first = dist.get_rank(group) == 0
    named = [tempfile.mkdtemp(prefix="layouts-") if first else ""]
    try:
        dist.broadcast_object_list(named, src=dist.get_global_rank(group, 0), group=group)
        yield Path(named[0])
        dist.barrier(group)
    finally:
        if first:
            shutil.rmtree(named[0], ignore_errors=True)
