"""What is learned of an op: its calls, and the rules that explain what holds for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verifier.deriving.learning.evidence import CallEvidence
from verifier.deriving.learning.generalise import Derivation, DerivedRule, generalise, placements_of
from verifier.torch_internals.names import OpOverload

__all__ = ["Learned"]


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
