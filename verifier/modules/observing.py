"""Runs a module in one process and records what each submodule does.

The same code runs the local model in the controller and the sharded model on each rank. It judges nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from verifier.core.ops import resolve
from verifier.execution.packing import unpack
from verifier.modules.arguments import ModuleCase
from verifier.modules.data import (
    NOTES,
    OUTSIDE,
    PHASES,
    Disturbance,
    Held,
    ModuleCollective,
    ModuleRun,
    Recorded,
)
from verifier.modules.leaves import leaves, plain, shortened, tensors
from verifier.placements.algebra import take_local
from verifier.torch_internals.dtensors import describe_dtensor, local_shards, make_dtensor
from verifier.torch_internals.placements import Placements
from verifier.torch_internals.watching import CollectiveWatch, NarrowingWatch, next_sequence_number

__all__ = ["on_rank", "run_module"]


def on_rank(mesh: DeviceMesh, packed: bytes) -> ModuleRun:
    """Run the :class:`ModuleCase` in ``packed`` as a rank of ``mesh``."""
    return run_module(unpack(packed), mesh)


def run_module(given: ModuleCase, mesh: DeviceMesh | None = None) -> ModuleRun:
    """Run a model for ``given.steps`` steps and return what it did; the model is sharded if there is a mesh."""
    warned: list[str] = []
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
            return _observed(given, mesh, warned)
    except Exception as error:
        for text in warned[:_NOTED]:  # a rank reports only the last dozen lines of a traceback and its notes
            error.add_note(f"{NOTES[2]}{shortened(text)}")
        raise


_NOTED = 3
"""The most warnings that become notes of an exception."""


def _observed(given: ModuleCase, mesh: DeviceMesh | None, warned: list[str]) -> ModuleRun:
    torch.manual_seed(given.seed)  # a plan may draw numbers, too
    model = given.model if mesh is None else _sharded(given.model.to(mesh.device_type), given.plan, mesh, warned)
    placed = [_placed(value, where, given, mesh) for value, where in zip(
        (*given.inputs, *given.targets), given.placements, strict=True)]  # fmt: skip
    inputs, targets = placed[: len(given.inputs)], placed[len(given.inputs) :]
    kwargs = {name: _placed(value, given.kwargs_placements[name], given, mesh) for name, value in given.kwargs.items()}
    optimizer = given.optimizer(model.parameters())
    watch = _Watch(model)
    narrowing = NarrowingWatch() if mesh is None else nullcontext()
    losses: list[Held] = []
    for step in range(given.steps):
        torch.manual_seed(given.seed + step)  # dropout on replicas is the same everywhere, and in the local model
        optimizer.zero_grad(set_to_none=True)
        with watch.recording() if step == 0 else nullcontext(), narrowing:
            result = model(*inputs, **kwargs)
            loss = given.loss(result, *targets)
            losses.append(_held(loss))
            watch.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            watch.phase = "step"
            if step == 0:
                with torch.no_grad():
                    kept = {
                        place: _held(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf)
                        for place, leaf in leaves(result)
                    }
                    gradients = {
                        name: None if p.grad is None else _held(p.grad) for name, p in _parameters(model).items()
                    }
                    input_gradients = {f"input {number}": _gradient(value) for number, value in enumerate(inputs)}
                    input_gradients |= {f"input {name}": _gradient(value) for name, value in kwargs.items()}
            if given.disturbed is not None:
                _disturb(model, given.disturbed, step)
            optimizer.step()
    buffers = model.named_buffers(remove_duplicate=False)
    state = {**_parameters(model), **{_own_name(model, name): buffer for name, buffer in buffers}}
    return ModuleRun(
        modules={_own_name(model, name): type(module).__name__ for name, module in model.named_modules()},
        outputs=tuple(watch.outputs),
        output_gradients=tuple(watch.gradients),
        result=kept,
        losses=tuple(losses),
        gradients=gradients,
        input_gradients=input_gradients,
        state={name: _held(tensor) for name, tensor in state.items()},
        tied=_tied(model),
        collectives=tuple(
            ModuleCollective(module, phase, name, count)
            for (phase, module, name), count in sorted(watch.collectives.items(), key=watch.order)
        ),
        warnings=tuple(warned),
        eps=max([narrowing.eps, *_precisions(model, placed, kwargs)]) if isinstance(narrowing, NarrowingWatch) else 0.0,
    )


def _precisions(model: nn.Module, values: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[float]:
    """Yield the eps of the dtype of each floating-point parameter and argument."""
    for value in (*model.parameters(), *values, *kwargs.values()):
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            yield torch.finfo(value.dtype).eps


# ---------------------------------------------------------------------------------------------------------- beginning
def _sharded(model: nn.Module, plan: object, mesh: DeviceMesh, warned: list[str]) -> nn.Module:
    """Return the model under the plan, and add the plan's warnings to ``warned``."""
    apply: Any = resolve(plan) if isinstance(plan, str) else plan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # a rank that is reused may have given the same warning before
        for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", ignored)
        try:
            if isinstance(plan, ParallelStyle | Mapping):
                changed = parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
            else:
                changed = apply(model, mesh)
        finally:
            # on one line, because some contain the text of a whole model
            warned += dict.fromkeys(f"{one.category.__name__}: {' '.join(str(one.message).split())}" for one in caught)
    if changed is not None and not isinstance(changed, nn.Module):
        raise TypeError(f"the plan returned a {type(changed).__name__}; return the module, or None to keep it")
    return model if changed is None else changed


def _placed(value: object, placements: Placements | None, given: ModuleCase, mesh: DeviceMesh | None) -> object:
    """Return an input as this process gets it: the global tensor, a local tensor, or a DTensor."""
    if not isinstance(value, torch.Tensor):
        return value
    grad = value.requires_grad
    if mesh is None or placements is None:
        return value.detach().clone().requires_grad_(grad)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = take_local(value, placements, mesh.shape, coordinate, given.seed).to(mesh.device_type)
    if given.as_dtensors:
        local = make_dtensor(local, describe_dtensor(value, mesh, placements))
    return local.requires_grad_(grad)


# -------------------------------------------------------------------------------------------------------------- noting
def _held(tensor: torch.Tensor) -> Held:
    """Return this process's local tensor of ``tensor``, copied to the host."""
    if isinstance(tensor, DTensor):
        detached: Any = tensor.detach()
        shards = local_shards(detached)
        (local,) = shards.locals.values()
        names = tuple(tensor.device_mesh.mesh_dim_names or ())
        return Held(_copied(local), tuple(tensor.shape), True, shards.placements, names, shards.reason)
    return Held(_copied(tensor), tuple(tensor.shape))


def _copied(local: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        dense = local.detach() if local.layout is torch.strided else local.detach().to_dense()  # such as an embedding's
        return dense.to("cpu", copy=True).contiguous()


def _gradient(value: object) -> Held | None:
    return _held(value.grad) if isinstance(value, torch.Tensor) and value.grad is not None else None


def _disturb(model: nn.Module, how: Disturbance, step: int) -> None:
    """Perturb the gradients of a local model."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and not p.grad.is_sparse}
    size = how.share * max(
        (float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()), default=0
    )
    pair, direction = how.draw // 2, (-1) ** how.draw
    generator = torch.Generator().manual_seed(pair * (1 + step))
    for name, gradient in gradients.items():
        share = torch.rand(gradient.shape, generator=generator) + 0.5
        sign = torch.randint(0, 2, gradient.shape, generator=generator) * 2 - 1
        # gradients that are 0 on all ranks, such as those of unused rows of a table, have no rounding error
        off = (gradient != 0) | how.touched.get(name, torch.tensor(True))
        gradient.add_((direction * size * share * sign * off).to(gradient.dtype))


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {_own_name(model, name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def _own_name(model: nn.Module, name: str) -> str:
    """Return the local model's name of a submodule or parameter of ``model``, parts of which a plan may have wrapped.

    >>> _own_name(nn.Sequential(torch.compile(nn.Linear(1, 1), backend="eager")), "0._orig_mod.weight")
    '0.weight'
    """
    parts: list[str] = []
    holder: object = model
    for part in name.split("."):
        if part not in _WRAPPED and not (part == "module" and isinstance(holder, DistributedDataParallel)):
            parts.append(part)
        holder = getattr(holder, part, None)
    return ".".join(parts)


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attributes in which ``torch.compile``, checkpointing and the first FSDP keep the module that they wrap."""


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that stand for one parameter."""
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in _parameters(model).items():
        groups[id(parameter)].append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


@dataclass
class _Watch:
    """Hooks on every submodule. They run before the plan's input hooks and after its output hooks."""

    model: nn.Module
    phase: str = "forward"
    outputs: list[Recorded] = field(default_factory=list)
    gradients: list[Recorded] = field(default_factory=list)
    collectives: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _stack: list[tuple[str, int]] = field(default_factory=list)
    _spans: list[tuple[int, int, str]] = field(default_factory=list)
    _calls: Counter[str] = field(default_factory=Counter)
    _positions: dict[str, int] = field(default_factory=dict)
    _failed: str = ""
    _arrived: tuple[str, torch.Tensor] | None = None
    """The submodule whose output was the last to get its gradient, and this gradient."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the result of every submodule, the gradients of results, and all collectives."""
        handles = []
        for position, (full_name, module) in enumerate(self.model.named_modules()):
            name = _own_name(self.model, full_name)
            self._positions[name] = position
            handles.append(module.register_forward_pre_hook(self._entered(name), prepend=True))
            # always_call, because checkpointing stops a forward as soon as it has what it needs
            handles.append(module.register_forward_hook(self._left(name), always_call=True))
        try:
            with CollectiveWatch(self._collective):
                yield
        except Exception as error:
            if self._failed:
                error.add_note(f"{NOTES[0]}{self._failed}")
            elif self.phase == "backward":
                error.add_note(f"{NOTES[1]}{self._where_backward()}")
            raise
        finally:
            self._arrived = None
            for handle in handles:
                handle.remove()

    def _where_backward(self) -> str:
        """Return how far the backward pass came; a guess, because ops between two submodules belong to neither."""
        if self._arrived is None:
            return "before the output of any submodule had its gradient"
        name = self._arrived[0]
        if not name:
            return "where only the output of the model had its gradient"
        return f"likely in that of the submodule {name}: its output was the last that got its gradient"

    def order(self, item: tuple[tuple[str, str, str], int]) -> tuple[int, int, str]:
        """Return the sort key of a count: by phase, then by module in the order of the model."""
        (phase, module, name), _ = item
        return PHASES.index(phase), self._positions[module], name

    def _entered(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object) -> None:
            self._stack.append((name, next_sequence_number()))

        return hook

    def _left(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            entered, begin = self._stack.pop()
            assert entered == name, f"{name} ended within {entered}"
            if sys.exc_info()[1] is not None and self.phase == "forward":  # always_call runs this hook then too
                self._failed = self._failed or name
                return
            if self.phase != "forward":  # checkpointing runs the forward again
                return
            self._spans.append((begin, next_sequence_number(), name))
            call = self._calls[name]
            self._calls[name] += 1
            for leaf, tensor in enumerate(tensors(output)):
                self.outputs.append(Recorded(name, call, leaf, _held(tensor)))
                if tensor.requires_grad:
                    tensor.register_hook(self._graded(name, call, leaf))  # type: ignore[no-untyped-call]

        return hook

    def _graded(self, name: str, call: int, leaf: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            last, same = self._arrived or (None, None)
            # A parent may return its submodule's result unchanged; the hook of the parent then runs second.
            if same is not gradient or last is None or not f"{last}.".startswith(f"{name}." if name else ""):
                self._arrived = name, gradient
            self.gradients.append(Recorded(name, call, leaf, _held(gradient)))

        return hook

    def _collective(self, name: str, node: int | None) -> None:
        module = OUTSIDE
        if self._stack:
            module = self._stack[-1][0]
        elif node is not None:
            inside = [(begin, module) for begin, end, module in self._spans if begin <= node < end]
            module = max(inside, default=(0, OUTSIDE), key=lambda span: span[0])[1]
        self.collectives[self.phase, module, name] += 1
