"""What leaves DTensor's hands is what DTensor holds: in files, in other processes, as numbers, on other meshes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

__all__ = ["memory_of_locals", "meshes_kept", "scalars_formatted", "unfinished_results_awaited"]


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
