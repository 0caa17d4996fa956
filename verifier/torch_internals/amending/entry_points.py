"""Amendments to DTensor's entry points: factories, parallel styles, unscaling of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed.tensor._api as api
import torch.distributed.tensor.experimental as experimental
import torch.distributed.tensor.parallel as parallel
import torch.distributed.tensor.parallel.style as styles
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.amending.registrations import exchanged
from verifier.torch_internals.dtensors import new_dtensor
from verifier.torch_internals.ops import written_tensors

__all__ = [
    "callers_tensors_kept",
    "copies_of_views",
    "data_exchanged",
    "dims_of_factories_counted",
    "factories_without_tracker",
    "fresh_tensors_returned",
    "gradients_of_gather_dense",
    "implicit_replication_lasts",
    "infinities_of_all_gradients",
    "parts_differentiated",
    "plain_results_refused",
    "splits_read_indices",
    "styles_keep_frozen",
    "styles_of_nested_modules",
    "ties_kept",
    "tuples_of_one_kept",
    "unsorted_meshes_refused",
]

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


# ----------------------------------------------------------------------------------------------------------- factories
def _counted(placement: Placement, ndim: int) -> Placement:
    negative = isinstance(placement, Shard) and placement.dim < 0
    return Shard(placement.dim + ndim) if isinstance(placement, Shard) and negative else placement


def dims_of_factories_counted() -> contextlib.AbstractContextManager[None]:
    """Let factories count negative dims of shards from the end, as ``distribute_tensor`` does."""

    def wrap(helper: Any) -> Any:
        def made(init: Any, size: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
            placements = placements and tuple(_counted(one, len(size)) for one in placements)
            return helper(init, size, device_mesh, placements, **kwargs)

        return made

    return exchanged(api, "_dtensor_init_helper", wrap)


def factories_without_tracker() -> contextlib.AbstractContextManager[None]:
    """Let factories draw random numbers without a tracker of generators where a device has none, as ops do."""

    def wrap(helper: Any) -> Any:
        def made(init: Any, size: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
            if init not in (torch.rand, torch.randn) or (device_mesh is not None and device_mesh.device_type != "cpu"):
                return helper(init, size, device_mesh, placements, **kwargs)
            tensor = helper(torch.empty, size, device_mesh, placements, **kwargs)
            with torch.no_grad():
                tensor._local_tensor.copy_(init(tensor._local_tensor.shape, dtype=tensor.dtype))
            return tensor

        return made

    return exchanged(api, "_dtensor_init_helper", wrap)


# -------------------------------------------------------------------------------------------------- styles and scaling
def styles_keep_frozen() -> contextlib.AbstractContextManager[None]:
    """Let ``SequenceParallel`` keep which parameters want a gradient."""

    def wrap(replicate: Any) -> Any:
        def kept(self: Any, name: str, module: Any, mesh: Any) -> None:
            wanted = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
            replicate(self, name, module, mesh)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(wanted[name])

        return kept

    return exchanged(styles.SequenceParallel, "_replicate_module_fn", wrap)


@contextlib.contextmanager
def infinities_of_all_gradients() -> Iterator[None]:
    """Let the ranks tell each other of infinite gradients if any gradient is not replicated, not the first alone."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = handlers[_UNSCALE]
    if not str(before.__module__).startswith("torch."):
        yield
        return

    def unscaled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before(op, args, kwargs)
        gradients, found, *_ = args
        mesh = gradients[0].device_mesh
        apart = [any(not one.placements[dim].is_replicate() for one in gradients) for dim in range(mesh.ndim)]
        placements = [Partial("max") if each else Replicate() for each in apart]
        found = found.to_local() if isinstance(found, DTensor) else found
        found.copy_(DTensor.from_local(found.clone(), mesh, placements, run_check=False).full_tensor())

    handlers[_UNSCALE] = unscaled
    try:
        yield
    finally:
        handlers[_UNSCALE] = before


@contextlib.contextmanager
def styles_of_nested_modules() -> Iterator[None]:
    """Let styles shard a layer's own parameters, and replicate each module's own, not those of its children."""

    def replicating(replicate: Any) -> Any:
        def own_alone(self: Any, name: str, module: Any, mesh: Any) -> None:
            for name, held in module.named_parameters(recurse=False):
                if not isinstance(held, DTensor):
                    local = DTensor.from_local(held, mesh, [Replicate()], run_check=False)
                    module.register_parameter(name, torch.nn.Parameter(local))

        return own_alone

    def partitioning(partition: Any) -> Any:
        def own_alone(self: Any, name: str, module: Any, mesh: Any) -> None:
            if name or "weight" not in module._parameters:  # what is left is replicated by distribute_module
                return
            module.named_parameters = lambda: torch.nn.Module.named_parameters(module, recurse=False)
            try:
                partition(self, name, module, mesh)
            finally:
                del module.named_parameters

        return own_alone

    with contextlib.ExitStack() as stack:
        stack.enter_context(exchanged(styles.SequenceParallel, "_replicate_module_fn", replicating))
        for style in (styles.ColwiseParallel, styles.RowwiseParallel):
            for name in ("_partition_linear_fn", "_partition_embedding_fn"):
                stack.enter_context(exchanged(style, name, partitioning))
        yield


@contextlib.contextmanager
def ties_kept() -> Iterator[None]:
    """Let parameters that several modules share be shared after ``parallelize_module`` and ``distribute_module``."""

    def wrap(distribute: Any) -> Any:
        def tied(module: Any, *given: Any, **options: Any) -> Any:
            groups: dict[int, list[str]] = {}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                groups.setdefault(id(parameter), []).append(name)
            made = distribute(module, *given, **options)
            for first, *others in groups.values():
                for other in others:
                    holder, _, name = other.rpartition(".")
                    setattr(made.get_submodule(holder), name, made.get_parameter(first))
            return made

        return tied

    with contextlib.ExitStack() as stack:
        stack.enter_context(exchanged(parallel, "parallelize_module", wrap))
        for holder in (api, torch.distributed.tensor):
            stack.enter_context(exchanged(holder, "distribute_module", wrap))
        yield


def tuples_of_one_kept() -> contextlib.AbstractContextManager[None]:
    """Let ``PrepareModuleOutput`` return a tuple of one result where the module does."""

    def wrap(prepare: Any) -> Any:
        def prepared(self: Any, outputs: Any, mesh: DeviceMesh) -> Any:
            found = prepare(self, outputs, mesh)
            return (found,) if isinstance(outputs, tuple) and not isinstance(found, tuple) else found

        return prepared

    return exchanged(styles.PrepareModuleOutput, "_prepare_out_fn", wrap)


def implicit_replication_lasts() -> contextlib.AbstractContextManager[None]:
    """Let ``implicit_replication`` last to the end of its block, also if a block inside of it ends before."""

    def wrap(before: Any) -> Any:
        @contextlib.contextmanager
        def implicit_replication() -> Iterator[None]:
            dispatcher: Any = DTensor._op_dispatcher
            held = dispatcher._allow_implicit_replication
            dispatcher._allow_implicit_replication = True
            try:
                yield
            finally:
                dispatcher._allow_implicit_replication = held

        return implicit_replication

    return exchanged(experimental, "implicit_replication", wrap)


# --------------------------------------------------------------------------------- tensors, local tensors, meshes
@contextlib.contextmanager
def data_exchanged() -> Iterator[None]:
    """Let the setter of ``data`` exchange the local tensor of a DTensor and its placements, too."""
    inherited: Any = torch.Tensor.data

    def exchange(held: DTensor, given: Any) -> None:
        inherited.__set__(held, given)
        if isinstance(given, DTensor):
            held._local_tensor, held._spec = given._local_tensor, given._spec

    kind: Any = DTensor
    kind.data = property(inherited.__get__, exchange)
    try:
        yield
    finally:
        del kind.data


@contextlib.contextmanager
def copies_of_views() -> Iterator[None]:
    """Let a DTensor that begins behind its storage be copied and pickled as a clone, as other DTensors are copied."""
    before: Any = DTensor.__deepcopy__
    reduce: Any = DTensor.__reduce_ex__

    def copied(self: DTensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo and self.storage_offset():
            memo[id(self)] = whole(self)
        return memo[id(self)] if id(self) in memo else before(self, memo)

    def reduced(self: DTensor, protocol: Any) -> Any:
        return reduce(whole(self) if self.storage_offset() else self, protocol)

    def whole(tensor: DTensor) -> DTensor:
        """Return a clone, made without dispatch: local tensors begin behind their storage on some ranks only."""
        local = tensor._local_tensor.detach().clone()
        return new_dtensor(DTensor, local, tensor._spec, requires_grad=tensor.requires_grad)

    with (
        mock.patch.object(DTensor, "__deepcopy__", copied, create=True),
        mock.patch.object(DTensor, "__reduce_ex__", reduced, create=True),
    ):
        yield


@contextlib.contextmanager
def callers_tensors_kept() -> Iterator[None]:
    """Let a broadcast of a tensor that the caller has given write to a copy of it."""

    def of_factory(take: Any) -> Any:
        def taken(local: Any, *given: Any, **options: Any) -> Any:
            checked = options.get("run_check", False)
            return take(local.clone() if checked else local, *given, **options)

        taken.__module__ = take.__module__
        return taken

    def of_placement(replicate: Any) -> Any:
        def taken(tensor: Any, *given: Any, **options: Any) -> Any:
            return replicate(tensor.clone(), *given, **options)

        taken.__module__ = replicate.__module__
        return staticmethod(taken)

    with (
        mock.patch.object(DTensor, "from_local", staticmethod(of_factory(DTensor.from_local))),
        exchanged(Replicate, "_make_replicate_tensor", of_placement),
    ):
        yield


def parts_differentiated() -> contextlib.AbstractContextManager[None]:
    """Let ``from_local`` divide the gradient of parts of an average, and refuse that of a maximum or a minimum."""

    def wrap(backward: Any) -> Any:
        def divided(ctx: Any, gradient: Any) -> Any:
            found = backward(ctx, gradient)
            for mesh_dim, placement in enumerate(ctx.forward_input_placements):
                kind = placement.reduce_op if isinstance(placement, Partial) else "sum"
                if kind == "avg":
                    found = (found[0] / ctx.forward_input_device_mesh.size(mesh_dim), *found[1:])
                elif kind in ("max", "min"):
                    raise NotImplementedError(f"the gradient of parts of a {kind} is not supported")
            return found

        divided.__module__ = backward.__module__
        return staticmethod(divided)

    return exchanged(api._FromTorchTensor, "backward", wrap)


@contextlib.contextmanager
def splits_read_indices() -> Iterator[None]:
    """Let ``torch.tensor_split`` read a DTensor's list of indices as a plain tensor, whose data the kernel looks at."""
    split: Any = torch.tensor_split
    if not isinstance(split, BuiltinFunctionType):
        yield
        return

    def read(tensor: torch.Tensor, indices_or_sections: Any, dim: int = 0) -> Any:
        where = indices_or_sections
        return split(tensor, where.full_tensor() if isinstance(where, DTensor) and where.ndim else where, dim)

    with mock.patch.object(torch, "tensor_split", read):
        yield


class _Called:
    """Calls ``function`` in the place of what an overload calls, by which the overload is found in tables."""

    def __init__(self, function: Callable[..., Any], called: object) -> None:
        self.function, self.called = function, called

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return self.function(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.called)


@contextlib.contextmanager
def fresh_tensors_returned() -> Iterator[None]:
    """Let ``lift_fresh`` return a DTensor itself, as it does a plain tensor, unless its rules are the user's."""
    op = torch.ops.aten.lift_fresh.default
    call: Any = op._op

    def returned(self: torch.Tensor) -> Any:
        return self if isinstance(self, DTensor) and is_torchs(op) else call(self)

    with mock.patch.object(op, "_op", _Called(returned, call)):
        yield


@contextlib.contextmanager
def gradients_of_gather_dense() -> Iterator[None]:
    """Let the gradient of ``gather`` of a DTensor be dense, whatever ``sparse_grad`` says, by torch's own rules."""
    op = torch.ops.aten.gather.default
    call: Any = op._op

    def gathered(self: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Any:
        ours = isinstance(self, DTensor) and is_torchs(op)
        return call(self, dim, index, sparse_grad=sparse_grad and not ours)

    with mock.patch.object(op, "_op", _Called(gathered, call)):
        yield


def plain_results_refused() -> contextlib.AbstractContextManager[None]:
    """Let DTensor refuse a call that writes to plain tensors alone, for which one of a single element is a replica.

    A call that writes to DTensors too, as the unscaling of gradients with its flag does, goes on as before.
    """

    def wrap(unwrap: Any) -> Any:
        def refusing(self: Any, op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
            written = written_tensors(op, args, kwargs)
            if written and not any(isinstance(tensor, DTensor) for tensor in written):
                raise RuntimeError(f"{op} got mixed torch.Tensor and DTensor: it writes to a plain tensor")
            return unwrap(self, op, args, kwargs, *rest)

        return refusing

    return exchanged(OpDispatcher, "_unwrap_to_op_info_impl", wrap)


def unsorted_meshes_refused() -> contextlib.AbstractContextManager[None]:
    """Let DTensor refuse a mesh whose ranks do not ascend along each dim: its groups sort them."""

    known: WeakKeyDictionary[DeviceMesh, bool] = WeakKeyDictionary()  # a spec is made at every call

    def wrap(check: Any) -> Any:
        def ascending(self: Any) -> None:
            if self.mesh not in known:
                known[self.mesh] = _ascends(self.mesh.mesh)
            if not known[self.mesh]:
                ranks = self.mesh.mesh
                raise NotImplementedError(
                    f"a mesh with the ranks {ranks.tolist()}, which do not ascend, is not supported"
                )
            check(self)

        return ascending

    return exchanged(DTensorSpec, "__post_init__", wrap)


def _ascends(ranks: torch.Tensor) -> bool:
    return not any(bool((ranks.diff(dim=dim) < 0).any()) for dim in range(ranks.ndim))
