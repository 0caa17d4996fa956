"""Process groups: releasing them, meshes of the world, collectives staged through the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from verifier.torch_internals.watching import FUNCTIONAL_COLLECTIVES

__all__ = [
    "chunk_sharded",
    "collectives_issued",
    "is_flattened",
    "leave_world",
    "mesh_of_world",
    "release_groups",
    "stage_through_host",
    "staged_collective",
    "submeshes_of_several_dims",
]


def release_groups(mesh: DeviceMesh) -> None:
    """Release the process groups of a mesh that is no longer used, with their threads and connections.

    The mesh itself may stay alive in one of DTensor's caches.
    """
    mesh._pg_registry.clear()


def collectives_issued() -> tuple[int, ...]:
    """Return how many collectives each process group of this process has issued; simulated groups do not count them."""
    if not dist.is_initialized():
        return ()
    groups = (group for group in dist.distributed_c10d._world.pg_map if group.name() in ("gloo", "nccl"))
    return tuple(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


def leave_world() -> None:
    """Leave the default process group, so that this process can meet the others as a new process would.

    torch numbers groups, and ranks meet under the number of their group. An ``init_process_group`` that fails uses a
    number up, and the ranks would then wait for each other under different numbers.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0


def mesh_of_world(
    device: str,
    shape: tuple[int, ...],
    backend: str | None = None,
    dim_names: tuple[str, ...] = (),
    flat: bool = False,
) -> DeviceMesh:
    """Return a mesh of all ranks of the default process group, with groups of ``backend`` if it is given.

    With ``flat``, it has all its flattened submeshes; torch flattens no mesh whose dims have no names.
    """
    names = dim_names or (tuple(f"dim{d}" for d in range(len(shape))) if flat else None)
    overrides: dict[int | str, Any] | None = None if backend is None else dict.fromkeys(range(len(shape)), backend)
    mesh = dist.device_mesh.init_device_mesh(device, shape, mesh_dim_names=names, backend_override=overrides)
    for submesh in submeshes_of_several_dims(mesh) if flat else ():
        mesh[submesh]._flatten(backend_override=backend)
    return mesh


def submeshes_of_several_dims(mesh: DeviceMesh) -> list[tuple[str, ...]]:
    """Return the names of the dims of each submesh that has several."""
    names = mesh.mesh_dim_names or ()
    return [dims for count in range(2, len(names) + 1) for dims in itertools.combinations(names, count)]


def is_flattened(mesh: DeviceMesh) -> bool:
    """Return whether all submeshes of several dims are there as flattened ones, for which torch merges collectives."""
    flattened = {one._layout for one in mesh._get_root_mesh()._flatten_mapping.values()}
    if not flattened or mesh.ndim == 1:
        return False
    layouts = (_MeshLayout([mesh._get_slice_mesh_layout(dims).collapse()]) for dims in submeshes_of_several_dims(mesh))
    return all(layout in flattened for layout in layouts)


def chunk_sharded(
    piece: torch.Tensor, dim: int, ranks: Sequence[int], shape: Sequence[int], group: dist.ProcessGroup
) -> Any:
    """Return a legacy ShardedTensor of ``shape``; ``piece`` is this rank's shard, ``ranks`` hold the shards in order.

    Programs call this function, and scripts that need only torch contain its source. Its imports are therefore inside.
    """
    import warnings

    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    # its kernels call deprecated functions; the warnings would hide the message of a process that ends
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/{piece.device}" for rank in ranks])
    return ShardedTensor._init_from_local_tensor(piece, spec, shape, process_group=group)


def stage_through_host() -> list[torch.library.Library]:
    """Make DTensor's collectives copy CUDA tensors to the host and back, as long as the returned libraries are alive.

    Gloo itself does so for some collectives. In others it reads from the GPU's addresses, which ends the process:
    https://github.com/pytorch/pytorch/issues/152645 is about the collective with which DTensor gathers.
    """
    libraries = []
    for namespace, names in (("_c10d_functional", FUNCTIONAL_COLLECTIVES), ("_dtensor", ("shard_dim_alltoall",))):
        library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        for name in names:
            op = getattr(getattr(torch.ops, namespace), name).default
            library.impl(name, staged_collective(op), "CUDA")  # type: ignore[no-untyped-call]
        libraries.append(library)
    return libraries


def staged_collective(op: OpOverload) -> Callable[..., Any]:
    """Return a function that runs the functional collective ``op`` on copies in the host's memory."""
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]

    def run(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        device = next(leaf.device for leaf in pytree.tree_leaves(named) if isinstance(leaf, torch.Tensor))
        hosted = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("cpu", copy=True), named)
        result = pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, op(**hosted))
        if written:  # each of these ops writes to one tensor and returns it
            (name,) = written
            return named[name].copy_(result)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), result)

    return run
