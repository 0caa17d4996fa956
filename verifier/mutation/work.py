"""What a worker does: note which lines samples reach, and hold what mutants decide against what is decided without."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from verifier.core.verdict import VerdictKind
from verifier.mutation.mutants import KEY, Mutant, installed
from verifier.rules.campaign.work import samples_of
from verifier.rules.campaign.worker_process import InFlight, Position
from verifier.rules.check import places_of
from verifier.rules.ledger import Ledger
from verifier.rules.options import CheckOptions
from verifier.rules.results import Rule, SampleReport, WrongRule
from verifier.rules.sample_on_mesh import SampleOnMesh
from verifier.rules.samples import Sample, SampleOptions, Target
from verifier.rules.stale import stale_decisions
from verifier.torch_internals.amending.mutating import NotInstallableError

__all__ = ["Reached", "Reaching", "Tried", "Trying", "reach", "try_mutants"]

_REACHED_AT = 32
"""Combinations at which a sample is asked which lines it reaches."""
_PLACES = 4
"""Meshes and sizes of a sample at which mutants are asked, at most."""

Lines = frozenset[int]


@dataclass(frozen=True)
class Reaching:
    """One target whose samples are drawn, to see which lines of ``files`` they reach."""

    target: Target
    samples: SampleOptions
    check: CheckOptions
    files: tuple[str, ...]


@dataclass(frozen=True)
class Reached:
    """The lines that decisions about one sample execute, by the number of the file."""

    sample: int
    op: str
    lines: Mapping[int, Lines]


@dataclass(frozen=True)
class Trying:
    """Mutants, each with the samples that may tell it: pairs of a target and a number among its samples.

    Parameters
    ----------
    at_first
        After so many samples a mutant that only loses rules is asked no more.
    """

    mutants: tuple[Mutant, ...]
    at_first: int
    asked: tuple[tuple[tuple[Target, int], ...], ...]
    samples: SampleOptions
    check: CheckOptions


@dataclass
class Tried:
    """What came of one mutant.

    Parameters
    ----------
    wrong
        The first wrong rule that the mutant claims and the original does not, as text; empty if there is none.
    verdict
        Its verdict, or DIED if the mutant ended the process.
    more, fewer
        How many rules differ, over all samples: claimed by the mutant alone, and by the original alone.
    unsure
        How many rules of the mutant alone no draw could refute or bear out, or special values alone refute.
    examples
        One rule that the mutant alone claims, and one that the original alone claims.
    samples
        How many samples were asked.
    not_installable
        Why the mutant is no program; empty if it is.
    """

    wrong: str = ""
    verdict: str = ""
    more: int = 0
    fewer: int = 0
    unsure: int = 0
    examples: list[str] = field(default_factory=list)
    samples: int = 0
    not_installable: str = ""


# --------------------------------------------------------------------------------------------------------------- reach
def reach(item: Reaching, in_flight: InFlight, skip: frozenset[Position], resume_at: int, /) -> Iterator[Reached]:
    """Yield the lines that each sample of the target reaches while DTensor decides about it, at its first size."""
    numbers = {file: number for number, file in enumerate(item.files)}
    options = replace(item.check, sizes=1, cap=_REACHED_AT)
    done = 0
    with _quiet():
        for number, sample in enumerate(samples_of(item.target, item.samples)):
            in_flight.enter((number, 0, 0, 0))
            if sample.not_testable or (number, 0, 0, 0) in skip:
                continue
            done += 1
            if done <= resume_at:
                continue
            found: dict[int, set[int]] = {}
            for place in places_of(_ledger(sample, options, number), 1):
                with _traced(numbers, found):
                    place.read()
            yield Reached(number, sample.op, {file: frozenset(lines) for file, lines in found.items()})
            in_flight.leave()


@contextlib.contextmanager
def _traced(numbers: Mapping[str, int], found: dict[int, set[int]]) -> Iterator[None]:
    """Note in ``found`` the lines that are executed inside the block in the files of ``numbers``."""
    tracers: dict[str, Callable[..., Any] | None] = {}

    def tracer(file: str) -> Callable[..., Any] | None:
        number = numbers.get(os.path.realpath(file))
        if number is None:
            return None
        add = found.setdefault(number, set()).add

        def trace_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            add(frame.f_lineno)
            return trace_line

        return trace_line

    def trace_call(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if file not in tracers:
            tracers[file] = tracer(file)
        return tracers[file]

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield
    finally:
        sys.settrace(before)


# ----------------------------------------------------------------------------------------------------------------- try
def try_mutants(item: Trying, in_flight: InFlight, skip: frozenset[Position], resume_at: int, /) -> Iterator[Tried]:
    """Yield what comes of each mutant; one that ended the process before is caught by that."""
    with _quiet():
        for number, (mutant, asked) in enumerate(zip(item.mutants, item.asked, strict=True)):
            in_flight.leave()
            if number < resume_at:
                continue
            yield _Trial(mutant, number, in_flight, skip).run(item, asked)


class _Trial:
    def __init__(self, mutant: Mutant, number: int, in_flight: InFlight, skip: frozenset[Position]) -> None:
        self.mutant, self.number, self.in_flight, self.skip = mutant, number, in_flight, skip
        self.tried = Tried()

    def run(self, item: Trying, asked: Sequence[tuple[Target, int]]) -> Tried:
        """Ask sample after sample, until one tells that the mutant is wrong.

        A mutant that claims what the original claims, or rules that hold, is asked about all samples.
        """
        for order, (target, number) in enumerate(asked):
            if order >= item.at_first and self.tried.fewer and not self.tried.more:
                break
            known = _known(target, item.samples, item.check, number)
            self.tried.samples += 1
            try:
                for at, place in enumerate(known):
                    self._ask(place, item.check, order, at)
                    if self.tried.wrong:
                        return self.tried
            except NotInstallableError as error:
                self.tried.not_installable = str(error)
                return self.tried
        return self.tried

    def _ask(self, known: _Known, options: CheckOptions, order: int, at: int) -> None:
        position = (self.number, order, at, 0)
        if position in self.skip:
            self.tried.wrong, self.tried.verdict = (
                f"{known.place.ledger.sample.op}: it ended the process",
                VerdictKind.DIED,
            )
            return
        self.in_flight.enter(position)
        place, report = known.place, SampleReport(known.place.ledger.sample.op, "")
        with installed(self.mutant):
            claims = dict(place.read())
            if failing := [wrong for wrong in place.failing() if _failure(wrong) not in known.failing]:
                self._caught(failing[0])
                return
            if self.mutant.operator == KEY and at == 0:
                for stale in stale_decisions(place):
                    if _stale(stale) not in known.stale:
                        self._caught(stale)
                        return
            new = {c: claim for c, claim in claims.items() if known.texts.get(c) != str(claim.rule)}
            if new:
                if (self.number, order, at, 1) in self.skip:
                    self.tried.wrong, self.tried.verdict = f"{next(iter(new.values())).rule}: died", VerdictKind.DIED
                    return
                self.in_flight.enter((self.number, order, at, 1))
                ledger = _ledger(place.ledger.sample, options, place.ledger.number)
                with closing(place):  # a handler of DTensor's runs with the mutant, too
                    place.judge(new, ledger)
                ledger.settle()
                report = ledger.report
        if report.wrong:
            self._caught(report.wrong[0])
        gone = [claim for c, claim in known.claims.items() if c not in claims]
        self.tried.more += len(new)
        self.tried.fewer += len(gone)
        self.tried.unsure += len(report.inconclusive) + len(report.special)
        for text, some in (("more", list(new.values())), ("fewer", gone)):
            if some and len(self.tried.examples) < 2:
                self.tried.examples.append(f"{text}: {some[0].rule}")

    def _caught(self, wrong: WrongRule) -> None:
        self.tried.wrong, self.tried.verdict = f"{wrong.rule}: {wrong.message}", wrong.verdict


@dataclass(frozen=True)
class _Known:
    """A sample at one size on one mesh, with what DTensor claims there without a mutant.

    Claims are compared as texts: each masked partial of DTensor's equals itself alone.
    """

    place: SampleOnMesh
    claims: Mapping[Any, Any]
    texts: Mapping[Any, str]
    stale: frozenset[tuple[str, Rule]]
    failing: frozenset[tuple[str, Rule]]


def _failure(wrong: WrongRule) -> tuple[str, Rule]:
    return wrong.raised, wrong.rule


def _stale(wrong: WrongRule) -> tuple[str, Rule]:
    return wrong.left_out, wrong.rule


@lru_cache(maxsize=64)
def _known(target: Target, samples: SampleOptions, check: CheckOptions, number: int) -> tuple[_Known, ...]:
    sample = _samples(target, samples)[number]
    made = []
    for at, place in enumerate(places_of(_ledger(sample, check, number), _PLACES)):
        claims = dict(place.read())
        stale = frozenset(_stale(one) for one in stale_decisions(place)) if at == 0 else frozenset()
        texts = {combination: str(claim.rule) for combination, claim in claims.items()}
        made.append(_Known(place, claims, texts, stale, frozenset(map(_failure, place.failing()))))
    return tuple(made)


@lru_cache(maxsize=12)
def _samples(target: Target, options: SampleOptions) -> list[Sample]:
    return list(samples_of(target, options))


def _ledger(sample: Sample, options: CheckOptions, number: int) -> Ledger:
    report = SampleReport(sample.op, sample.origin)
    return Ledger(sample, replace(options, claims_only=True), number, lambda _: None, frozenset(), report)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
