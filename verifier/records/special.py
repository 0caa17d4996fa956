"""How a finding counts: whether it is new, known, or shown by special values alone, such as infinities and NaN."""

from __future__ import annotations

import re
from enum import Enum

from verifier.core.verdict import VerdictKind
from verifier.records.schema import FindingRecord, RunHeader

__all__ = ["Standing", "concerns_own_rules", "is_aside", "standing_of"]

_OF_SPECIAL_VALUES = re.compile(r"aten\.(nan|is(nan|inf|posinf|neginf|finite)\b)")
"""Ops which exist for infinities and NaN."""


class Standing(Enum):
    """How a finding counts, in the order in which reports show findings."""

    NEW = "new"
    ASIDE = "not known, but shown by special values alone"
    KNOWN = "known"


def standing_of(finding: FindingRecord, header: RunHeader) -> Standing:
    """Return how a finding of the run with ``header`` counts."""
    if finding.known:
        return Standing.KNOWN
    return Standing.ASIDE if is_aside(finding, header) else Standing.NEW


def concerns_own_rules(finding: FindingRecord, header: RunHeader) -> bool:
    """Return whether a finding is about rules that the run's imports have registered."""
    own = finding.op in header.own_rules or finding.rule.partition(":")[0] in header.own_rules
    return own and bool(header.imports)


def is_aside(finding: FindingRecord, header: RunHeader) -> bool:
    """Return whether special values alone show a finding, and users may do without them.

    They may not if the op exists for such values and its rule is their own.
    """
    special = finding.verdict == VerdictKind.SPECIAL_VALUE
    return special and not (concerns_own_rules(finding, header) and _OF_SPECIAL_VALUES.match(finding.op))
