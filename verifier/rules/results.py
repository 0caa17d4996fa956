"""What level 1 says of an op, as data: rules confirmed, wrong and missing, each with its evidence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from verifier.core.verdict import VerdictKind
from verifier.records.schema import MissingRuleRecord, TrialRecord
from verifier.torch_internals.rule_code.reach import Block

__all__ = ["Rule", "SampleReport", "WrongRule"]


@dataclass(frozen=True, order=True)
class Rule:
    """One claim about an op: these input placements give these output placements, all as text, in argument order.

    Where DTensor fails instead of claiming anything, there are no ``outputs``.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op}: {', '.join(self.inputs)} -> {', '.join(self.outputs)}"


@dataclass(frozen=True)
class WrongRule:
    """A claim that a draw refutes.

    Parameters
    ----------
    rule, mesh
        What is claimed, and on which mesh it was tried.
    shapes, arguments
        The global shapes of the tensor arguments, and the other arguments as text.
    verdict, message
        How the local results differ from what the output placements promise.
    trial
        The counterexample by value, to be run on real processes.
    elements
        Number of elements of all tensor arguments: of two counterexamples the smaller one is kept.
    """

    rule: Rule
    mesh: str
    shapes: tuple[tuple[int, ...], ...]
    arguments: str
    origin: str
    verdict: VerdictKind
    message: str
    trial: TrialRecord
    elements: int
    read: int
    """How many of the inputs the op reads; the rest it writes to."""
    draws: int = 1
    """In how many draws it failed."""
    raised: str = ""
    """The type of the exception, if the local op raised one."""
    special: bool = False
    """Whether only special values refute the claim."""
    left_out: str = ""
    """The argument that the key of DTensor's cache leaves out, if the verdict is STALE_CACHE."""
    fails: bool = False
    """Whether DTensor fails when it is asked for rules, instead of claiming one."""
    writes: bool = False
    """Whether the strategy writes to the arguments of the call, so that DTensor runs the op with others."""
    others: tuple[WrongRule, ...] = ()
    """Counterexamples from other calls, smallest first, for the case that real processes do not show this one."""
    controls: tuple[TrialRecord, ...] = ()
    """Trials that have to pass if the cache is to be blamed: each of the two calls, made twice."""


@dataclass
class SampleReport:
    """What came of checking one sample, on all meshes and at all sizes.

    Parameters
    ----------
    call
        The call at the smallest size, as text.
    combinations
        Pairs of input placements and one output's placement that have a verdict.
    runs
        Input combinations that were run, over all draws.
    missing
        Rules that held in every draw and that DTensor does not claim.
    stale
        Decisions that DTensor's cache hands to a second call, which has another; see :mod:`verifier.rules.stale`.
    special
        Claims that hold on ordinary values, and not on infinities, NaN, -0.0 and values at a threshold.
    untested
        How many combinations have no verdict, by reason.
    reached, unreached
        The code of a rule of the user's that DTensor has run for this sample or for others before it in the same
        process, and the rest of it.
    short
        Whether a tensor has a dim with fewer elements than ranks on every mesh of one dim and at every size.
    """

    op: str
    origin: str
    call: str = ""
    short: bool = False
    combinations: int = 0
    runs: int = 0
    confirmed: set[Rule] = field(default_factory=set)
    wrong: list[WrongRule] = field(default_factory=list)
    missing: dict[Rule, MissingRuleRecord] = field(default_factory=dict)
    special: list[WrongRule] = field(default_factory=list)
    stale: list[WrongRule] = field(default_factory=list)
    inconclusive: set[Rule] = field(default_factory=set)
    untested: Counter[str] = field(default_factory=Counter)
    died: list[str] = field(default_factory=list)
    """Combinations that ended the process, as text."""
    not_testable: str = ""
    reached: frozenset[Block] = frozenset()
    unreached: frozenset[Block] = frozenset()
    seconds: float = 0.0
