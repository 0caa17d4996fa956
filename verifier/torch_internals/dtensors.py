"""DTensors made of local tensors, and local tensors of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard

from verifier.torch_internals.placements import PLAIN_PLACEMENTS, Placements

__all__ = [
    "LocalShards",
    "describe_dtensor",
    "is_fake",
    "local_shards",
    "make_dtensor",
    "make_rank_tensors",
    "new_dtensor",
    "per_rank",
    "replicated",
    "told_dtype",
    "with_local",
]


def make_rank_tensors(locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor that holds the local tensor of every simulated rank, given in rank order."""
    result: torch.Tensor = LocalTensor(dict(enumerate(locals_)))  # type: ignore[no-untyped-call]
    return result


new_dtensor = DTensor.__new__
"""DTensor makes the results of its own ops with this. The constructor does the same and takes twice the time."""


def describe_dtensor(value: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensorSpec:
    """Return the description of a DTensor that stands for ``value``, a global tensor."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(value.shape, value.stride(), value.dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return the DTensor that ``DTensor.from_local`` makes of ``local`` without a check, in a tenth of the time.

    ``from_local`` goes through an autograd function, in case a gradient has to flow back to ``local``. DTensors may
    share a spec of :func:`describe_dtensor`, as results of DTensor's cached ops do. Strided shards may not: DTensor
    changes their specs in place (torch 2.13.0).
    """
    result: torch.Tensor = new_dtensor(DTensor, local, spec, requires_grad=False)
    return result


def replicated(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the DTensor of ``local``, which each rank has by itself, as replicated on all mesh dims."""
    return make_dtensor(local, describe_dtensor(local, mesh, (Replicate(),) * mesh.ndim))


@dataclass(frozen=True)
class LocalShards:
    """What this process holds of a DTensor, in terms of :mod:`verifier.placements.algebra`.

    If a placement is not understood, ``placements`` is None and ``reason`` names that placement. A masked partial is
    given as the plain ``P(sum)`` that it promises to be, with 0 in the masked elements.
    """

    placements: Placements | None
    locals: dict[int, torch.Tensor]
    reason: str = ""


def per_rank(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return this process's value of ``tensor`` by rank: one entry, or one for each rank if ranks are simulated."""
    if isinstance(tensor, LocalTensor):
        return {int(rank): local.detach() for rank, local in sorted(tensor._local_tensors.items())}
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach()
    return {world.rank(): tensor}  # dist.get_rank() takes ten times as long, and this is called often


def local_shards(tensor: DTensor) -> LocalShards:
    """Return the local tensors of ``tensor`` in this process: its own, or every rank's if ranks are simulated."""
    locals_ = per_rank(tensor._local_tensor)
    understood: list[Placement] = []
    for placement in tensor.placements:
        if type(placement) in PLAIN_PLACEMENTS:
            understood.append(placement)
        elif isinstance(placement, _MaskPartial):
            mask = placement.mask_buffer.data
            if mask is None:
                return LocalShards(None, locals_, "a masked partial has lost its mask")
            masks = per_rank(mask)
            for rank, local in locals_.items():
                if local.shape[: masks[rank].ndim] != masks[rank].shape:
                    got, needed = list(masks[rank].shape), list(local.shape)
                    return LocalShards(None, locals_, f"a mask of shape {got} on a local tensor of {needed}")
            locals_ = {rank: _without_masked(local, masks[rank]) for rank, local in locals_.items()}
            understood.append(Partial(placement.reduce_op))
        elif isinstance(placement, _StridedShard | _NormPartial):
            understood.append(placement)
        else:
            return LocalShards(None, locals_, f"placement {placement} is not modelled")
    return LocalShards(tuple(understood), locals_)


def _without_masked(local: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``local`` [*mask.shape, ...] with 0 where ``mask`` is set: the rank's summand."""
    widened = mask.view(*mask.shape, *(1 for _ in range(local.ndim - mask.ndim)))
    return torch.where(widened, torch.zeros((), dtype=local.dtype, device=local.device), local)


def implicit_replication_allowed() -> bool:
    """Return whether DTensor now accepts plain tensors as replicated ones."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def is_fake(value: object) -> bool:
    """Return whether ``value`` is a fake tensor, which has shapes but no values.

    The result is False while torch.compile traces, because the trace must contain the code that reads values.
    """
    return isinstance(value, FakeTensor) and not torch.compiler.is_compiling()


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the local tensor ``local``, of any dtype, that is placed and shaped as ``tensor``.

    It has no gradient. ``DTensor.from_local`` would read strided shards as another order of shards, whatever the order
    of ``tensor`` is.
    """
    meta = TensorMeta(tensor.shape, tensor.stride(), local.dtype)
    spec = replace(tensor._spec, tensor_meta=meta)
    result: DTensor = new_dtensor(DTensor, local, spec, requires_grad=False)
    return result


def told_dtype(tensor: DTensor) -> torch.dtype:
    """Return the dtype by which the rules of the next op decide: what the op's fake kernel says of its result."""
    meta = tensor._spec.tensor_meta
    return tensor.dtype if meta is None else meta.dtype
