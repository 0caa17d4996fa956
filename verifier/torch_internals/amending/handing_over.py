"""What leaves DTensor's hands is what DTensor holds: in files, in other processes, as numbers, on other meshes."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributed import _state_dict_utils as state_dicts
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import state_dict as restoring
from torch.distributed.tensor import DTensor, Partial, Replicate

from verifier.torch_internals.amending.registrations import exchanged
from verifier.torch_internals.placements import strides_of

__all__ = [
    "both_states_set",
    "chunks_of_strided_shards",
    "flat_states_nested",
    "memory_of_locals",
    "meshes_kept",
    "placements_pickled",
    "scalars_formatted",
    "state_dicts_of_strided_shards",
    "states_without_tensors_loaded",
    "unfinished_results_awaited",
]


@contextlib.contextmanager
def unfinished_results_awaited() -> Iterator[None]:
    """Let a copy or pickle of the result of a collective wait for its end."""

    def reduced(self: Any, protocol: Any) -> Any:
        return self.trigger_wait().__reduce_ex__(protocol)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.trigger_wait(), memo)

    with (
        mock.patch.object(AsyncCollectiveTensor, "__reduce_ex__", reduced, create=True),
        mock.patch.object(AsyncCollectiveTensor, "__deepcopy__", copied, create=True),
    ):
        yield


@contextlib.contextmanager
def memory_of_locals() -> Iterator[None]:
    """Let no function read the memory of a DTensor, which has none: take the local tensor's, or refuse."""
    tensor = torch.tensor

    def shared(self: Any) -> Any:
        self._local_tensor.share_memory_()
        return self

    def refused(name: str) -> Any:
        def method(self: Any, *given: Any, **options: Any) -> Any:
            raise NotImplementedError(f"{name} is not supported for DTensor")

        return method

    def numbers(data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return type(data)(numbers(one) for one in data)
        return data.item() if isinstance(data, DTensor) and not data.ndim else data

    def made(data: Any, **options: Any) -> Any:
        return tensor(numbers(data), **options)

    made.__module__ = tensor.__module__
    with (
        mock.patch.object(DTensor, "share_memory_", shared, create=True),
        mock.patch.object(DTensor, "apply_", refused("apply_"), create=True),
        mock.patch.object(DTensor, "__dlpack__", refused("from_dlpack"), create=True),
        mock.patch.object(torch, "tensor", made),
    ):
        yield


@contextlib.contextmanager
def scalars_formatted() -> Iterator[None]:
    """Let a DTensor without dims be formatted as its number is."""

    def formatted(self: Any, specification: str) -> str:
        return format(self.item(), specification) if not self.ndim else object.__format__(self, specification)

    with mock.patch.object(DTensor, "__format__", formatted, create=True):
        yield


@contextlib.contextmanager
def meshes_kept() -> Iterator[None]:
    """Let a redistribution to another mesh be refused with any placements."""
    before: Any = DTensor.redistribute

    def redistributed(self: Any, device_mesh: Any = None, *given: Any, **options: Any) -> Any:
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError("redistribute does not take a tensor to another mesh")
        return before(self, device_mesh, *given, **options)

    with mock.patch.object(DTensor, "redistribute", redistributed):
        yield


_Indices = Callable[[Any, int, int, int], Sequence[int]]


def _runs(tensor: Any, indices: _Indices) -> list[list[tuple[int, int, int]]]:
    """Return for each dim of a tensor the runs of neighbours that this rank holds: where locally, where, how many."""
    found = []
    for dim, size in enumerate(tensor.shape):
        held = list(range(size))
        for mesh_dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == dim:
                mesh = tensor.device_mesh
                taken = indices(placement, len(held), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
                held = [held[index] for index in taken]
        begins = [at for at, one in enumerate(held) if not at or held[at - 1] + 1 != one]
        ends = [*begins[1:], len(held)]
        found.append([(at, held[at], end - at) for at, end in zip(begins, ends, strict=False)])
    return found


@contextlib.contextmanager
def chunks_of_strided_shards(indices: _Indices) -> Iterator[None]:
    """Let a checkpoint take a strided shard for several chunks, each of neighbours.

    Parameters
    ----------
    indices
        Returns which indices a placement gives, of a dim of some size in some parts, to one of them.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    kind: Any = DTensor
    items, chunks, shard = kind.__create_write_items__, kind.__create_chunk_list__, kind.__get_tensor_shard__

    def is_strided(tensor: Any) -> bool:
        return any(strides_of(placement) for placement in tensor.placements)

    def cut(tensor: Any) -> list[Any]:
        return [
            ChunkStorageMetadata(torch.Size(run[1] for run in runs), torch.Size(run[2] for run in runs))
            for runs in itertools.product(*_runs(tensor, indices))
        ]

    def written(self: Any, name: str, given: Any) -> Any:
        if not is_strided(self):
            return items(self, name, given)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in cut(self)
        ]

    def listed(self: Any) -> Any:
        return cut(self) if is_strided(self) else chunks(self)

    def found(self: Any, index: Any) -> Any:
        local = shard(self, index)
        if not is_strided(self):
            return local
        for dim, runs in enumerate(_runs(self, indices)):
            at, _, size = next(run for run in runs if run[1] == index.offset[dim])
            local = local.narrow(dim, at, size)
        return local

    with (
        mock.patch.object(DTensor, "__create_write_items__", written),
        mock.patch.object(DTensor, "__create_chunk_list__", listed),
        mock.patch.object(DTensor, "__get_tensor_shard__", found),
    ):
        yield


@contextlib.contextmanager
def placements_pickled() -> Iterator[None]:
    """Let a DTensor that is pickled be reduced before, if no file can hold what it waits for."""
    reduce: Any = DTensor.__reduce_ex__

    def reduced(self: Any, protocol: Any) -> Any:
        if any(one.is_partial() and type(one) is not Partial for one in self.placements):
            self = self.detach().redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return reduce(self, protocol)

    with mock.patch.object(DTensor, "__reduce_ex__", reduced, create=True):
        yield


def state_dicts_of_strided_shards(indices: _Indices) -> contextlib.AbstractContextManager[None]:
    """Let a state dict of whole tensors give a strided shard the rows that it has.

    Parameters
    ----------
    indices
        Returns which indices a placement gives, of a dim of some size in some parts, to one of them.
    """

    def wrap(distribute: Any) -> Any:
        def distributed(local_state_dict: Any, keys: Any, device: Any, pg: Any = None) -> None:
            for key in keys:
                pair = local_state_dict.get(key)
                if not isinstance(pair, tuple) or not any(map(strides_of, pair[0].placements)):
                    continue
                held, part = pair
                for dim, runs in enumerate(_runs(held, indices)):
                    taken = [at for _, begin, size in runs for at in range(begin, begin + size)]
                    part = part.index_select(dim, torch.tensor(taken, dtype=torch.int64, device=part.device))
                held.to_local().copy_(part)
                local_state_dict[key] = held
            distribute(
                local_state_dict, [key for key in keys if isinstance(local_state_dict.get(key), tuple)], device, pg
            )

        return distributed

    return exchanged(state_dicts, "_distribute_tensors", wrap)


def both_states_set() -> contextlib.AbstractContextManager[None]:
    """Let ``set_state_dict`` set the model's and the optimiser's states, whether or not this rank has any."""

    def wrap(before: Any) -> Any:
        def both(
            model: Any, optimizers: Any, *, model_state_dict: Any, optim_state_dict: Any, options: Any = None
        ) -> Any:
            if options is None or not options.broadcast_from_rank0:
                given = {"model_state_dict": model_state_dict, "optim_state_dict": optim_state_dict}
                return before(model, optimizers, **given, options=options)
            restoring.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
            return restoring.set_model_state_dict(model, model_state_dict, options=options)

        return both

    return exchanged(restoring, "set_state_dict", wrap)


def flat_states_nested() -> contextlib.AbstractContextManager[None]:
    """Let a flat state dict of an optimiser's whole tensors be nested before it is compared with the ranks' own."""
    unflatten: Any = restoring._unflatten_optim_state_dict

    def wrap(load: Any) -> Any:
        def loaded(model: Any, optimisers: Any, state: Any, info: Any) -> None:
            if not (info.full_state_dict and info.flatten_optimizer_state_dict) or "state" in state:
                load(model, optimisers, state, info)
                return
            info.flatten_optimizer_state_dict = False
            try:
                for one in optimisers:
                    restoring._init_optim_state(one)
                    load(model, (one,), unflatten(one, state, info) if state else state, info)
            finally:
                info.flatten_optimizer_state_dict = True

        return loaded

    return exchanged(restoring, "_load_optim_state_dict", wrap)


def states_without_tensors_loaded() -> contextlib.AbstractContextManager[None]:
    """Let the state of an optimiser that keeps no tensors with dims be loaded as it is, because no device is needed."""

    def keeps_tensors(optimiser: torch.optim.Optimizer) -> bool:
        restoring._init_optim_state(optimiser)
        held = [value for state in optimiser.state.values() for value in state.values()]
        return any(isinstance(value, torch.Tensor) and value.ndim > 0 for value in held)

    def wrap(load: Any) -> Any:
        def loaded(model: Any, optimisers: Any, state: Any, info: Any) -> None:
            if not info.full_state_dict or any(map(keeps_tensors, optimisers)):
                load(model, optimisers, state, info)
                return
            before = info.broadcast_from_rank0
            if before:
                everyone = [state]
                torch.distributed.broadcast_object_list(everyone)
                state = everyone[0]
            info.full_state_dict = info.broadcast_from_rank0 = False
            try:
                load(model, optimisers, state, info)
            finally:
                info.full_state_dict, info.broadcast_from_rank0 = True, before

        return loaded

    return exchanged(restoring, "_load_optim_state_dict", wrap)
