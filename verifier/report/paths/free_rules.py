"""Rules without communication that a rule check found missing, for the redistributions that they would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verifier.records.schema import MissingRuleRecord, PathRecord, RulesRecord

__all__ = ["MissingRules"]

_SMALL = " small"
"""What a run says of a shard that is empty on some ranks; whether a rule holds does not depend on it."""


@dataclass(frozen=True)
class MissingRules:
    """Missing rules by the op, the placements of its tensor arguments, and the call without the sizes of its tensors.

    A rule that is missing in calls along one dim may be wrong along another. So it counts for calls alone that differ
    from one that level 1 tried in the sizes of tensors, and not for all calls with the same placements.
    """

    rules: Mapping[tuple[str, str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, checked: RulesRecord | None) -> MissingRules:
        """Return the rules that ``checked`` found missing where DTensor communicates; none without a rule check."""
        found = {}
        for missing in () if checked is None else (rule for op in checked.ops.values() for rule in op.missing):
            for call in missing.calls if missing.saves else ():
                found[missing.op, "; ".join(missing.input_placements), call] = _text(missing)
        return cls(found)

    def at(self, record: PathRecord) -> str:
        """Return the rule that would save a redistribution; empty if there is none."""
        return self.rules.get((record.op, record.given.replace(_SMALL, ""), record.call), "") if record.given else ""


def _text(rule: MissingRuleRecord) -> str:
    return f"{', '.join(rule.input_placements)} -> {', '.join(rule.output_placements)}"
