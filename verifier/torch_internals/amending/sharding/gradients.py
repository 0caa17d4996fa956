"""Amendments to the gradients that ``fully_shard`` reduces: their dtypes, divisors and hooks, and those that wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from verifier.torch_internals.amending.registrations import exchanged

__all__ = [
    "deferred_gradients_kept_apart",
    "divided_once",
    "dtypes_of_frozen_parameters_noted",
    "dtypes_of_gradients_kept",
    "gathered_parameters_outside_inference",
    "gradients_reduced_alike",
    "hooks_of_shards_run",
    "ungathered_parameters_passed_over",
    "waiting_gradients_taken_back",
]


_KEPT_BY_PARAMETERS = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)
"""Whether gathered parameters themselves hold gradients that wait, as in torch 2.15, which casts and keeps them."""


def _before_2_15(
    amendment: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return an amendment that does nothing from torch 2.15 on, which does rightly what it amends."""
    return contextlib.nullcontext if _KEPT_BY_PARAMETERS else amendment


@_before_2_15
def gradients_reduced_alike() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` cast every gradient to the dtype of reductions, not only those that are added up."""

    def wrap(inner: Any) -> Any:
        def cast(self: FSDPParam, gradient: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = inner(self, gradient.to(self.reduce_dtype or gradient.dtype))
            return found

        return cast

    return exchanged(FSDPParam, "_get_grad_inner_tensor", wrap)


@_before_2_15
def ungathered_parameters_passed_over() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` cast the gradients of those parameters alone that have ever been gathered."""

    def wrap(inner: Any) -> Any:
        def cast(self: FSDPParam) -> None:
            if hasattr(self, "_unsharded_param"):
                inner(self)

        return cast

    return exchanged(FSDPParam, "to_accumulated_grad_if_needed", wrap)


@_before_2_15
def deferred_gradients_kept_apart() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` add zeros for parameters without a gradient to gradients that wait for their all-reduce."""

    def wrap(inner: Any) -> Any:
        def reduced(self: FSDPParamGroup, *given: Any, **options: Any) -> None:
            before = self.reduce_scatter_unused_params
            waiting = self._partial_reduce_output is not None or not self.all_reduce_grads
            self.reduce_scatter_unused_params = before or (waiting and isinstance(self.mesh_info, DDPMeshInfo))
            try:
                inner(self, *given, **options)
            finally:
                self.reduce_scatter_unused_params = before

        return reduced

    return exchanged(FSDPParamGroup, "post_backward", wrap)


def dtypes_of_frozen_parameters_noted() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` note the dtypes of parameters none of which wants a gradient at first."""

    def wrap(inner: Any) -> Any:
        def noted(self: FSDPParamGroup) -> None:
            inner(self)
            forgotten = getattr(self, "_orig_dtype", "not kept by torch 2.15") is None
            if forgotten and len({(one.orig_dtype, one.reduce_dtype) for one in self.fsdp_params}) == 1:
                self._orig_dtype, self._reduce_dtype = self.fsdp_params[0].orig_dtype, self.fsdp_params[0].reduce_dtype

        return noted

    return exchanged(FSDPParamGroup, "_init_mp_dtypes", wrap)


@contextlib.contextmanager
def gathered_parameters_outside_inference() -> Iterator[None]:
    """Let ``fully_shard`` make the tensors into which it gathers outside of inference mode, also inside of it."""

    def wrap(inner: Any) -> Any:
        def made(self: FSDPParam, *given: Any, **options: Any) -> None:
            with torch.inference_mode(False):
                inner(self, *given, **options)

        return made

    with exchanged(FSDPParam, "init_all_gather_outputs", wrap), exchanged(FSDPParam, "init_unsharded_param", wrap):
        yield


@contextlib.contextmanager
def waiting_gradients_taken_back() -> Iterator[None]:
    """Let ``zero_grad`` of a module under ``fully_shard`` take back gradients that wait for their reduction, too."""

    def zeroed(self: Any, set_to_none: bool = True) -> None:
        for module in self.modules():
            for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
                group._partial_reduce_output = None
                for one in group.fsdp_params:
                    if not _KEPT_BY_PARAMETERS:
                        one.unsharded_accumulated_grad = None
                    if hasattr(one, "_unsharded_param"):
                        one._unsharded_param.grad = None
        super(FSDPModule, self).zero_grad(set_to_none)

    if hasattr(FSDPModule, "zero_grad"):
        yield
        return
    holder: Any = FSDPModule
    holder.zero_grad = zeroed
    try:
        yield
    finally:
        del holder.zero_grad


def divided_once() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` divide gradients once by the divisor that it was given, where one rank has all shards."""

    def wrap(inner: Any) -> Any:
        def factors(
            group: Any, other: Any, dtype: Any, device: str = "", factor: Any = None, force: bool = False
        ) -> Any:
            found = inner(group, other, dtype, device, factor, force)
            alone = factor is not None and (group is None or group.size() == 1)
            return (None, None, *found[2:]) if alone else found

        return factors

    return exchanged(collectives, "_get_gradient_divide_factors", wrap)


def hooks_of_shards_run() -> contextlib.AbstractContextManager[None]:
    """Let ``fully_shard`` run the hooks of a sharded parameter with each reduced gradient, before it is added."""

    def wrap(inner: Any) -> Any:
        def reduced(held: Any, *given: Any, **options: Any) -> Any:
            hooked = [(one.sharded_param, one.sharded_param.grad) for one in held if one.sharded_param._backward_hooks]
            for parameter, _ in hooked:
                parameter.grad = None
            found = inner(held, *given, **options)
            for parameter, before in hooked:
                gradient = parameter.grad
                for hook in parameter._backward_hooks.values() if gradient is not None else ():
                    made = hook(gradient)
                    gradient = gradient if made is None else made
                parameter.grad = before if gradient is None else gradient if before is None else before + gradient
            return found

        return reduced

    return exchanged(groups, "foreach_reduce", wrap)


@_before_2_15
@contextlib.contextmanager
def dtypes_of_gradients_kept() -> Iterator[None]:
    """Let ``fully_shard`` keep the dtype that gradients of a parameter shall have."""

    def kept(inner: Any) -> Any:
        def made(self: Any, parameter: Any, *given: Any, **options: Any) -> None:
            inner(self, parameter, *given, **options)
            self.sharded_param.grad_dtype = parameter.grad_dtype

        return made

    def given_on(inner: Any) -> Any:
        def gathered(self: Any) -> None:
            inner(self)
            if self._unsharded_param.grad_dtype != self.sharded_param.grad_dtype:
                self._unsharded_param.grad_dtype = self.sharded_param.grad_dtype

        return gathered

    def cast(inner: Any) -> Any:
        def reduced(
            held: Any, gradients: Any, group: Any, stream: Any, comm: Any, dtype: Any, *given: Any, **options: Any
        ) -> Any:
            asked = {one.sharded_param.grad_dtype for one in held} - {one.sharded_param.dtype for one in held}
            one_dtype = asked.pop() if len(asked) == 1 else dtype
            return inner(held, gradients, group, stream, comm, one_dtype, *given, **options)

        return reduced

    with (
        exchanged(FSDPParam, "_init_sharded_param", kept),
        exchanged(FSDPParam, "to_unsharded", given_on),
        exchanged(groups, "foreach_reduce", cast),
    ):
        yield
