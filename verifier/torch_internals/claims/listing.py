"""The rules that a strategy lists, whatever placements it is given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec
from torch.distributed.tensor._ops.single_dim_strategy import (
    _PreparedSingleDimStrategy,
    _resolve_foreach_elementwise_overload,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from verifier.torch_internals.caches import counts_of_rules, traced_once
from verifier.torch_internals.claims.asked_call import MOST_TICKS, AskedCall, bare_mesh, meta_of
from verifier.torch_internals.claims.values import ListedRule
from verifier.torch_internals.expanding.free_rules import free_rules_alone
from verifier.torch_internals.expanding.placements_read import WatchedSpec, rules_unread
from verifier.torch_internals.placements import Combination, Placements, placements_of_spec, unmasked
from verifier.torch_internals.registries import asked_per_element
from verifier.torch_internals.watching import EndlessRuleError, SlowRulesError, ended_rules

__all__ = ["Listing"]

_ASKED_ALIKE = 3
"""How often a strategy is asked about the same call to see whether it lists more rules each time."""


class Listing(AskedCall):
    """A call, and what the op's strategy lists for it."""

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
        mesh = bare_mesh(mesh_shape, 0, self.dim_names)
        whole: Placements = (Replicate(),) * len(mesh_shape)
        specs = [DTensorSpec(mesh, whole, tensor_meta=meta) for meta in self._metas]
        try:
            with self.around(mesh), self.watch(), ended_rules(MOST_TICKS):
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
        mesh = bare_mesh((2,), 0)
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
            with self.around(mesh), ended_rules(MOST_TICKS):
                decided = strategy(self._propagator._wrap_with_op_strategy(schema))
                return _placed_by(getattr(decided, "strategies", ()))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in enumerated
            self._note_lost((2,), error)
            return []

    def _may_claim(self, combination: Combination, mesh_shape: tuple[int, ...]) -> bool:
        """Return whether DTensor may claim a rule at ``combination``; a strategy may list all rules that there are."""
        few = len(self._metas) < 2  # combinations: to ask at each takes no longer
        if self.asks_everywhere or few:
            return True
        listing = self._listing(mesh_shape)
        return listing is None or combination in listing

    def reads_no_placements(self, mesh_shape: tuple[int, ...]) -> bool:
        """Return whether the op's strategy, which is run for that, lists the same rules whatever it is given."""
        return self.lists_rules or self._listing(mesh_shape) is not None

    def _listing(self, mesh_shape: tuple[int, ...]) -> frozenset[Combination] | None:
        """Return all placements at which the op's strategy may claim a rule; None if that depends on those it is given.

        It is also None for an op without a strategy for all mesh dims.
        """
        strategy = self._propagator.op_strategy_funcs.get(self.op)
        if strategy is None or self.lists_rules or self.lost:
            return None
        key = mesh_shape, self.dim_names
        if key not in self._listings:
            self._listings[key] = self._listing_of(strategy, mesh_shape)
        return self._listings[key]

    def _listing_of(
        self, strategy: Callable[[OpSchema], object], mesh_shape: tuple[int, ...]
    ) -> frozenset[Combination] | None:
        """Ask a strategy twice, with replicated arguments and with others: it has to list the same rules each time.

        DTensor never redistributes keyword arguments, so that it may take a rule there that asks for others.
        """
        mesh = bare_mesh(mesh_shape, 0, self.dim_names)
        whole: Combination = ((Replicate(),) * mesh.ndim,) * len(self._metas)
        found: list[ListedRule] = []
        before = ""
        for _ in range(2):
            given = max((inputs for inputs, _ in found), key=_count_of_cuts, default=whole)
            specs = [WatchedSpec(mesh, held, tensor_meta=meta) for held, meta in zip(given, self._metas, strict=True)]
            schema = self._schema(specs)
            try:
                with self.around(mesh), self.watch(), ended_rules(MOST_TICKS):
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
        mesh = bare_mesh(mesh_shape, 0, self.dim_names)
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
        mesh = bare_mesh((2,), 0)
        lengths: list[int] = []
        element: list[object] = []
        for arg in self._args():
            tensors = [x for x in arg if isinstance(x, torch.Tensor)] if isinstance(arg, list | tuple) else []
            if tensors or isinstance(arg, torch.Tensor):
                lengths.append(len(tensors) or 1)
                one = tensors[0] if tensors else arg
                assert isinstance(one, torch.Tensor)
                element.append(DTensorSpec(mesh, (Shard(0) if one.ndim else Replicate(),), tensor_meta=meta_of(one)))
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
            with self.around(mesh), self.watch(), ended_rules(MOST_TICKS):
                wrapped = self._propagator._wrap_with_op_strategy(schema)
                return _PreparedSingleDimStrategy(info, wrapped, result_meta)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            self._note_lost(mesh.shape, error)
            return None

    def _decomposes(self, combination: Sequence[Placement]) -> bool:
        """Return whether DTensor can carry ``combination`` through the op's decomposition."""
        strategy = self._propagator.decomp_strategy
        mesh = bare_mesh((2,), 0)
        schema = self._schema([
            DTensorSpec(mesh, (placement,), tensor_meta=meta)
            for placement, meta in zip(combination, self._metas, strict=True)
        ])  # fmt: skip
        slots = dict(zip(self._slots, combination, strict=True))
        placements: Any = tuple(slots.get(i) for i in range(len(self._leaves)))
        try:
            strategy.ensure_schema_info(self.op)
            with traced_once(self.op, self._call), free_rules_alone(self.op), ended_rules(MOST_TICKS):
                strategy._propagate_through_decomp(schema, placements, strategy._get_fake_mesh("cpu"))
        except (EndlessRuleError, SlowRulesError) as error:
            self._note(tuple((placement,) for placement in combination), error)
            return False
        except (Exception, SystemExit):  # noqa: BLE001 - as above
            return False
        return True


def _placed_by(rules: Iterable[OpSpec]) -> list[ListedRule]:
    return [
        (tuple(tuple(spec.placements) for spec in rule.input_specs or ()), placements_of_spec(rule.output_specs) or ())
        for rule in rules
    ]


def _count_of_cuts(rule: Combination) -> int:
    return sum(placement != Replicate() for held in rule for placement in held)
