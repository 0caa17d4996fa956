"""Tries mutants of strategies: from what was asked to an outcome for each mutant."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from itertools import groupby

from verifier.core.errors import ReportedError
from verifier.mutation.mutants import Mutant, mutants_of_files, mutants_of_registrations
from verifier.mutation.work import Reached, Reaching, Tried, Trying, reach, try_mutants
from verifier.rules.campaign.request import RulesPlan
from verifier.rules.campaign.work import prepare
from verifier.rules.campaign.workers import Died, Failed, Finished, GaveUp, Part, WorkerSet
from verifier.rules.samples import Target

__all__ = ["Kind", "MutationOptions", "MutationRun", "Outcome", "run_mutants"]

STALL_LIMIT = 40.0
_TARGETS, _AT_ONCE = 4, 12
"""A function's mutants are tried on samples of at most so many targets; so many mutants are one worker's item."""


class Kind(StrEnum):
    """What came of a mutant.

    Attributes
    ----------
    CAUGHT
        It claims a wrong rule that the original does not claim, keeps a stale decision, or ends the process.
    FEWER
        It only loses rules of the original: DTensor communicates, or refuses, where it need not.
    SAME
        It claims what the original claims on every sample.
    SURVIVED
        It differs and no sample tells that it is wrong, or no sample reaches the line.
    """

    CAUGHT = auto()
    FEWER = auto()
    SAME = auto()
    SURVIVED = auto()


@dataclass(frozen=True)
class MutationOptions:
    """How many mutants are tried, and on how many samples each.

    Parameters
    ----------
    most
        A seeded sample of so many mutants; None for all.
    samples
        On so many samples is each mutant tried, at most.
    """

    most: int | None
    seed: int
    samples: int
    jobs: int


@dataclass(frozen=True)
class Outcome:
    """What came of one mutant, and why, as a sentence; ``ops`` are the targets whose samples were asked."""

    mutant: Mutant
    kind: Kind
    verdict: str
    why: str
    ops: tuple[str, ...]
    samples: int
    more: int
    fewer: int


@dataclass
class MutationRun:
    """What came of all mutants.

    Parameters
    ----------
    candidates
        How many mutants there are; ``outcomes`` has those of the sample that were tried.
    no_programs
        Mutants that no function could run.
    """

    candidates: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    no_programs: list[Mutant] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def counts(self) -> Counter[Kind]:
        return Counter(outcome.kind for outcome in self.outcomes)


Progress = Callable[[str, int, int], None]
"""Told of each step: what is being done, how many items of it are done, and of how many."""


@dataclass
class _Sampled:
    """The samples of one target: what each reaches."""

    target: Target
    reached: list[Reached] = field(default_factory=list)


def run_mutants(
    plan: RulesPlan, files: Sequence[str], whole: bool, options: MutationOptions, progress: Progress
) -> MutationRun:
    """Try mutants of the functions in ``files`` on the samples of the targets of ``plan``.

    Parameters
    ----------
    whole
        Try functions that no sample reaches, too.

    Raises
    ------
    ReportedError
        If no sample reaches any of the files.
    """
    run = MutationRun()
    with WorkerSet(options.jobs, plan.header.imports, STALL_LIMIT, prepare=prepare) as workers:
        sampled = _reach(workers, plan, files, run, progress)
        mutants = _candidates(files, sampled, whole)
        run.candidates = len(mutants)
        if not mutants:
            raise ReportedError(f"no sample of {len(sampled)} ops reaches a strategy, so there is nothing to change")
        random.Random(options.seed).shuffle(mutants)
        chosen = sorted(mutants[: options.most])
        asked = {mutant: _asked(mutant, chosen, files, sampled, options) for mutant in chosen}
        run.outcomes += [_unreached(mutant) for mutant in chosen if not asked[mutant]]
        items = list(_items([mutant for mutant in chosen if asked[mutant]], asked, plan))
        _try(workers, items, run, progress)
    run.outcomes.sort(key=lambda outcome: outcome.mutant)
    return run


# --------------------------------------------------------------------------------------------------------------- reach
def _reach(
    workers: WorkerSet, plan: RulesPlan, files: Sequence[str], run: MutationRun, progress: Progress
) -> list[_Sampled]:
    items = [Reaching(target, plan.samples, plan.check, tuple(files)) for target in plan.targets]
    sampled = [_Sampled(target) for target in plan.targets]
    done = 0
    for outcome in workers.run(items, reach):
        match outcome:
            case Part(item=number, result=reached):
                sampled[number].reached.append(reached)
                continue
            case Failed(item=number, traceback=text):
                run.errors.append(f"{plan.targets[number].name}: {text.strip()}")
            case Finished() | GaveUp():
                pass
            case Died():
                continue
        done += 1
        progress("drawing samples", done, len(items))
    return sampled


def _candidates(files: Sequence[str], sampled: Sequence[_Sampled], whole: bool) -> list[Mutant]:
    """Return the mutants of all functions that samples reach, or of all functions."""
    lines: dict[int, set[int]] = defaultdict(set)
    ops: dict[str, None] = {}
    for one in sampled:
        for reached in one.reached:
            ops[reached.op] = None
            for file, here in reached.lines.items():
                lines[file] |= here
    by_function: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants_of_files(files):
        by_function[mutant.file, mutant.function].append(mutant)
    numbers = {file: number for number, file in enumerate(files)}
    kept = [
        mutant
        for (file, _), mutants in by_function.items()
        if whole or any(_is_reached(mutant, lines[numbers[file]]) for mutant in mutants)
        for mutant in mutants
    ]
    return kept + [one for one in mutants_of_registrations(list(ops)) if one.file in numbers]


def _is_reached(mutant: Mutant, lines: set[int] | frozenset[int]) -> bool:
    return any(line in lines for line in range(mutant.line, mutant.last_line + 1))


def _asked(
    mutant: Mutant,
    mutants: Sequence[Mutant],
    files: Sequence[str],
    sampled: Sequence[_Sampled],
    options: MutationOptions,
) -> tuple[tuple[Target, int], ...]:
    """Return the samples on which ``mutant`` is tried: samples that reach it, different ways through the code first."""
    file = files.index(mutant.file)

    def concerns(reached: Reached) -> bool:
        if mutant.op:
            return reached.op == mutant.op
        return _is_reached(mutant, reached.lines.get(file, frozenset()))

    found = {one.target: [reached for reached in one.reached if concerns(reached)] for one in sampled}
    by_number = sorted((target for target, here in found.items() if here), key=lambda one: (-len(found[one]), one))
    # targets that are few have the strategy to themselves; of those that share it the ones with most samples tell most
    ranked: list[tuple[int, int, Target, int]] = []
    for order, target in enumerate(by_number[:_TARGETS]):
        ways: Counter[object] = Counter()
        for reached in found[target]:
            way = reached.op, reached.lines.get(file)
            ranked.append((ways[way], order, target, reached.sample))
            ways[way] += 1
    return tuple((target, number) for _, _, target, number in sorted(ranked)[: options.samples])


def _items(
    mutants: Sequence[Mutant], asked: dict[Mutant, tuple[tuple[Target, int], ...]], plan: RulesPlan
) -> Iterator[Trying]:
    """Yield the mutants in groups that share their samples."""
    for _, group in groupby(mutants, key=lambda mutant: (mutant.file, mutant.function)):
        together = list(group)
        for start in range(0, len(together), _AT_ONCE):
            some = tuple(together[start : start + _AT_ONCE])
            yield Trying(some, tuple(asked[mutant] for mutant in some), plan.samples, plan.check)


# ----------------------------------------------------------------------------------------------------------------- try
def _try(workers: WorkerSet, items: Sequence[Trying], run: MutationRun, progress: Progress) -> None:
    done, total = 0, sum(len(item.mutants) for item in items)
    received: Counter[int] = Counter()
    for outcome in workers.run(items, try_mutants):
        item = items[outcome.item]
        match outcome:
            case Part(ordinal=number, result=tried):
                received[outcome.item] += 1
                done += 1
                mutant = item.mutants[number]
                if tried.not_installable:
                    run.no_programs.append(mutant)
                else:
                    run.outcomes.append(_outcome(mutant, tried, item.asked[number]))
                progress("trying mutants", done, total)
            case Failed(traceback=text):
                run.errors.append(f"{item.mutants[received[outcome.item]]}: {text.strip()}")
            case GaveUp(why=why):
                run.errors += [f"{mutant}: not tried: {why}" for mutant in item.mutants[received[outcome.item] :]]
            case Finished() | Died():
                pass


def _outcome(mutant: Mutant, tried: Tried, asked: Sequence[tuple[Target, int]]) -> Outcome:
    ops = tuple(dict.fromkeys(target.name for target, _ in asked[: tried.samples]))
    example = f" ({'; '.join(tried.examples)})" if tried.examples else ""
    if tried.wrong:
        kind, why = Kind.CAUGHT, tried.wrong
    elif not tried.more and not tried.fewer:
        kind, why = Kind.SAME, "it claims what the original claims"
    elif not tried.more:
        kind, why = Kind.FEWER, f"it claims {tried.fewer} rules less{example}"
    elif tried.unsure:
        kind, why = Kind.SURVIVED, f"of {tried.more} other rules, draws say nothing of {tried.unsure}{example}"
    else:
        kind, why = Kind.SURVIVED, f"its {tried.more} other rules hold on every draw{example}"
    return Outcome(mutant, kind, tried.verdict, why, ops, tried.samples, tried.more, tried.fewer)


def _unreached(mutant: Mutant) -> Outcome:
    return Outcome(mutant, Kind.SURVIVED, "", "no sample reaches the line", (), 0, 0, 0)
