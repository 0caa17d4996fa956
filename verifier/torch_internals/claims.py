"""What DTensor's strategies claim, read without running them on ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec
from torch.distributed.tensor._ops.single_dim_strategy import (
    _PreparedSingleDimStrategy,
    _resolve_foreach_elementwise_overload,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from verifier.torch_internals.caches import call_by_shapes, counts_of_rules, endless_rules, traced_once
from verifier.torch_internals.expanding.free_rules import RedistributesError, free_rules_alone
from verifier.torch_internals.expanding.placements_read import WatchedSpec, rules_unread
from verifier.torch_internals.placements import Combination, Placements, placements_of_spec, unmasked
from verifier.torch_internals.refusals import is_refusal, raised_in, returns_none
from verifier.torch_internals.registries import asked_per_element, installed_sharded_op
from verifier.torch_internals.sharded_ops import ShardedOp
from verifier.torch_internals.watching import EndlessRuleError, SlowRulesError, ended_rules

__all__ = [
    "ClaimReader",
    "ListedRule",
    "Propagation",
    "RuleFailure",
    "Slot",
]

_LONGEST = 12
"""DTensor is asked no more about a call once an answer has taken so many ticks; it takes a few milliseconds."""

ListedRule = tuple[Combination, tuple[Placements | None, ...]]
"""The placements of the inputs, and of the results: None for one that is no tensor."""
_ASKED_ALIKE = 3
"""How often a strategy is asked about the same call to see whether it lists more rules each time."""


@dataclass(frozen=True)
class Slot:
    """Stands for tensor argument number ``index`` in a call that DTensor has rewritten."""

    index: int


@dataclass(frozen=True)
class Propagation:
    """What DTensor decides, on one rank, for a call with given placements of its tensors.

    Parameters
    ----------
    inputs
        The placements to which DTensor redistributes each tensor argument before it runs the op.
    outputs
        The placements of each result, None for one that is no tensor; None if the op returns no DTensor.
    call
        ``(op, args)`` if DTensor runs another op or other arguments than it was given; else None. A :class:`Slot`
        stands for each tensor.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...] | None
    call: tuple[Callable[..., object], tuple[object, ...]] | None = None


@dataclass(frozen=True)
class RuleFailure:
    """How DTensor fails when it is asked for rules: it raises what is no refusal, or does not come back.

    Parameters
    ----------
    kind
        Type of the exception; empty if DTensor does not come back.
    message
        Its message.
    where
        The function that raised.
    """

    kind: str
    message: str
    where: str = ""


class ClaimReader:
    """Reads what DTensor claims for one call, without a process group or DTensors; nothing is run.

    It asks DTensor's sharding propagation, which turns rules into a decision however they were registered. Only the dry
    run of the op on fake tensors is left out, because the results are known.

    Parameters
    ----------
    op
        The overload that is called.
    args, kwargs
        The call, with global tensors.
    result
        What the call returns on the global tensors.

    Attributes
    ----------
    failures
        How DTensor failed where it was asked and did not refuse, by placements; the caller may clear it.
    written
        The arguments with which DTensor would run the op, with a :class:`Slot` for each tensor, by placements: where it
        redistributes, and the op's strategy has written to lists among the arguments that it was given.
    dim_names
        The names of the dims of the meshes for which DTensor is asked; none, unless the caller gives them.
    around
        Returns the context in which rules are asked on a mesh; an empty one, unless the caller gives another.
    watch
        Returns the context in which rules are asked for the first time of a call and a mesh; likewise.
    asks_everywhere
        Whether DTensor is also asked where a strategy that looks at no placements lists no rule.
    lost
        Whether DTensor is not asked any more, usually because it did not come back from a rule of this op. No other
        reader asks it then.
    why_lost
        The reason, for reports.
    """

    def __init__(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> None:
        self.op = op
        self._propagator = DTensor._op_dispatcher.sharding_propagator
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._leaves = leaves
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._metas = [_meta_of(leaves[i]) for i in self._slots]
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

    def at(
        self, combination: Combination, mesh_shape: tuple[int, ...], rank: int = 0, only_claims: bool = False
    ) -> Propagation | None:
        """Return what DTensor does at ``combination``; None if it has no rule for it or fails to apply one.

        With ``only_claims`` it may also be None where DTensor redistributes.
        """
        if self.lost or (only_claims and not self._may_claim(combination, mesh_shape)):
            return None
        mesh = _bare_mesh(mesh_shape, rank, self.dim_names)
        schema = self._schema([self._spec_of(mesh, *placed) for placed in enumerate(combination)])
        free = (
            free_rules_alone(self.op, lambda: self._is_written_to(schema)) if only_claims else contextlib.nullcontext()
        )
        # a strategy that lists its rules has been watched when it did
        watched = contextlib.nullcontext() if self.lists_rules else self.watch()
        try:
            with (
                self.around(mesh), watched, self._without_dry_run(schema), traced_once(self.op, self._call), free,
                ended_rules(_LONGEST),
            ):  # fmt: skip
                sharding = self._propagator.propagate_op_sharding_non_cached(schema)
        except RedistributesError:
            return None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - strategies refuse and fail in many ways; no exception is a claim
            self._note(combination, error)
            return None
        outputs = self._of_tensors(placements_of_spec(sharding.output_spec))
        changed = sharding.redistribute_schema if sharding.needs_redistribute else None
        inner = [leaf for leaf in pytree.tree_leaves(changed.args_schema if changed else ()) if _is_spec(leaf)]
        placed = [*(one for one in outputs or () if one is not None), *(tuple(spec.placements) for spec in inner)]
        if any(len(one) != mesh.ndim for one in placed):
            text = f"a rule has {min(map(len, placed))} placements for a mesh of {mesh.ndim} dims"
            self.failures[combination] = RuleFailure("ValueError", text)
            return None
        if strange := [p for one in placed for p in one if not isinstance(p, Placement)]:
            self.failures[combination] = RuleFailure("TypeError", f"a rule has {strange[0]!r} in place of a placement")
            return None
        ours = installed_sharded_op(self.op)
        if ours is not None:
            return self._by_kernel(ours, changed or schema, mesh, outputs)
        if changed is None:
            return Propagation(combination, outputs)
        wanted = [leaf for leaf in pytree.tree_leaves(changed.args_schema) if isinstance(leaf, DTensorSpec)]
        in_kwargs = combination[self._in_args :]  # DTensor never redistributes keyword arguments
        inputs = (*(tuple(spec.placements) for spec in wanted), *in_kwargs)
        if not sharding.use_val_from_redistribute_schema:
            if self._is_written_to(schema):
                self.written[combination] = _with_slots(changed.args_schema)
            return Propagation(inputs, outputs)
        return Propagation(inputs, outputs, (changed.op, _with_slots(changed.args_schema)))

    def of_fake_kernel(self) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Return the shapes and dtypes that DTensor gives to the results; None if it cannot tell any."""
        mesh = _bare_mesh((2,), 0)
        schema = self._schema([DTensorSpec(mesh, (Replicate(),), tensor_meta=meta) for meta in self._metas])
        try:
            with ended_rules(_LONGEST):
                made = self._propagator._propagate_tensor_meta_non_cached(schema)
        except (Exception, SystemExit):  # noqa: BLE001 - there may be no fake kernel, or one that needs values
            return None
        return [(tuple(one.shape), one.dtype) for one in pytree.tree_leaves(made, _is_meta) if _is_meta(one)]

    def _of_tensors(self, outputs: tuple[Placements | None, ...] | None) -> tuple[Placements | None, ...] | None:
        """Return ``outputs`` without what rules say of results that are no tensors."""
        metas = self._result_meta if isinstance(self._result_meta, list | tuple) else [self._result_meta]
        if outputs is None or len(metas) != len(outputs):
            return outputs
        return tuple(None if meta is None else one for one, meta in zip(outputs, metas, strict=True))

    def key(self, combination: Combination, mesh_shape: tuple[int, ...]) -> Hashable:
        """Return that by which DTensor's cache knows this call at ``combination``: equal keys share a decision."""
        mesh = _bare_mesh(mesh_shape, 0, self.dim_names)
        placed = zip(combination, self._metas, strict=True)
        return self._schema([DTensorSpec(mesh, placements, tensor_meta=meta) for placements, meta in placed])

    def _by_kernel(
        self, ours: ShardedOp, schema: OpSchema, mesh: DeviceMesh, outputs: tuple[Placements | None, ...] | None
    ) -> Propagation:
        specs = [leaf for leaf in pytree.tree_leaves(schema.args_schema) if isinstance(leaf, DTensorSpec)]
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        inputs = tuple(tuple(spec.placements) for spec in specs)
        return Propagation(inputs, outputs, (ours.at(mesh, coordinate, specs), _with_slots(schema.args_schema)))

    def listed(
        self, mesh_shape: tuple[int, ...], combinations: Sequence[tuple[Placement, ...]]
    ) -> list[tuple[Placement, ...]] | None:
        """Return the input placements, on one mesh dim, of the rules that the op's strategy lists.

        An op without a strategy is traced through its decomposition with each of ``combinations``. The result is None
        if the strategy decides by the placements that it is given; each combination then has to be tried.
        """
        if self.lost:
            return []
        if self.op in self._propagator.op_single_dim_strategy_funcs:
            return self._listed_per_element() if self._is_foreach() else self._listed_whole(mesh_shape)
        if not self.is_decomposed:
            return None
        whole: tuple[Placement, ...] = (Replicate(),) * len(self._metas)
        if not self._decomposes(whole):
            return [] if self.lost else [whole]  # it says why when it is asked
        return [combination for combination in combinations if self._decomposes(combination)]

    @property
    def is_decomposed(self) -> bool:
        """Whether DTensor traces the op's decomposition, as it has no strategy for the op itself."""
        registries = (
            self._propagator.op_single_dim_strategy_funcs, self._propagator.op_strategy_funcs,
            self._propagator.op_to_rules,
        )  # fmt: skip
        return not any(self.op in registry for registry in registries)

    @property
    def lists_rules(self) -> bool:
        """Whether the op's strategy lists its rules for one mesh dim, whatever placements it is given."""
        return self.op in self._propagator.op_single_dim_strategy_funcs

    def enumerated(self, mesh_shape: tuple[int, ...]) -> list[Combination]:
        """Return the input placements of the rules that the op's strategy enumerates for replicated arguments."""
        strategy = self._propagator.op_strategy_funcs.get(self.op)
        if strategy is None or self.lists_rules or self.lost:
            return []
        mesh = _bare_mesh(mesh_shape, 0, self.dim_names)
        whole: Placements = (Replicate(),) * len(mesh_shape)
        specs = [DTensorSpec(mesh, whole, tensor_meta=meta) for meta in self._metas]
        try:
            with self.around(mesh), self.watch(), ended_rules(_LONGEST):
                decided = strategy(self._propagator._wrap_with_op_strategy(self._schema(specs)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            self._note_lost(mesh_shape, error)
            return []
        rules = []
        for one in getattr(decided, "strategies", []):
            placed = [tuple(spec.placements) for spec in one.input_specs or () if isinstance(spec, DTensorSpec)]
            known = all(isinstance(placement, Placement) for placements in placed for placement in placements)
            if known and len(placed) == len(self._metas) and all(len(held) == mesh.ndim for held in placed):
                rules.append(tuple(placed))
        return rules

    def grows(self) -> bool:
        """Return whether the op's strategy lists more rules each time that it is asked about the same call.

        Such a strategy keeps a list, and takes longer at each call. An op is asked once.
        """
        if self.op not in counts_of_rules:
            counts_of_rules[self.op] = tuple(len(self.rules_now()) for _ in range(_ASKED_ALIKE))
        return all(few < many for few, many in itertools.pairwise(counts_of_rules[self.op]))

    def rules_now(self) -> list[ListedRule]:
        """Return the placements of inputs and results, on two ranks, of all rules that the op's strategy lists now.

        There are none if it fails, and none for a list of tensors of which DTensor asks for each element.
        """
        mesh = _bare_mesh((2,), 0)
        if self.lists_rules:
            skipped = self.lost or self._is_foreach()
            prepared = None if skipped else self._prepared(self._with_a_shard(mesh), mesh, self._result_meta)
            if prepared is None:
                return []
            return [
                (tuple((p,) for p in inputs if p is not None), tuple(None if p is None else (p,) for p in outputs))
                for rule in prepared.expanded_strategies
                for outputs, inputs in [(rule[: prepared.num_outputs], rule[prepared.num_outputs :])]
            ]
        strategy = self._propagator.op_strategy_funcs.get(self.op)
        if strategy is None or self.lost:
            return []
        schema = self._schema([DTensorSpec(mesh, (Replicate(),), tensor_meta=meta) for meta in self._metas])
        try:
            with self.around(mesh), ended_rules(_LONGEST):
                decided = strategy(self._propagator._wrap_with_op_strategy(schema))
                return _placed_by(getattr(decided, "strategies", ()))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in enumerated
            self._note_lost((2,), error)
            return []

    def _may_claim(self, combination: Combination, mesh_shape: tuple[int, ...]) -> bool:
        """Return whether DTensor may claim a rule at ``combination``; a strategy may list all rules that there are."""
        strategy = self._propagator.op_strategy_funcs.get(self.op)
        few = len(self._metas) < 2  # combinations: to ask at each takes no longer
        if self.asks_everywhere or self.lists_rules or strategy is None or few:
            return True
        key = mesh_shape, self.dim_names
        if key not in self._listings:
            self._listings[key] = self._listing(strategy, mesh_shape)
        listing = self._listings[key]
        return listing is None or combination in listing

    def _listing(
        self, strategy: Callable[[OpSchema], object], mesh_shape: tuple[int, ...]
    ) -> frozenset[Combination] | None:
        """Return all placements at which a strategy may claim a rule; None if it decides by those that it is given.

        It is asked twice, with replicated arguments and with others: it has to list the same rules each time. DTensor
        never redistributes keyword arguments, so that it may take a rule there that asks for others.
        """
        mesh = _bare_mesh(mesh_shape, 0, self.dim_names)
        whole: Combination = ((Replicate(),) * mesh.ndim,) * len(self._metas)
        found: list[ListedRule] = []
        before = ""
        for _ in range(2):
            given = max((inputs for inputs, _ in found), key=_count_of_cuts, default=whole)
            specs = [WatchedSpec(mesh, held, tensor_meta=meta) for held, meta in zip(given, self._metas, strict=True)]
            schema = self._schema(specs)
            try:
                with self.around(mesh), ended_rules(_LONGEST):
                    rules = rules_unread(strategy, self._propagator._wrap_with_op_strategy(schema))
                if not rules or self._is_written_to(schema):
                    return None
                found = _placed_by(rules)
                text = repr(found)  # each masked partial has a mask of its own, and is equal to itself alone
            except (Exception, SystemExit):  # noqa: BLE001 - it says how it fails when it is asked at a combination
                return None
            if text != (before or text) or not all(self._is_well_formed(inputs, mesh.ndim) for inputs, _ in found):
                return None
            before = text
        return frozenset(tuple(tuple(map(unmasked, held)) for held in inputs) for inputs, _ in found)

    def _is_well_formed(self, rule: Combination, mesh_ndim: int) -> bool:
        return len(rule) == len(self._metas) == self._in_args and all(
            len(held) == mesh_ndim and all(isinstance(placement, Placement) for placement in held) for held in rule
        )

    def _listed_whole(self, mesh_shape: tuple[int, ...]) -> list[tuple[Placement, ...]] | None:
        mesh = _bare_mesh(mesh_shape, 0, self.dim_names)
        return self._rules(self._with_a_shard(mesh), mesh, self._result_meta, len(self._metas))

    def _with_a_shard(self, mesh: DeviceMesh) -> OpSchema:
        """Return the call with the first tensor sharded: DTensor fills in a kind of shard that it sees in the call."""
        first = next((i for i, meta in enumerate(self._metas) if len(meta.shape)), None)
        specs = [
            DTensorSpec(mesh, (Shard(0) if i == first else Replicate(),) * mesh.ndim, tensor_meta=meta)
            for i, meta in enumerate(self._metas)
        ]
        return self._schema(specs)

    def _is_foreach(self) -> bool:
        return asked_per_element(self.op) and any(
            isinstance(arg, list | tuple) and any(isinstance(x, torch.Tensor) for x in arg) for arg in self._args()
        )

    def _args(self) -> tuple[object, ...]:
        args: tuple[object, ...] = pytree.tree_unflatten(self._leaves, self._spec)[0]
        return args

    def _listed_per_element(self) -> list[tuple[Placement, ...]] | None:
        """Return the rules that DTensor applies to each element of the lists, with one rule for all elements."""
        mesh = _bare_mesh((2,), 0)
        lengths: list[int] = []
        element: list[object] = []
        for arg in self._args():
            tensors = [x for x in arg if isinstance(x, torch.Tensor)] if isinstance(arg, list | tuple) else []
            if tensors or isinstance(arg, torch.Tensor):
                lengths.append(len(tensors) or 1)
                one = tensors[0] if tensors else arg
                assert isinstance(one, torch.Tensor)
                element.append(DTensorSpec(mesh, (Shard(0) if one.ndim else Replicate(),), tensor_meta=_meta_of(one)))
            else:
                element.append(arg)
        meta = self._result_meta[0] if isinstance(self._result_meta, list | tuple) and self._result_meta else None
        schema = OpSchema(_resolve_foreach_elementwise_overload(self.op) or self.op, tuple(element), {})
        rules = self._rules(schema, mesh, meta, len(lengths))
        if rules is None:
            return None
        return [tuple(p for p, n in zip(rule, lengths, strict=True) for _ in range(n)) for rule in rules]

    def _rules(
        self, schema: OpSchema, mesh: DeviceMesh, result_meta: Any, inputs: int
    ) -> list[tuple[Placement, ...]] | None:
        prepared = self._prepared(schema, mesh, result_meta)
        if prepared is None:
            return None
        rules = [rule[prepared.num_outputs :] for rule in prepared.expanded_strategies]
        complete = [tuple(p for p in rule if p is not None) for rule in rules]
        return [rule for rule in complete if len(rule) == inputs]

    def _prepared(self, schema: OpSchema, mesh: DeviceMesh, result_meta: Any) -> _PreparedSingleDimStrategy | None:
        info = self._propagator.op_single_dim_strategy_funcs[self.op]
        try:
            with self.around(mesh), self.watch(), ended_rules(_LONGEST):
                wrapped = self._propagator._wrap_with_op_strategy(schema)
                return _PreparedSingleDimStrategy(info, wrapped, result_meta)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            self._note_lost(mesh.shape, error)
            return None

    def _decomposes(self, combination: Sequence[Placement]) -> bool:
        """Return whether DTensor can carry ``combination`` through the op's decomposition."""
        strategy = self._propagator.decomp_strategy
        mesh = _bare_mesh((2,), 0)
        schema = self._schema([
            DTensorSpec(mesh, (placement,), tensor_meta=meta)
            for placement, meta in zip(combination, self._metas, strict=True)
        ])  # fmt: skip
        slots = dict(zip(self._slots, combination, strict=True))
        placements: Any = tuple(slots.get(i) for i in range(len(self._leaves)))
        try:
            strategy.ensure_schema_info(self.op)
            with traced_once(self.op, self._call), free_rules_alone(self.op), ended_rules(_LONGEST):
                strategy._propagate_through_decomp(schema, placements, strategy._get_fake_mesh("cpu"))
        except (EndlessRuleError, SlowRulesError) as error:
            self._note(tuple((placement,) for placement in combination), error)
            return False
        except (Exception, SystemExit):  # noqa: BLE001 - as above
            return False
        return True

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


def _placed_by(rules: Iterable[OpSpec]) -> list[ListedRule]:
    return [
        (tuple(tuple(spec.placements) for spec in rule.input_specs or ()), placements_of_spec(rule.output_specs) or ())
        for rule in rules
    ]


def _count_of_cuts(rule: Combination) -> int:
    return sum(placement != Replicate() for held in rule for placement in held)


def _with_slots(args: Sequence[object]) -> tuple[object, ...]:
    numbers = itertools.count()
    filled = pytree.tree_map_only(DTensorSpec, lambda _: Slot(next(numbers)), tuple(args))
    return tuple(filled)


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, TensorMeta)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, DTensorSpec)


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _result_meta(result: object) -> Any:
    if isinstance(result, torch.Tensor):
        return _meta_of(result)
    if isinstance(result, list | tuple):
        metas = [_meta_of(item) if isinstance(item, torch.Tensor) else None for item in result]
        return tuple(metas) if isinstance(result, tuple) else metas
    return None


@functools.cache
def _bare_mesh(shape: tuple[int, ...], rank: int, names: tuple[str, ...] = ()) -> DeviceMesh:
    """Return a mesh as ``rank`` sees it, with a shape but no process groups."""
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names or None, _init_backend=False, _rank=rank)
