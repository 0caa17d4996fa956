"""Amendments to how parts are made and reduced, whoever's rule asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, _collective_utils, _redistribute
from torch.distributed.tensor._ops import single_dim_strategy, utils
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.amending.registrations import exchanged

__all__ = [
    "complex_products_not_scattered",
    "complex_reductions_refused",
    "conjugates_resolved",
    "integers_not_divided",
    "is_refused_reduction",
    "nan_kept",
    "norms_in_float32",
    "products_before_sums",
    "products_cost",
    "uneven_gathers_apart",
]


def complex_products_not_scattered() -> AbstractContextManager[None]:
    """Let a reduce-scatter of complex numbers by product be refused, as the all-reduce is."""

    def wrap(scatter: Any) -> Any:
        def scatter_or_refuse(
            self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard: Placement
        ) -> object:
            if self.reduce_op == "product" and tensor.is_complex():
                raise NotImplementedError("reduce_scatter: reduce_op product does not support complex tensors")
            return scatter(self, tensor, mesh, mesh_dim, shard)

        return scatter_or_refuse

    return exchanged(Partial, "_reduce_shard_value", wrap)


def complex_reductions_refused() -> AbstractContextManager[None]:
    """Let an all-reduce of complex numbers by product, minimum or maximum be refused in words, as until torch 2.14."""

    def wrap(reduce: Any) -> Any:
        def reduce_or_refuse(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> object:
            if tensor.is_complex() and self.reduce_op in ("product", "min", "max"):
                raise NotImplementedError(f"all_reduce: reduce_op {self.reduce_op} does not support complex tensors")
            return reduce(self, tensor, mesh, mesh_dim)

        return reduce_or_refuse

    return exchanged(Partial, "_reduce_value", wrap)


def is_refused_reduction(where: str) -> bool:
    """Return whether :func:`complex_reductions_refused` refused, by the function that raised and its file."""
    return where == f"reduce_or_refuse ({Path(__file__).name})"


@contextmanager
def nan_kept() -> Iterator[None]:
    """Let a maximum or minimum over ranks be NaN where a rank has one, as that of a tensor is."""

    def wrap(reduce: Any) -> Any:
        def reduce_with_nan(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, *given: Any) -> Any:
            reduced = reduce(self, tensor, mesh, *given)
            if self.reduce_op not in ("max", "min") or not tensor.is_floating_point():
                return reduced
            found = reduce(Partial("sum"), tensor.isnan().to(torch.int32), mesh, *given)
            return torch.where(found != 0, torch.full_like(reduced, math.nan), reduced)

        return reduce_with_nan

    with exchanged(Partial, "_reduce_value", wrap), exchanged(Partial, "_reduce_shard_value", wrap):
        yield


@contextmanager
def norms_in_float32() -> Iterator[None]:
    """Let DTensor put norms of 16 bits together in 32: their powers may be too large for 16 where they are not."""

    def wrap(reduce: Any) -> Any:
        def reduce_wide(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, *given: Any) -> Any:
            wide = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
            return reduce(self, wide, mesh, *given).to(tensor.dtype)

        return reduce_wide

    with exchanged(_NormPartial, "_reduce_value", wrap), exchanged(_NormPartial, "_reduce_shard_value", wrap):
        yield


@contextmanager
def conjugates_resolved() -> Iterator[None]:
    """Let DTensor compute what is lazily conjugated before it is gathered, scattered or broadcast."""

    def of_method(send: Any) -> Any:
        def resolved(self: Shard, tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
            return send(self, tensor.resolve_conj(), *given, **options)

        return resolved

    def of_shards(cut: Any) -> Any:
        def resolved(dim: int, tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
            return cut(dim, tensor.resolve_conj(), *given, **options)

        resolved.__module__ = cut.__module__
        return staticmethod(resolved)

    def of_replicas(replicate: Any) -> Any:
        def resolved(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
            return replicate(tensor.resolve_conj(), *given, **options)

        resolved.__module__ = replicate.__module__
        return staticmethod(resolved)

    with (
        exchanged(Shard, "_to_replicate_tensor", of_method),
        exchanged(Shard, "_make_shard_tensor", of_shards),
        exchanged(Replicate, "_make_replicate_tensor", of_replicas),
    ):
        yield


def integers_not_divided() -> AbstractContextManager[None]:
    """Let the first rank of a mesh dim keep integers, and the others have 0, where a replica becomes parts of a sum."""

    def wrap(divide: Any) -> Any:
        def divide_or_keep(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> object:
            if self.reduce_op != "sum" or tensor.is_floating_point() or tensor.is_complex():
                return divide(self, tensor, mesh, mesh_dim)
            coordinate = mesh.get_coordinate()
            first = coordinate is None or coordinate[mesh_dim] == 0
            return tensor.clone() if first else torch.zeros_like(tensor)

        return divide_or_keep

    return exchanged(Partial, "_partition_value", wrap)


def products_before_sums() -> AbstractContextManager[None]:
    """Let DTensor divide a replica into the parts of a sum only after all other steps.

    To divide is linear and changes no shape, so that it can come last. A product of divided factors is another one.
    """

    def wrap(merge: Any) -> Any:
        def merged(infos: list[Any], *given: Any) -> Any:
            return merge(sorted(infos, key=lambda info: _is_division(*info.src_dst_placements)), *given)

        return merged

    return exchanged(_redistribute, "_optimize_transform_infos", wrap)


def products_cost() -> AbstractContextManager[None]:
    """Let no rule be chosen that needs the factors of a product where there is a replica, which raises."""

    def wrap_step(cost: Any) -> Any:
        def cost_of_step(source: Placement, target: Placement, *given: Any) -> Any:
            return (math.inf, given[-1]) if _is_factoring(source, target) else cost(source, target, *given)

        return cost_of_step

    def wrap(cost: Any) -> Any:
        def cost_of_all(source: Any, target: Any) -> Any:
            factors = any(map(_is_factoring, source.placements, target.placements))
            return math.inf if factors else cost(source, target)

        return cost_of_all

    step = "_compute_placement_transition_cost"
    return _together(
        exchanged(_collective_utils, step, wrap_step),
        exchanged(single_dim_strategy, step, wrap_step),
        exchanged(utils, "redistribute_cost", wrap),
    )


@contextmanager
def _together(*amendments: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for amendment in amendments:
            stack.enter_context(amendment)
        yield


def _is_factoring(source: Placement, target: Placement) -> bool:
    return source.is_replicate() and isinstance(target, Partial) and target.reduce_op == "product"


def _is_division(source: Placement, target: Placement) -> bool:
    return source.is_replicate() and isinstance(target, Partial) and target.reduce_op == "sum"


def uneven_gathers_apart() -> AbstractContextManager[None]:
    """Let DTensor gather over several mesh dims one after another if it cannot cut the tensor dim evenly by all."""

    def wrap(merge: Any) -> Any:
        def merged(infos: list[Any], mesh: DeviceMesh, *placements: Any) -> Any:
            gathers = [info for info in infos if info._comm_type_key() == "all_gather"]
            for dim in {info.src_dst_placements[0].dim for info in gathers}:
                along = [info for info in gathers if info.src_dst_placements[0].dim == dim]
                size = max(info.logical_shape[dim] for info in along)
                if size % math.prod(mesh.size(info.mesh_dim) for info in along):
                    return infos
            return merge(infos, mesh, *placements)

        return merged

    return exchanged(_redistribute, "_optimize_transform_infos", wrap)
