"""A call about which DTensor is asked: its schema for given placements, and how DTensor fails."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils import _pytree as pytree

from verifier.torch_internals.caches import call_by_shapes, endless_rules
from verifier.torch_internals.claims.values import RuleFailure
from verifier.torch_internals.placements import Combination, Placements
from verifier.torch_internals.refusals import is_refusal, raised_in, returns_none
from verifier.torch_internals.watching import EndlessRuleError, SlowRulesError

__all__ = ["MOST_TICKS", "AskedCall", "bare_mesh", "meta_of"]

MOST_TICKS = 12
"""DTensor is asked no more about a call once an answer has taken so many ticks; it takes a few milliseconds."""


class AskedCall:
    """A call about which DTensor is asked; see :class:`~verifier.torch_internals.claims.reader.ClaimReader`."""

    def __init__(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> None:
        self.op = op
        self._propagator = DTensor._op_dispatcher.sharding_propagator
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._leaves = leaves
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._metas = [meta_of(leaves[i]) for i in self._slots]
        self._result_meta: Any = _result_meta(result)
        self._in_args = len([leaf for leaf in pytree.tree_leaves(tuple(args)) if isinstance(leaf, torch.Tensor)])
        self.failures: dict[Combination, RuleFailure] = {}
        self.written: dict[Combination, tuple[object, ...]] = {}
        self.lost = op in endless_rules
        self.why_lost = "DTensor has not come back from a rule of this op, and is not asked again"
        self._specs: dict[tuple[int, int, Placements], DTensorSpec] = {}
        self._may_be_written_to = bool(kwargs) or any(isinstance(arg, list | dict) for arg in args)
        self.dim_names: tuple[str, ...] = ()
        self.around: Callable[[DeviceMesh], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.watch: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.asks_everywhere = True
        self._listings: dict[tuple[tuple[int, ...], tuple[str, ...]], frozenset[Combination] | None] = {}
        self._call = call_by_shapes(op, leaves, self._spec)

    def key(self, combination: Combination, mesh_shape: tuple[int, ...]) -> Hashable:
        """Return that by which DTensor's cache knows this call at ``combination``: equal keys share a decision."""
        mesh = bare_mesh(mesh_shape, 0, self.dim_names)
        placed = zip(combination, self._metas, strict=True)
        return self._schema([DTensorSpec(mesh, placements, tensor_meta=meta) for placements, meta in placed])

    def _note_lost(self, mesh_shape: Sequence[int], error: BaseException) -> None:
        """Note that DTensor did not come back when it was asked for all rules; other failures show at each of them."""
        if isinstance(error, EndlessRuleError):
            self._note(tuple((Replicate(),) * len(mesh_shape) for _ in self._metas), error)

    def _note(self, combination: Combination, error: BaseException) -> None:
        """Note how DTensor failed, unless it has refused or is slow."""
        if isinstance(error, EndlessRuleError | SlowRulesError):
            self.lost = True
        if isinstance(error, EndlessRuleError):
            endless_rules.add(self.op)
            self.failures[combination] = RuleFailure("", str(error))
        elif not (isinstance(error, SlowRulesError) or is_refusal(error)):
            code = raised_in(error)
            where = "" if code is None else f"{code.co_filename}:{code.co_qualname}"
            lines = ["the op's strategy returns None"] if returns_none(error) else str(error).strip().splitlines()
            self.failures[combination] = RuleFailure(type(error).__name__, lines[0] if lines else "no message", where)

    def _spec_of(self, mesh: DeviceMesh, number: int, placements: Placements) -> DTensorSpec:
        """Return the spec of tensor ``number``; to make one takes longer than to look it up."""
        key = id(mesh), number, placements
        if key not in self._specs:
            self._specs[key] = DTensorSpec(mesh, placements, tensor_meta=self._metas[number])
        return self._specs[key]

    def _schema(self, specs: Sequence[DTensorSpec]) -> OpSchema:
        leaves = list(self._leaves)
        for slot, spec in zip(self._slots, specs, strict=True):
            leaves[slot] = spec
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        propagator = self._propagator
        info = propagator.op_to_schema_info.get(self.op)
        if info is None:
            info = propagator.op_to_schema_info_for_single_dim_strategy.get(self.op)
        return OpSchema(self.op, args, kwargs, schema_info=info)

    def _is_written_to(self, schema: OpSchema) -> bool:
        """Return whether an argument that is no tensor is not what :meth:`_schema` has put into ``schema``."""
        if not self._may_be_written_to and not schema.kwargs_schema:
            return False
        leaves = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
        given = self._leaves
        return len(leaves) != len(given) or any(
            not isinstance(was, torch.Tensor) and was is not now and was != now
            for was, now in zip(given, leaves, strict=True)
        )

    @contextlib.contextmanager
    def _without_dry_run(self, schema: OpSchema) -> Iterator[None]:
        """Give DTensor the results of the call of ``schema``; it works out those of what a decomposition calls."""
        propagator = self._propagator
        dry_run = propagator._propagate_tensor_meta_non_cached

        def known(asked: OpSchema) -> Any:
            return self._result_meta if asked is schema else dry_run(asked)

        propagator._propagate_tensor_meta_non_cached = known  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            del propagator._propagate_tensor_meta_non_cached


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _result_meta(result: object) -> Any:
    if isinstance(result, torch.Tensor):
        return meta_of(result)
    if isinstance(result, list | tuple):
        metas = [meta_of(item) if isinstance(item, torch.Tensor) else None for item in result]
        return tuple(metas) if isinstance(result, tuple) else metas
    return None


@functools.cache
def bare_mesh(shape: tuple[int, ...], rank: int, names: tuple[str, ...] = ()) -> DeviceMesh:
    """Return a mesh as ``rank`` sees it, with a shape but no process groups."""
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names or None, _init_backend=False, _rank=rank)
