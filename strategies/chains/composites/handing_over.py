"""What leaves DTensor's hands: into a file, another process, a number or another mesh."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.chains import handing_over
from strategies.chains.building import Building
from strategies.chains.composites.table import composite
from verifier.torch_internals.placements import strided_shard

_PROGRAMS = f"{handing_over.__name__}."


@composite
def _stored(b: Building) -> None:
    """Views, results and redistributions under way that are copied, pickled, or saved and loaded."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    everywhere = [Replicate() for _ in range(b.mesh.ndim)]
    anywhere = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(b.mesh.ndim)]
    path, *given = b.way(
        ("redistribute", *everywhere), ("redistribute", *anywhere), ("torch.select", 0, 1), ("torch.t",),
        ("torch.narrow", 1, 1, 1), ("torch.narrow", 0, 0, 1), ("torch.clone",), ("torch.sum", 0),
    )  # fmt: skip
    way = b.pick(("pickle", "save", "weights", *(["deepcopy"] if path == "redistribute" else [])))
    b.program(f"{_PROGRAMS}stored", way, path, given)


@composite
def _stored_pending(b: Building) -> None:
    """Results that wait for a reduction of any kind, stored before it."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    path, *given = b.way(
        ("torch.sum", 0), ("torch.linalg.vector_norm",), ("torch.linalg.vector_norm", 1.0), ("embedding", 0, 1, 1),
        ("embedding", 1, 0), ("torch.amax", 0),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}stored", b.pick(("pickle", "weights", "weights")), path, given)


@composite
def _checkpointed(b: Building) -> None:
    """Results, views among them, that are saved in a checkpoint and loaded to any placements.

    A view that flattens shards, and layers that are cut by tensor parallelism and by ``fully_shard``, have strided
    shards.
    """
    rows, columns = b.pick((b.size(), (2 * b.mesh.world_size, 2 * b.mesh.world_size)))
    b.tensors[b.floats(rows, columns)].requires_grad_(False)
    path, *given = b.way(
        ("torch.flatten",), ("torch.flatten",), ("torch.clone",), ("torch.t",), ("torch.narrow", 1, 1, 1),
        ("torch.select", 0, 1), ("torch.unsqueeze", 0), ("torch.sum",),
    )  # fmt: skip
    letters = (Replicate(), Shard(0))
    placements: list[Placement] = [b.pick(letters) for _ in range(b.mesh.ndim)]
    if b.mesh.ndim > 1 and b.chance(0.4):
        placements[-2:] = [strided_shard(0, b.mesh.shape[-1]), Shard(0)]
    if path == "torch.sum":
        placements = [Replicate()] * b.mesh.ndim
    b.program(f"{_PROGRAMS}checkpointed", path, given, [] if b.chance(0.5) else placements)


@composite
def _loaded(b: Building) -> None:
    """Weights that are loaded from a state dict of whole tensors."""
    b.tensors[b.floats(b.pick((b.rows, 2 * b.mesh.world_size)), b.columns)].requires_grad_(False)
    placements: list[Placement] = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(b.mesh.ndim)]
    if b.chance(0.4):
        placements[-1] = strided_shard(0, 2)
    b.program(f"{_PROGRAMS}loaded", b.chance(0.3), placements)


@composite
def _restored(b: Building) -> None:
    """A weight and its optimiser's state that are restored from state dicts, whole or in shards, nested or flat."""
    b.tensors[b.floats(b.rows, b.columns)].requires_grad_(False)
    placements: list[Placement] = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(b.mesh.ndim)]
    saved = {"full_state_dict": b.chance(0.7), "flatten_optimizer_state_dict": b.chance(0.4)}
    first, momentum = saved["full_state_dict"] and b.chance(0.5), b.pick((0.5, 0.5, 0.0))
    b.program(f"{_PROGRAMS}restored", saved, first, placements, b.chance(0.4), momentum)


@composite
def _handed_over(b: Building) -> None:
    """Tensors that are shared with processes and libraries, and scalars that become numbers."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    ways = ("share_memory_", "apply_", "from_dlpack", "tensor", "format", "float", "full")
    b.program(f"{_PROGRAMS}handed_over", b.pick(ways))


@composite
def _to_another_mesh(b: Building) -> None:
    """Redistributions to a mesh of the same ranks in another order."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    placements = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}to_another_mesh", placements)
