"""What is learned of an op: its calls, and the rules that explain what holds for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.deriving.learning.evidence import CallEvidence
from verifier.deriving.learning.generalise import (
    Derivation,
    DerivedRule,
    Part,
    generalise,
    placements_of,
    points_of,
)
from verifier.deriving.learning.language import Dim, Scope, dims_of_inputs
from verifier.torch_internals.names import OpOverload

__all__ = ["GradientPlacements", "Learned", "parts_text"]


def parts_text(parts: Sequence[Part]) -> list[str]:
    """Return placements as text; of shards with the dim as code."""
    return [f"S({part.text})" if isinstance(part, Dim) else str(part) for part in parts]


@dataclass(frozen=True)
class GradientPlacements:
    """How the gradients of the slots are placed under a rule, for such placements and cotangents of its results."""

    rule: DerivedRule
    outputs: tuple[Part, ...]
    cotangents: tuple[Part, ...]
    gradients: Mapping[str, Part]


@dataclass(frozen=True)
class Learned:
    """An op, its calls, and the rules that explain what holds for them."""

    op: OpOverload
    calls: Sequence[CallEvidence]
    made: Derivation

    def refuted_by(self, more: Sequence[CallEvidence]) -> Learned:
        """Return the op with rules that more of its calls do not refute."""
        mine = [call for call in more if call.case.op == str(self.op)]
        calls = [*self.calls, *mine]
        return replace(self, calls=calls, made=generalise(calls, self.made.blocks)) if mine else self

    def gradients(self, cotangent: Placement) -> list[GradientPlacements]:
        """Return how gradients are placed under each rule that asks for no blocks, where one placement fits all calls.

        The cotangent of a result is placed as the result is where that is sharded, and as ``cotangent`` elsewhere.
        """
        calls = [call for call in self.calls if call.differentiable and not call.rare]
        found = []
        for rule in self.made.rules:
            outputs = rule.outputs[: len(rule.outputs) - len(rule.gradients)]
            if rule.cut is not None or (not cotangent.is_replicate() and all(isinstance(p, Dim) for p in outputs)):
                continue
            cotangents = tuple(part if isinstance(part, Dim) else cotangent for part in outputs)
            if gradients := _gradients_under(rule, calls, cotangent):
                found.append(GradientPlacements(rule, outputs, cotangents, gradients))
        return found

    def without(self, dropped: Sequence[DerivedRule]) -> Learned:
        """Return the op without some of its rules that ask for blocks; what they explain is not explained then."""
        made = self.made
        rules = tuple(rule for rule in made.rules if rule not in dropped)
        explained = {
            (id(call), inputs): (call, inputs)
            for rule in dropped
            for call in self.calls
            for inputs, _ in placements_of(rule, call)
            if inputs in made.blocks.get(id(call), {})
        }
        unexplained = (*made.unexplained, *explained.values())
        return replace(self, made=Derivation(rules, unexplained, made.explained - len(explained), made.blocks))


def _gradients_under(rule: DerivedRule, calls: Sequence[CallEvidence], cotangent: Placement) -> dict[str, Part]:
    """Return by slot how its gradient is placed at each point of a rule; nothing if at one it is not placed at all."""
    calls = [call for call in calls if call.slots == rule.slots]
    points: list[tuple[Scope, Mapping[str, frozenset[Placement]]]] = []
    for call in calls:
        for scope, inputs, _ in points_of(rule, call):
            if not call.rules.get(inputs):
                continue  # not tried
            known = call.differentiated.get(cotangent, {}).get(inputs)
            if known is None:
                return {}
            names = call.differentiable
            points.append((scope, dict(zip(names, known[len(known) - len(names) :], strict=True))))
    found: dict[str, Part] = {}
    for slot, name in enumerate(rule.slots):
        here = [(scope, of_slots[name]) for scope, of_slots in points if name in of_slots]
        for part in _parts(rule, calls, slot) if here else ():
            if all(_placed(part, scope) in some for scope, some in here):
                found[name] = part
                break
    return found


def _parts(rule: DerivedRule, calls: Sequence[CallEvidence], slot: int) -> Iterator[Part]:
    """Yield what the gradient of a slot may be, in the order in which it is preferred."""
    yield Replicate()
    if isinstance(rule.inputs[slot], Dim):
        yield rule.inputs[slot]
    if rule.pivot is not None:
        yield from dims_of_inputs(calls, rule.pivot, slot)
    yield from (Partial(reduction) for reduction in ("sum", "avg"))


def _placed(part: Part, scope: Scope) -> Placement | None:
    if isinstance(part, Placement):
        return part
    dim = part.value(scope)
    return None if dim is None else Shard(dim)
