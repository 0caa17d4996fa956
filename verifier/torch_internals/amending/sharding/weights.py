"""Amendments to the weights that ``fully_shard`` gathers and shards: what is written to them, dtypes, other meshes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

from verifier.torch_internals.amending.registrations import exchanged

__all__ = [
    "dtypes_renewed",
    "empty_gradients_left_out",
    "rows_after_the_forward_pass",
    "shards_of_fewer_ranks_gathered",
    "stale_weights_gathered_again",
    "written_weights_kept",
]


def _local(tensor: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, or a plain tensor as it is."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def _version(weight: Any) -> int:
    """Return how often a gathered weight was written to; what is made in inference mode does not tell."""
    return -1 if _local(weight).is_inference() else weight._version


def _version_of_shard(held: Any) -> tuple[int, int]:
    """Return how often a shard was written to: an op on DTensors counts for the DTensor alone."""
    return held.sharded_param._version, held.sharded_param._local_tensor._version


@contextlib.contextmanager
def written_weights_kept() -> Iterator[None]:
    """Let ``fully_shard`` copy what a forward pass has written to a gathered weight to the shard of each rank."""

    def noted(inner: Any) -> Any:
        def gathered(self: Any) -> None:
            inner(self)
            self.version_when_gathered = _version(self._unsharded_param)

        return gathered

    def kept(inner: Any) -> Any:
        def sharded(self: Any) -> None:
            gathered = self.sharded_state == ShardedState.UNSHARDED
            if gathered and _version(self._unsharded_param) != self.version_when_gathered:
                _copy_to_shard(self)
            inner(self)

        return sharded

    with (
        exchanged(FSDPParam, "to_unsharded", noted),
        exchanged(FSDPParam, "to_sharded", kept),
        exchanged(FSDPParam, "to_sharded_post_forward", kept),
    ):
        yield


def _copy_to_shard(held: Any) -> None:
    """Copy the elements of a gathered weight that were written to, because others may have been rounded."""
    dim, shard = held.fsdp_placement.dim, held.sharded_param._local_tensor
    rank = held.mesh_info.shard_mesh_rank if isinstance(held.mesh_info, FSDPMeshInfo) else 0
    whole = _local(held._unsharded_param.detach())
    start = min(rank * held.padded_sharded_param_size[dim], whole.size(dim))
    written = whole.narrow(dim, start, shard.size(dim))
    with torch.no_grad():
        shard.copy_(torch.where(written == shard.to(written.dtype), shard, written.to(shard.dtype)))


def dtypes_renewed() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` make the tensors into which it gathers anew if a weight has another dtype than before."""

    def wrap(inner: Any) -> Any:
        def gathered(self: Any, *given: Any, **options: Any) -> Any:
            converted = [one for one in self.fsdp_params if one.orig_dtype != one.sharded_param.dtype]
            for one in converted:
                one.all_gather_outputs = []
                vars(one).pop("_unsharded_param", None)
            if converted:
                self._init_mp_dtypes()
            return inner(self, *given, **options)

        return gathered

    return exchanged(FSDPParamGroup, "unshard", wrap)


def rows_after_the_forward_pass() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` show the rows of a weight as its placements say, where fewer ranks shard it for a while."""

    def wrap(inner: Any) -> Any:
        def sharded(self: Any) -> None:
            if self.is_dtensor:
                inner(self)
                return
            ranks, rank = self.post_forward_mesh_info.shard_mesh_size, self.post_forward_mesh_info.shard_mesh_rank
            whole, flat = self._unsharded_param.detach(), self.all_gather_outputs[0]
            most, count = -(-whole.size(0) // ranks), flat.numel() // ranks
            start = min(rank * most, whole.size(0))
            own = whole[start : start + most].clone()
            self._sharded_post_forward_param_data = flat.narrow(0, rank * count, count).clone()
            self.sharded_post_forward_size = own.size()
            self._sharded_post_forward_param = torch.nn.Parameter(
                self.to_sharded_post_forward_dtensor(own), requires_grad=self.sharded_param.requires_grad
            )
            self._setattr_on_modules(self._sharded_post_forward_param)
            self.free_unsharded_param()
            self.sharded_state = ShardedState.SHARDED_POST_FORWARD

        return sharded

    return exchanged(FSDPParam, "to_sharded_post_forward", wrap)


def shards_of_fewer_ranks_gathered() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` gather what fewer ranks have sharded along the first dim, whatever dim it shards else."""

    def wrap(inner: Any) -> Any:
        def copied(result: Any, held: Any, *given: Any, **options: Any) -> None:
            fewer = [one for one in held if one.sharded_state == ShardedState.SHARDED_POST_FORWARD]
            before = [one.fsdp_placement for one in fewer]
            for one in fewer:
                one.fsdp_placement = Shard(0)
            try:
                inner(result, held, *given, **options)
            finally:
                for one, placement in zip(fewer, before, strict=True):
                    one.fsdp_placement = placement

        return copied

    return exchanged(groups, "foreach_all_gather_copy_out", wrap)


def empty_gradients_left_out() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` leave gradients without elements out of those that it copies together."""

    def wrap(inner: Any) -> Any:
        def copied(gradients: Any, *given: Any, **options: Any) -> None:
            some = [one for one in gradients if one.numel()]
            if some:
                inner(some, *given, **options)

        return copied

    return exchanged(collectives, "foreach_reduce_scatter_copy_in", wrap)


@contextlib.contextmanager
def stale_weights_gathered_again() -> Iterator[None]:
    """Let ``fully_shard`` gather weights again before a forward pass if their shards were written to meanwhile."""

    def noted(inner: Any) -> Any:
        def gathered(self: Any) -> None:
            inner(self)
            self.version_of_shard = _version_of_shard(self)

        return gathered

    def renewed(inner: Any) -> Any:
        def unsharded(self: Any, *given: Any) -> Any:
            held = self.fsdp_params
            if self.is_unsharded and any(_version_of_shard(one) != one.version_of_shard for one in held):
                self._to_sharded()
            return inner(self, *given)

        return unsharded

    with exchanged(FSDPParam, "to_unsharded", noted), exchanged(FSDPParamGroup, "pre_forward", renewed):
        yield
