"""Amendments around sharding propagation: what the rules are asked, and which of their decisions count.

An amendment concerns torch's own rules only. An op whose rules someone else has registered runs by those alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.utils import _pytree as pytree

from verifier.torch_internals.placements import Placements, placements_of_spec
from verifier.torch_internals.registries import is_registered_by_user, registries_of_rules

__all__ = [
    "Decision",
    "Placed",
    "adds_replication",
    "is_torchs",
    "normalised",
    "refused",
    "refused_by_amendment",
    "refused_first",
    "refusing",
    "replicated_first",
    "rule_function",
    "tensors",
    "vetoed",
]


@dataclass(frozen=True)
class Placed:
    """A tensor of a call, as DTensor's propagation knows it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements
    mesh_shape: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """What DTensor has decided for a call.

    Parameters
    ----------
    given
        The arguments with the placements that the tensors have; a :class:`Placed` stands for each tensor.
    args
        The arguments with the placements on which DTensor runs the op.
    kwargs
        The keyword arguments, whose tensors DTensor does not redistribute.
    outputs
        The placements of the results; None for a result that is no tensor.
    mesh_shape
        That of the first tensor's mesh. A list of tensors may have tensors of other meshes.
    """

    op: str
    given: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Placements | None, ...]
    mesh_shape: tuple[int, ...]

    @property
    def inputs(self) -> list[Placed]:
        """The tensors among the arguments, on the placements on which the op runs."""
        return tensors((self.args, self.kwargs))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument at ``position``, or the keyword argument ``name``, or ``default``."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Normaliser = Callable[[str, tuple[Any, ...]], tuple[Any, ...] | None]
"""Returns the arguments of an op in another spelling, or None; a :class:`Placed` stands for each tensor."""
Function = TypeVar("Function", bound=Callable[..., object])
Veto = Callable[[Decision], bool]


def tensors(tree: object) -> list[Placed]:
    """Return the tensors among arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=_is_placed) if isinstance(leaf, Placed)]


def _is_placed(value: object) -> bool:
    return isinstance(value, Placed)


# ------------------------------------------------------------------------------------------------- whose rules they are
def rule_function(op: OpOverload) -> Callable[..., object] | None:
    """Return the function that claims the rules of ``op``; None for an op that DTensor decomposes or does not know."""
    _, rules, strategies, single = registries_of_rules()
    found = single[op].func if op in single else strategies.get(op) or rules.get(op)
    while isinstance(found, functools.partial):
        found = found.func
    return found


def is_torchs(op: OpOverload) -> bool:
    """Return whether the rules of ``op`` are torch's own, and registered by torch.

    What ``register_sharding`` makes is not, nor is a function of torch that an import registers, nor one of the user's
    that looks like torch's, as ``functools.wraps`` makes it.
    """
    function = rule_function(op)
    if function is None:
        return True
    module = _module_of(function)
    return module.partition(".")[0] == "torch" and ".experimental." not in module and not is_registered_by_user(op)


def adds_replication(op: OpOverload) -> bool:
    """Return whether DTensor adds the rule by which everything is replicated to those that are registered for ``op``.

    It does so for strategies for one mesh dim, and for what ``register_sharding`` makes. Then no such strategy is to
    blame if no rule is left.
    """
    function, (_, _, _, single) = rule_function(op), registries_of_rules()
    return op in single or (function is not None and ".experimental." in _module_of(function))


def _module_of(function: Callable[..., object]) -> str:
    """Return the module that has the code of a function; of one that a remedy wraps, without the remedy."""
    module = str(getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", ""))
    wrapped = getattr(function, "__wrapped__", None)
    return _module_of(wrapped) if module.partition(".")[0] == "verifier" and wrapped is not None else module


# ----------------------------------------------------------------------------------------------- around the propagation
@dataclass(eq=False)
class _Amendment:
    ops: tuple[str, ...]
    change: Normaliser | None = None
    before: Veto | None = None
    after: Veto | None = None
    refuse: str = ""

    def concerns(self, op: OpOverload) -> bool:
        return _matches(op, self.ops)


@functools.cache
def _matches(op: OpOverload, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(str(op), pattern) for pattern in patterns)


_amendments: list[_Amendment] = []


@contextlib.contextmanager
def _amended(amendment: _Amendment) -> Iterator[None]:
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    if not _amendments:
        propagator.propagate_op_sharding_non_cached = functools.partial(_propagate, propagator)
        propagator.propagate_op_sharding = LocalLRUCache(propagator.propagate_op_sharding_non_cached)
    _amendments.append(amendment)
    try:
        yield
    finally:
        _amendments.remove(amendment)
        if not _amendments:
            del propagator.propagate_op_sharding_non_cached
            propagator.propagate_op_sharding = LocalLRUCache(propagator.propagate_op_sharding_non_cached)


def _propagate(propagator: Any, schema: OpSchema) -> OutputSharding:
    """Decide as DTensor does, with all amendments."""
    decide = functools.partial(type(propagator).propagate_op_sharding_non_cached, propagator)
    concerned = [one for one in _amendments if one.concerns(schema.op)]
    if not concerned or not is_torchs(schema.op):
        return decide(schema)  # type: ignore[no-any-return]
    for one in concerned:
        if one.change is not None and (args := one.change(str(schema.op), _placed(schema.args_schema))) is not None:
            schema = OpSchema(schema.op, _specs(args, schema), schema.kwargs_schema, schema_info=schema.schema_info)
    for one in concerned:
        if one.before is not None and one.before(_decision(schema, None)):
            return _replicated(decide, schema, one.refuse)
    sharding: OutputSharding = decide(schema)
    decision = _decision(schema, sharding)
    for one in concerned:
        if one.after is not None and one.after(decision):
            return _replicated(decide, schema, one.refuse)
    return sharding


def _placed(tree: Any) -> Any:
    def placed(spec: Any) -> Placed:
        return Placed(tuple(spec.shape), spec.tensor_meta.dtype, tuple(spec.placements), tuple(spec.mesh.shape))

    return pytree.tree_map_only(DTensorSpec, placed, tree)


def _specs(args: tuple[Any, ...], schema: OpSchema) -> tuple[Any, ...]:
    """Return ``args`` with the specs of ``schema`` in the place of the tensors, in order."""
    specs = iter([leaf for leaf in pytree.tree_leaves(schema.args_schema) if isinstance(leaf, DTensorSpec)])
    return pytree.tree_map_only(Placed, lambda _: next(specs), args, is_leaf=_is_placed)  # type: ignore[no-any-return]


def _decision(schema: OpSchema, sharding: OutputSharding | None) -> Decision:
    runs = schema
    outputs: tuple[Placements | None, ...] = ()
    if sharding is not None:
        if sharding.needs_redistribute and sharding.redistribute_schema is not None:
            runs = sharding.redistribute_schema
        outputs = placements_of_spec(sharding.output_spec) or ()
    mesh = next(leaf.mesh for leaf in _all_specs(schema))
    given = _placed(schema.args_schema)
    # sizes that were rewritten for one rank are not the call's
    places = iter([leaf for leaf in pytree.tree_leaves(runs.args_schema) if isinstance(leaf, DTensorSpec)])
    args = pytree.tree_map_only(
        Placed, lambda one: replace(one, placements=tuple(next(places).placements)), given, is_leaf=_is_placed
    )
    kwargs = _placed(schema.kwargs_schema)
    return Decision(str(schema.op), given, args, kwargs, outputs, tuple(mesh.shape))


def _all_specs(schema: OpSchema) -> list[DTensorSpec]:
    leaves = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def _replicated(decide: Callable[[OpSchema], OutputSharding], schema: OpSchema, refuse: str) -> OutputSharding:
    """Return the decision to run the op on replicated tensors; refuse where something else would have to change.

    Raises
    ------
    NotImplementedError
        If the op writes to a tensor that is not replicated, or a keyword argument is not, or ``refuse`` says why not.
    """
    written = [one for one in schema.op._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    names = {one.name for one in written}
    positions = [n for n, one in enumerate(schema.op._schema.arguments) if one.name in names]
    fixed = [schema.kwargs_schema, *(schema.args_schema[n] for n in positions if n < len(schema.args_schema))]
    if refuse or any(not _is_replicated(leaf) for leaf in pytree.tree_leaves(fixed) if isinstance(leaf, DTensorSpec)):
        raise NotImplementedError(f"{schema.op} {refuse or 'has no right rule for the placements of what it writes'}")
    args = pytree.tree_map_only(
        DTensorSpec,
        lambda spec: DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta),
        schema.args_schema,
    )
    wanted = OpSchema(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)
    sharding = decide(wanted)
    return OutputSharding(
        sharding.output_spec,
        sharding.redistribute_schema if sharding.needs_redistribute else wanted,
        needs_redistribute=True,
        use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
    )


_refusing = {f"{_replicated.__name__} ({Path(__file__).name})"}


def refusing(function: Function) -> Function:
    """Mark a function of an amendment which raises where the amendment has DTensor refuse a call."""
    code: CodeType = function.__code__
    _refusing.add(f"{code.co_name} ({Path(code.co_filename).name})")
    return function


def refused_by_amendment(where: str) -> bool:
    """Return whether an amendment refused a call, by the function that raised and its file."""
    return where in _refusing


def _is_replicated(spec: DTensorSpec) -> bool:
    return all(isinstance(placement, Replicate) for placement in spec.placements)


# ----------------------------------------------------------------------------------------------------- the amendments
def vetoed(ops: Sequence[str], wrong: Veto) -> contextlib.AbstractContextManager[None]:
    """Let DTensor replicate the arguments of ``ops`` where it has decided on a rule that is ``wrong``."""
    return _amended(_Amendment(tuple(ops), after=wrong))


def replicated_first(ops: Sequence[str], wrong: Veto) -> contextlib.AbstractContextManager[None]:
    """Let DTensor replicate the arguments before it asks for rules, where ``wrong`` returns True.

    The decision that ``wrong`` is shown has the placements that were given, and no outputs.
    """
    return _amended(_Amendment(tuple(ops), before=wrong))


def refused(ops: Sequence[str], wrong: Veto, why: str) -> contextlib.AbstractContextManager[None]:
    """Let DTensor refuse a call of ``ops``, and say ``why``, where ``wrong`` returns True of what it has decided."""
    return _amended(_Amendment(tuple(ops), after=wrong, refuse=why))


def refused_first(ops: Sequence[str], wrong: Veto, why: str) -> contextlib.AbstractContextManager[None]:
    """Let DTensor refuse a call of ``ops`` before it asks for rules, and say ``why``, where ``wrong`` returns True."""
    return _amended(_Amendment(tuple(ops), before=wrong, refuse=why))


def normalised(ops: Sequence[str], change: Normaliser) -> contextlib.AbstractContextManager[None]:
    """Let the rules of ``ops`` see the arguments that ``change`` returns; the ops run with the given ones."""
    return _amended(_Amendment(tuple(ops), change=change))
