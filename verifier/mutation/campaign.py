"""Tries mutants of strategies: from what was asked to an outcome for each mutant."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from verifier.core.errors import ReportedError
from verifier.core.parts import RunPart
from verifier.core.wording import plural
from verifier.mutation.journal import Journal
from verifier.mutation.mutants import Mutant, mutants_of_files, mutants_of_registrations
from verifier.mutation.outcomes import Kind, MutationRun, Outcome
from verifier.mutation.ranks import RankTrials
from verifier.mutation.work import Reached, Reaching, Tried, Trying, reach, try_mutants
from verifier.rules.campaign.request import RulesPlan
from verifier.rules.campaign.work import preparation
from verifier.rules.campaign.workers import Died, Failed, Finished, GaveUp, Part, WorkerSet
from verifier.rules.samples import Target
from verifier.torch_internals.amending.mutating import NotInstallableError

__all__ = ["BENEATH_ARE", "MutationOptions", "run_mutants", "run_on_ranks"]

BENEATH_ARE = ("redistribution", "chains")
"""What is run on ranks, as ``run`` names it, to try mutants of code beneath the strategies."""

STALL_LIMIT = 40.0
_TARGETS, _AT_ONCE, _MORE = 4, 12, 5
"""A function's mutants are tried on samples of at most so many targets; so many mutants are one worker's item. One that
cannot be told from the original is tried on so many times the samples."""


@dataclass(frozen=True)
class MutationOptions:
    """How many mutants are tried, and on how many samples each.

    Parameters
    ----------
    most
        A seeded sample of so many mutants; None for all.
    samples
        On so many samples is each mutant tried, at most.
    shard
        The part of these mutants to try; None for all.
    """

    most: int | None
    seed: int
    samples: int
    jobs: int
    shard: RunPart | None = None

    def part(self, mutants: Sequence[Mutant]) -> list[Mutant]:
        """Return those of shuffled ``mutants`` that are to be tried, in the order of the source."""
        chosen = sorted(mutants[: self.most])
        return [one for number, one in enumerate(chosen, 1) if self.shard is None or self.shard.has(number)]


Asked = dict[Mutant, tuple[tuple[Target, int], ...]]
Progress = Callable[[str, int, int], None]
"""Told of each step: what is being done, how many items of it are done, and of how many."""


class _Noted(MutationRun):
    """A run that is being made; its outcomes go into a journal, too, and begin with what the journal has."""

    def __init__(self, journal: Journal | None) -> None:
        super().__init__()
        self._journal = journal
        self.known = {} if journal is None else {one.mutant: one for one in journal.run.outcomes}

    def add(self, outcome: Outcome) -> None:
        """Take an outcome, in the place of an earlier one of the same mutant."""
        if outcome == self.known.get(outcome.mutant):
            return
        self.known[outcome.mutant] = outcome
        if self._journal is not None:
            self._journal.note(self, outcome)

    def made(self) -> MutationRun:
        outcomes = [self.known[mutant] for mutant in sorted(self.known)]
        return MutationRun(self.candidates, outcomes, self.no_programs, self.errors)


@dataclass
class _Sampled:
    """The samples of one target: what each reaches."""

    target: Target
    reached: list[Reached] = field(default_factory=list)


def run_mutants(
    plan: RulesPlan,
    files: Sequence[str],
    whole: bool,
    options: MutationOptions,
    progress: Progress,
    ranks: RankTrials | None = None,
    journal: Journal | None = None,
) -> MutationRun:
    """Try mutants of the functions in ``files`` on the samples of the targets of ``plan``.

    Parameters
    ----------
    whole
        Try functions that no sample reaches, too.
    ranks
        Try mutants that level 1 does not catch and does not find to be the same; None for level 1 alone.
    journal
        Gets each outcome at once. Mutants of which it has one are not tried again.

    Raises
    ------
    ReportedError
        If no sample reaches any of the files.
    """
    run = _Noted(journal)
    with WorkerSet(options.jobs, plan.header.imports, STALL_LIMIT, prepare=preparation(plan.header.imports)) as workers:
        sampled = _reach(workers, plan, files, run, progress)
        mutants = _candidates(files, sampled, whole)
        run.candidates = len(mutants)
        if not mutants:
            raise ReportedError(f"no sample of {len(sampled)} ops reaches a strategy, so there is nothing to change")
        random.Random(options.seed).shuffle(mutants)
        chosen = options.part(mutants)
        samples = _Samples(sampled, files)
        asked = {mutant: samples.asked(mutant, _MORE * options.samples) for mutant in chosen}
        for mutant in chosen:
            if not asked[mutant]:
                run.add(_unreached(mutant))
        items = list(
            _items([one for one in chosen if asked[one] and one not in run.known], asked, options.samples, plan)
        )
        _try(workers, items, run, progress)
    if ranks is not None:
        _try_on_ranks(ranks, run, _ops_of_functions(asked), progress)
    return run.made()


def run_on_ranks(
    files: Sequence[str],
    patterns: Sequence[str],
    options: MutationOptions,
    progress: Progress,
    ranks: RankTrials,
    journal: Journal | None = None,
) -> MutationRun:
    """Try mutants of code that strategies rest on, such as redistribution, on ranks alone.

    Parameters
    ----------
    patterns
        The ops that are run, as ``run`` names them.
    """
    run = _Noted(journal)
    mutants = mutants_of_files(files)
    run.candidates = len(mutants)
    random.Random(options.seed).shuffle(mutants)
    for mutant in options.part(mutants):
        if mutant not in run.known:
            run.add(Outcome(mutant, Kind.SURVIVED, "", "level 1 asks strategies alone", tuple(patterns), 0, 0, 0))
    _try_on_ranks(ranks, run, {}, progress)
    return run.made()


# --------------------------------------------------------------------------------------------------------------- reach
def _reach(
    workers: WorkerSet, plan: RulesPlan, files: Sequence[str], run: _Noted, progress: Progress
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
            case GaveUp(item=number, why=why):
                run.errors.append(f"{plan.targets[number].name}: its samples were not drawn: {why}")
            case Finished():
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


class _Samples:
    """The samples of all targets, by the lines that they reach."""

    def __init__(self, sampled: Sequence[_Sampled], files: Sequence[str]) -> None:
        self._flat = [(one.target, reached) for one in sampled for reached in one.reached]
        self._files = {file: number for number, file in enumerate(files)}
        self._at: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (_, reached) in enumerate(self._flat):
            for file, lines in reached.lines.items():
                for line in lines:
                    self._at[file, line].append(index)

    def asked(self, mutant: Mutant, most: int) -> tuple[tuple[Target, int], ...]:
        """Return the samples on which ``mutant`` is tried, at most ``most``: different ways through the code first."""
        file = self._files[mutant.file]
        found: dict[Target, list[Reached]] = defaultdict(list)
        for index in self._reaching(mutant, file):
            target, reached = self._flat[index]
            found[target].append(reached)
        # a few targets have the strategy to themselves; of many that share it, those with the most samples tell most
        ranked: list[tuple[int, int, Target, int]] = []
        for order, target in enumerate(sorted(found, key=lambda one: (-len(found[one]), one))[:_TARGETS]):
            ways: Counter[object] = Counter()
            for reached in found[target]:
                way = reached.op, reached.lines.get(file)
                ranked.append((ways[way], order, target, reached.sample))
                ways[way] += 1
        return tuple((target, number) for _, _, target, number in sorted(ranked)[:most])

    def _reaching(self, mutant: Mutant, file: int) -> Sequence[int]:
        if mutant.op:
            return [index for index, (_, reached) in enumerate(self._flat) if reached.op == mutant.op]
        lines = range(mutant.line, mutant.last_line + 1)
        return sorted({index for line in lines for index in self._at.get((file, line), ())})


def _items(mutants: Sequence[Mutant], asked: Asked, at_first: int, plan: RulesPlan) -> Iterator[Trying]:
    """Yield the mutants in groups that share their samples."""
    for _, group in groupby(mutants, key=lambda mutant: (mutant.file, mutant.function)):
        together = list(group)
        for start in range(0, len(together), _AT_ONCE):
            some = tuple(together[start : start + _AT_ONCE])
            yield Trying(some, at_first, tuple(asked[mutant] for mutant in some), plan.samples, plan.check)


# ----------------------------------------------------------------------------------------------------------------- try
def _try(workers: WorkerSet, items: Sequence[Trying], run: _Noted, progress: Progress) -> None:
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
                    run.add(_outcome(mutant, tried, item.asked[number]))
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


# --------------------------------------------------------------------------------------------------------------- ranks
def _ops_of_functions(asked: Asked) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the targets whose samples reach a function, for mutants of lines that none reaches."""
    ops: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for mutant, samples in asked.items():
        ops[mutant.file, mutant.function].update((target.name, None) for target, _ in samples)
    return {function: tuple(names)[:_TARGETS] for function, names in ops.items()}


def _try_on_ranks(
    ranks: RankTrials, run: _Noted, ops: dict[tuple[str, str], tuple[str, ...]], progress: Progress
) -> None:
    waiting = [one for one in run.known.values() if one.kind is Kind.SURVIVED and one.level == 1]
    for number, outcome in enumerate(waiting):
        progress("on ranks", number, len(waiting))
        mutant = outcome.mutant
        targets = outcome.ops or ops.get((mutant.file, mutant.function), ())
        if not targets:
            continue
        try:
            found = ranks.attempt(mutant, targets)
        except (NotInstallableError, ReportedError) as error:
            run.errors.append(f"{mutant}: {error}")
            continue
        if found.verdict:
            told = replace(outcome, kind=Kind.CAUGHT, verdict=found.verdict, why=found.why)
        else:
            told = replace(outcome, why=f"{outcome.why}; {plural(found.trials, 'trial')} on ranks tell nothing")
        run.add(replace(told, level=2, trials=found.trials))
