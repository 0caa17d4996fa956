"""Which products of rules are wrong because a rule in them is."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from verifier.core.placement_text import split_placements
from verifier.core.verdict import VerdictKind
from verifier.records.values import load_trial
from verifier.rules.results import Rule, WrongRule

__all__ = ["Refutations", "Refuted"]


@dataclass(frozen=True)
class Refuted:
    """A rule that real processes have refuted, its placements by mesh dim, and the finding that it belongs to."""

    rule: Rule
    columns: Counter[tuple[str, ...]]
    mesh_dims: int
    name: str


@dataclass
class Refutations:
    """The rules that real processes have refuted and nothing known explains, by op and verdict."""

    _rules: dict[tuple[str, VerdictKind], list[Refuted]] = field(default_factory=lambda: defaultdict(list))

    def add(self, wrong: WrongRule, mesh_dims: int, name: str) -> None:
        """Take in that ranks have shown ``wrong``, if it is the claim itself that is wrong."""
        if _is_plain(wrong):
            self._rules[wrong.rule.op, wrong.verdict].append(Refuted(wrong.rule, _columns(wrong), mesh_dims, name))

    def implying(self, wrong: WrongRule) -> Refuted | None:
        """Return the rule of fewer mesh dims that makes a product wrong; None if no such rule has been refuted."""
        if not _is_plain(wrong):
            return None
        dims, columns = load_trial(wrong.trial).mesh.ndim, _columns(wrong)
        for one in self._rules[wrong.rule.op, wrong.verdict]:
            if one.mesh_dims < dims and one.columns and one.columns <= columns:
                return one
        return None


def _is_plain(wrong: WrongRule) -> bool:
    """Return whether it is the claim itself that is wrong, for ordinary values and without any call before."""
    return not (wrong.fails or wrong.special or wrong.left_out or wrong.writes)


def _columns(wrong: WrongRule) -> Counter[tuple[str, ...]]:
    """Return for each mesh dim on which not everything is replicated the placements of all tensors there.

    What has no placement for each mesh dim, such as the None of an optional result, is the same on all of them.
    """
    dims = load_trial(wrong.trial).mesh.ndim
    rows = [split_placements(text) for text in (*wrong.rule.inputs, *wrong.rule.outputs)]
    columns = zip(*(row if len(row) == dims else (str(row),) * dims for row in rows), strict=True)
    return Counter(column for column in columns if set(column) != {"R"})
