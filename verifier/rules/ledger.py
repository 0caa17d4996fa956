"""What is known of a sample so far, over all meshes, sizes and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_

from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import OpCase
from verifier.rules.execute import LocalCall, Results
from verifier.rules.options import CheckOptions, Position
from verifier.rules.results import Rule, SampleReport, WrongRule
from verifier.rules.samples import Sample, Values
from verifier.torch_internals.placements import Combination
from verifier.torch_internals.rule_code.reach import Watch

__all__ = ["Candidate", "Ledger"]

MOST_DEATHS = 4
"""After so many combinations of a sample that ended the process, no more are tried but those that DTensor claims."""


@dataclass
class Candidate:
    """What is known of one combination of inputs so far, over all meshes, sizes and draws.

    ``masks`` has for each result the placements that every draw has allowed.
    """

    masks: list[int]
    draws: int = 0
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    world_sizes: set[int] = field(default_factory=set)
    claimed: bool = False

    def keep(self, masks: Sequence[int], alike: bool = False) -> None:
        """Note what another call has allowed; it may have another number of results if all are placed ``alike``."""
        if len(self.masks) == len(masks):
            self.masks = [a & b for a, b in zip(self.masks, masks, strict=True)]
        elif alike and self.masks and masks:
            common = reduce(and_, (*self.masks, *masks))
            self.masks = [common] * len(self.masks) if common else []
        else:  # refuted before, or an op whose number of results depends on the size
            self.masks = []


class Ledger:
    """Keeps what the places find out about one sample, and fills in its report.

    Parameters
    ----------
    number
        Of the sample among those of its op.
    enter
        Told of each combination before it is run.
    skip
        Combinations that have ended the process before.
    report
        Counts and reasons go in as they come, rules with :meth:`settle`.
    watch
        Notes which code of the rule is reached; None if it is not the user's.

    Attributes
    ----------
    alike_only
        Whether, because others end the process, tensors that are sharded are all sharded by the same dim.
    careful
        Whether a call is made only if the op takes tensors of such shapes on ``meta``: its kernel may not look.
    held, constant, vacuous, unclear
        Claims that a draw bore out; that draws did whose results are the same everywhere, or empty; that rounding may
        have failed.
    first_shapes
        The shapes of the tensors where the sample was first run.
    traced
        Where the op may be claimed, as its decomposition was traced where the sample was first run; None without one.
    told
        Whether any draw had results that say something.
    failed, special
        Claims that a draw refuted, by rule and number of mesh dims; claims that only special values refuted.
    products
        Rules that held on one mesh dim: output placements by input placements.
    missing_products
        Products of them that hold and that DTensor does not claim: the placements, those to which DTensor
        redistributes, or None if it refuses, and the number of draws.
    """

    def __init__(
        self,
        sample: Sample,
        options: CheckOptions,
        number: int,
        enter: Callable[[Position], None],
        skip: frozenset[Position],
        report: SampleReport,
        watch: Watch | None = None,
    ) -> None:
        self.sample, self.options, self.number = sample, options, number
        unsafe = "" if options.blank else sample.claims_only
        self.careful = options.blank and bool(skip or sample.claims_only)
        if not unsafe and len({position[3] for position in skip if position[0] == number}) >= MOST_DEATHS:
            unsafe = f"it ended the process {MOST_DEATHS} times: only what DTensor claims is tried"
        self.alike_only = options.blank and bool(unsafe)
        if unsafe and not options.claims_only and not options.blank:
            self.options = replace(options, claims_only=True)
            report.untested[unsafe] += 1
        self.enter, self.report, self.watch = enter, report, watch
        ndims = {mesh_number: mesh.ndim for mesh_number, mesh in enumerate((*options.meshes, *options.beyond))}
        self._fatal = {(where, ndims[mesh], number) for where, mesh, _, number in skip}
        self._ndims = ndims
        self.candidates: dict[Combination, Candidate] = {}
        self.held: set[Rule] = set()
        self.constant: set[Rule] = set()
        self.vacuous: set[Rule] = set()
        self.first_shapes: tuple[tuple[int, ...], ...] = ()
        self.traced: list[Combination] | None = None
        self.told = False
        self.failed: dict[tuple[Rule, int], WrongRule] = {}
        self.unclear: set[Rule] = set()
        self.special: dict[Rule, WrongRule] = {}
        self.products: dict[tuple[Placement, ...], tuple[Placement, ...]] = {}
        # what is drawn and made of whole tensors is so for all meshes
        self._drawn: dict[tuple[int, int, Values], OpCase | None] = {}
        self._made: dict[int, tuple[OpCase, LocalCall, Results]] = {}
        self.missing_products: dict[Rule, tuple[Combination, Combination | None, int]] = {}

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        """Return the call of the sample at a size, with the values of a draw: the same one on each mesh."""
        key = size, draw, values
        if key not in self._drawn:
            self._drawn[key] = self.sample.draw(size, draw, values)
        return self._drawn[key]

    def run(self, case: OpCase) -> tuple[LocalCall, Results]:
        """Return the call of a case, and what it makes of the whole tensors.

        Raises
        ------
        RuntimeError, ValueError, IndexError, TypeError
            What the call raises; see ``CALL_ERRORS``.
        """
        known = self._made.get(id(case))
        if known is None or known[0] is not case:
            call = LocalCall(case)
            if self.options.blank:
                call.place_buffers()
            known = self._made[id(case)] = case, call, call(call.tensors)
        return known[1:]

    def is_fatal(self, position: Position) -> bool:
        """Return whether this combination has ended the process before, at whatever size and on however many ranks.

        What corrupts memory at one size does so at others: to find each of them out would cost a process each.
        """
        sample, mesh, _, combination = position
        return (sample, self._ndims[mesh], combination) in self._fatal

    def note(self, wrong: WrongRule, mesh_ndim: int) -> None:
        """Note a claim that a draw has refuted; of several counterexamples the smallest is kept."""
        key = wrong.rule, mesh_ndim
        known = self.failed.get(key)
        if known is None:
            self.failed[key] = wrong
        else:
            best = min(known, wrong, key=lambda one: one.elements)
            self.failed[key] = replace(best, draws=known.draws + 1)

    def hangs(self, rule: Rule) -> bool:
        """Return whether ranks have waited in vain for each other under ``rule``, which costs seconds each time."""
        known = self.failed.get((rule, 1))
        return known is not None and known.raised == TimeoutError.__name__

    @property
    def judged(self) -> set[Rule]:
        """The claims about which a draw on a mesh of one dim has said something."""
        return self.held | self.constant | self.unclear | {rule for rule, ndim in self.failed if ndim == 1}

    def has_failed(self, rule: Rule) -> bool:
        """Return whether a draw has refuted ``rule`` on a mesh of one dim."""
        return (rule, 1) in self.failed

    def settle(self) -> None:
        """Write into the report which claims are confirmed, wrong, inconclusive, or not true of special values."""
        report = self.report
        wrong = {rule for rule, _ in self.failed}
        report.wrong = [self.failed[key] for key in sorted(self.failed, key=lambda key: (key[0], key[1]))]
        # an op that makes the same of everything, as zeros_like does, has nothing but shapes to agree on
        held = self.held if self.told else self.held | self.constant
        report.confirmed = held - wrong - self.unclear
        report.inconclusive = (self.constant | self.vacuous | self.unclear) - wrong - report.confirmed
        report.special = [self.special[rule] for rule in sorted(self.special) if rule not in wrong]
