"""Recognises known findings among failures; minimises, confirms and reports one failure of each other group."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from hypothesis.strategies import SearchStrategy

from verifier.campaign.history import Answer, Past, entry_position
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.core.case import MOST_RANKS, MeshSpec, OpCase, Trial
from verifier.core.verdict import Verdict, VerdictKind, is_expected
from verifier.core.wording import plural
from verifier.events import CaseSkipped, EntryStarted, FindingReported, GroupSettled, GroupStarted, Listener
from verifier.findings.attribution import Attribution, passed_again, unmended
from verifier.findings.failures import Failure, Runner
from verifier.findings.grouping import Group, fingerprint, group_key, symptom
from verifier.findings.keys import Symptom
from verifier.findings.minimising import Minimiser, confirm
from verifier.findings.places import place_of
from verifier.findings.record import finding_record
from verifier.gate.entries import BaselineEntry, Cause
from verifier.gate.question import replaced_text
from verifier.planning.boundary import refusal
from verifier.planning.families import DrawContext
from verifier.processes.scripts import load_scripts_ahead
from verifier.records.schema import (
    CONFIRMED,
    NOT_SELECTED,
    NOT_TRIED,
    OUT_OF_TIME,
    ConfirmationRecord,
    FindingRecord,
    KnownRecord,
)
from verifier.records.values import load_trial

__all__ = ["Diagnosis", "Investigation"]

_BESIDE = " | beside what remedies mend"
"""Marks the key of the failures in a group that remedies do not mend, where they mend others."""
MINIMISING_LIMIT = 20.0
"""Seconds after which minimising stops, if the plan does not say; the smallest failure by then is reported."""


class Diagnosis(Protocol):
    """A cause that failures of an op may share, and that its calls and placements do not show.

    A failure is marked before it is minimised, because the mark decides which smaller failures are the same defect.
    """

    def mark(self, failure: Failure) -> Failure | None:
        """Return ``failure`` with a mark, or None if the diagnosis does not apply."""

    def holds(self, failure: Failure) -> bool:
        """Return whether the diagnosis still applies to a marked failure that minimising has changed."""

    def same(self, failure: Failure, known: Failure) -> bool:
        """Return whether ``known``, a failure without a mark, is the same defect as the marked ``failure``."""

    def cause(self, failure: Failure) -> str:
        """Return the likely cause of a failure with this mark; empty if it does not have the mark."""


@dataclass
class Defect:
    """A defect behind groups of failures: an ``entry`` of the baseline, a cause or not, or a ``finding`` of this run.

    Parameters
    ----------
    shown
        The failure that showed the entry.
    reported
        Number of failures with which the finding has been reported.
    """

    entry: BaselineEntry | None = None
    shown: Failure | None = None
    finding: FindingRecord | None = None
    reported: int = 0

    @property
    def explains_by_looks(self) -> bool:
        """Whether failures that look like it are the same defect; a cause explains only what its remedy mends."""
        return self.entry is not None and not isinstance(self.entry, Cause)


class Investigation:
    """Attributes the failures of a campaign to causes and entries of the baseline, and makes findings of the others.

    Parameters
    ----------
    past
        Tells which groups of failures are settled already.
    outcomes
        Holds the failures.
    run
        Runs one trial, with DTensor's caches empty.
    diagnoses
        The first diagnosis that applies marks a failure.
    attribution
        Tries the remedies of known causes; None if the baseline has none.
    clock
        Returns seconds, as ``time.monotonic`` does.

    Attributes
    ----------
    known
        The outcomes of the entries of the baseline.
    until
        When to stop, by the clock.
    """

    def __init__(
        self,
        plan: Plan,
        past: Past,
        outcomes: Outcomes,
        run: Runner,
        emit: Listener,
        diagnoses: Sequence[Diagnosis] = (),
        clock: Callable[[], float] = time.monotonic,
        attribution: Attribution | None = None,
    ) -> None:
        self.plan = plan
        self.known: list[KnownRecord] = []
        self.until = float("inf")
        self._past, self._outcomes, self._run, self._emit = past, outcomes, run, emit
        self._diagnoses, self._clock, self._attribution = diagnoses, clock, attribution
        self._defects: dict[str, Defect] = {}
        """By fingerprint."""
        self._of_key: dict[str, Defect] = {}
        """By the key of a group. Entries and minimised failures add keys that no failure may have yet."""
        self._of_place: dict[str, Defect] = {}
        """New findings, by the place in torch where they come from."""
        self._explained: dict[tuple[str, Symptom], tuple[Cause, ...]] = {}
        """The causes that together explained the last failure of an op with a symptom, wherever its tensors lay."""
        self._explained_of: dict[str, dict[Cause, None]] = {}
        """All causes that explained a failure of an op."""
        self._late: set[str] = set()
        """The entries that were run again only because a failure looked like theirs."""

    def replay_known(self) -> None:
        """Run every selected entry of the baseline again, and learn what its failures look like.

        Entries on meshes that were not asked for have to wait until a failure looks like theirs.

        Entries with the same world size run together, because only a few pools are kept alive.
        """
        entries = self.plan.baseline.entries
        selected = {entry.fingerprint: entry for entry in entries if self._is_selected(entry)}
        trials = {name: load_trial(entry.trial()) for name, entry in selected.items()}
        replayed: dict[str, tuple[Verdict, Failure | None] | str] = {
            entry.fingerprint: f"{f'mesh {entry.mesh}' if self._selects_op(entry) else entry.op} {NOT_SELECTED}"
            for entry in entries
            if entry.fingerprint not in trials
        }
        try:
            for name, trial in sorted(trials.items(), key=lambda item: item[1].mesh.world_size):
                replayed[name] = self._replay(selected[name], trial)
        finally:  # a Ctrl-C keeps the entries before it
            for entry in entries:
                if entry.fingerprint in replayed:
                    self._take_in(entry, replayed[entry.fingerprint])

    def _replay(self, entry: BaselineEntry, trial: Trial) -> tuple[Verdict, Failure | None] | str:
        """Return the outcome of the trial of ``entry``, or why it is not tried."""
        if trial.mesh.device != self.plan.header.device:
            return f"needs {trial.mesh.device}"
        cluster = self.plan.cluster
        if reason := refusal(trial, self.plan.imports, MOST_RANKS if cluster is None else cluster.world_size):
            return reason
        if not entry.imports and entry.is_replaced(self.plan.header.own_rules):
            return replaced_text(entry.op, self.plan.imports)
        position = entry_position(entry.fingerprint)
        if (answer := self._past.result(position, trial)) is None:
            if self._clock() > self.until:
                return OUT_OF_TIME
            self._emit(EntryStarted(entry.fingerprint))
            answer = Answer(position, self._run(trial))
        return self._outcomes.take(answer)

    def _replay_like(self, keys: Collection[str]) -> None:
        """Run the entries again that explain failures with ``keys`` by looks and were left out for their mesh."""
        for entry in self.plan.baseline.entries:
            looked_like = entry.fingerprint not in self._late and not {*entry.groups}.isdisjoint(keys)
            if looked_like and self._selects_op(entry) and not self._selects_mesh(entry):
                self._late.add(entry.fingerprint)
                self._take_in(entry, self._replay(entry, load_trial(entry.trial())))

    def _take_in(self, entry: BaselineEntry, replayed: tuple[Verdict, Failure | None] | str) -> None:
        self.known = [known for known in self.known if known.fingerprint != entry.fingerprint]
        if isinstance(replayed, str):
            self.known.append(KnownRecord(entry.fingerprint, "untested", replayed, self._is_selected(entry)))
            return
        verdict, failure = replayed
        if failure is not None and isinstance(entry, Cause):
            self._take_in_cause(entry, failure)
        elif failure is not None and is_expected(failure.verdict.kind, entry.verdict):
            self._is_shown(entry, failure, *entry.groups, group_key(failure))
        elif verdict.kind is VerdictKind.PASS:
            self.known.append(passed_again(entry, self.plan.imports))
        else:
            detail = f"was {verdict.kind} and not {entry.verdict} when it was run again: {verdict.message}"
            self.known.append(KnownRecord(entry.fingerprint, "untested", detail))

    def _take_in_cause(self, cause: Cause, failure: Failure) -> None:
        """Learn whether the remedy of ``cause`` still mends the failure of its trial; the failure is new if not."""
        if self._attribution is not None and self._attribution.is_mended(failure, (cause,)):
            self._is_shown(cause, failure, group_key(failure))
            self._outcomes.failures.groups[group_key(failure)].unexplained.clear()
        else:
            detail = f"its trial fails, and remedy {cause.remedy} does not mend it"
            self.known.append(KnownRecord(cause.fingerprint, "untested", detail))

    def _is_selected(self, entry: BaselineEntry) -> bool:
        return self._selects_op(entry) and self._selects_mesh(entry)

    def _selects_op(self, entry: BaselineEntry) -> bool:
        ops = self.plan.selected.get(entry.family)
        return ops is not None and self.plan.families[entry.family].covers(ops, entry.op)

    def _selects_mesh(self, entry: BaselineEntry) -> bool:
        return not self.plan.meshes_named or entry.is_on(self.plan.meshes)

    def settle(self) -> None:
        """Report each known finding that showed, and the failures of new findings that came after their report."""
        for name, defect in sorted(self._defects.items(), key=lambda item: item[1].entry is None):  # known ones first
            of_key = self._outcomes.failures.groups.items()
            groups = [group for key, group in of_key if self._of_key.get(key) is defect]
            count, keys = sum(group.occurrences for group in groups), sorted(group.key for group in groups)
            seen = {where: None for group in groups for where in group.seen}
            if (failure := defect.shown) is not None:
                self.known.append(KnownRecord(name, "known", f"in {plural(count, 'trial')}"))
                where = ConfirmationRecord(CONFIRMED, failure.trial.mesh.backend, failure.trial.mesh.world_size)
                merged = Group(group_key(failure), failure, count, seen)
                found = self._record(merged, failure, where, True, defect.entry)
                self._emit(FindingReported(replace(found, groups=keys)))
            elif defect.finding is not None and (more := count - defect.reported) > 0:  # none beside a cause
                found = replace(defect.finding, occurrences=more, also=list(seen), groups=keys)
                self._emit(FindingReported(found))

    def _place_of(self, failure: Failure) -> str:
        return place_of(failure, self.plan.header.own_rules)

    def _is_handled(self, failure: Failure) -> bool:
        """Return whether ``failure`` is an entry of the baseline or looks like a minimised failure."""
        name = fingerprint(failure)
        looks_like, named = self._of_key.get(group_key(failure), Defect()), self._defects.get(name, Defect())
        known = bool(self._diagnosis(failure)) and self.plan.baseline.looks_like(name) is not None
        return known or looks_like.explains_by_looks or named.finding is not None

    def investigate(self) -> None:
        """Turn each group of failures that no cause and no entry explains into a finding."""
        self._replay_like(self._outcomes.failures.groups)
        in_order = sorted(
            self._outcomes.failures.groups.values(), key=lambda group: (group.smallest.size[:2], len(group.key))
        )
        for group in in_order:  # simple groups first: more complicated ones often turn out to be the same defect
            defect = self._of_key.get(group.key)
            if defect is None and self._recall(group):
                group.unexplained.clear()
            elif defect is None or isinstance(defect.entry, Cause):
                self._attribute(group)

    def _attribute(self, group: Group) -> None:
        """Settle the failures of ``group`` that remedies mend, and look into the others.

        Failures that look alike may have different causes. If the smallest one has none, the group is one finding.
        """
        failures, attribution = [*group.unexplained.values()], self._attribution
        group.unexplained.clear()
        if group.key not in self._of_key:
            failures = [group.smallest, *(one for one in failures if one is not group.smallest)]
        rest: list[tuple[Failure, bool]] = []
        before: tuple[Cause, ...] = ()
        for failure in failures:
            causes: tuple[Cause, ...] = ()
            if (alone := attribution is not None and attribution.shows_alone(failure)) and attribution is not None:
                if before and attribution.is_mended(failure, before):
                    causes = before
                else:
                    causes = attribution.explain(failure, first=self._explaining(failure), before=self._in_this_run())
            if causes:
                before = causes
                self._remember(failure, causes)
                self._settle_group(causes[0], failure, group.key)
            elif not before:
                self._emit(GroupStarted(group.key))
                self._look_into(group, failure, alone)
                return
            else:
                rest.append((failure, alone))
        if rest:
            smallest, alone = min(rest, key=lambda one: one[0].size)
            others = Group(f"{group.key}{_BESIDE}", smallest, len(rest), dict(group.seen))
            if others.key not in self._of_key:
                self._emit(GroupStarted(others.key))
                self._look_into(others, smallest, alone)

    def _explaining(self, failure: Failure) -> list[tuple[Cause, ...]]:
        """Return the causes that explained the last failure of the op with the symptom, and all those of the op."""
        op = failure.trial.case.op
        return [self._explained.get((op, symptom(failure)), ()), tuple(self._explained_of.get(op, ()))]

    def _in_this_run(self) -> set[Cause]:
        """Return all causes that have explained anything."""
        return {*chain.from_iterable(self._explained_of.values())}

    def _remember(self, failure: Failure, causes: Sequence[Cause]) -> None:
        op = failure.trial.case.op
        self._explained[op, symptom(failure)] = tuple(causes)
        self._explained_of.setdefault(op, {}).update(dict.fromkeys(causes))

    def _settle_group(self, entry: BaselineEntry, failure: Failure, key: str) -> None:
        """Assign the failures with ``key`` to a known finding or cause that ``failure`` shows."""
        new = self._of_key.get(key, Defect()).entry is not entry
        self._is_shown(entry, failure, key)
        if new:
            self._emit(GroupSettled(key, entry.fingerprint))

    def _recall(self, group: Group) -> bool:
        """Take the settlement of ``group`` from the past; return whether there is one."""
        found = False
        for past in (self._past.groups.get(key) for key in (group.key, f"{group.key}{_BESIDE}")):
            match past:
                case GroupSettled(key, name):
                    entry = self.plan.baseline.get(name)
                    assert entry is not None, f"{name} is not in the baseline that the run began with"
                    self._is_shown(entry, group.smallest, key)
                case FindingReported() as reported:
                    self._report(replace(reported, recalled=True), self._place_of(group.smallest))
            found |= past is not None
        return found

    def _look_into(self, group: Group, failure: Failure, alone: bool) -> None:
        """Minimise and confirm ``failure``, which no remedy mends, and report what the group is.

        A failure that does not show ``alone`` may become one of two calls, which a remedy mends. A failure that comes
        from the same place in torch as a new finding is more of that finding.
        """
        place = self._place_of(failure)
        if (known_place := self._of_place.get(place)) is not None and known_place.finding is not None:
            same, op = known_place.finding, failure.trial.case.op
            also = [seen if op == same.op else f"{op} on {seen}" for seen in group.seen]
            more = replace(same, occurrences=group.occurrences, also=also, groups=[group.key])
            self._report(FindingReported(more, group.key, group.key), place)
            return
        if self.plan.imports:
            load_scripts_ahead()  # the finding will have one, and the user waits for it
        given, failure = failure, self._marked(failure)
        limit = MINIMISING_LIMIT if self.plan.minimising is None else self.plan.minimising
        until = min(self.until, self._clock() + limit)
        minimiser = Minimiser(self._run, self._generator(given), self.plan.seed, until, self._clock)
        known = bool(self._diagnosis(failure)) and self._is_handled(failure)
        smallest, minimised = (failure, True) if known else self._minimised(failure, minimiser)
        if self._attribution is not None and smallest.trial is not given.trial:
            if (causes := self._attribution.explain(smallest)) and not alone:
                self._settle_group(causes[0], smallest, group.key)
                return
            if causes:
                smallest, minimised = failure, False  # minimising has come to another defect, which is known
        if self._clock() > self.until:
            self._emit(CaseSkipped("findings", "minimised no further within the time limit"))
        smallest, confirmed = (smallest, ConfirmationRecord(NOT_TRIED)) if known else confirm(smallest, minimiser)
        name, became = fingerprint(smallest), group_key(smallest)
        self._replay_like((became,))
        looks = self._of_key.get(became, Defect())
        if (
            entry := self.plan.baseline.looks_like(name) or (looks.entry if looks.explains_by_looks else None)
        ) is not None:
            self._is_shown(entry, smallest, group.key)
            self._emit(GroupSettled(group.key, entry.fingerprint))
            return
        name = unmended(name, self.plan.baseline)
        if (found := self._defects.get(name, Defect()).finding) is None:
            found = self._record(group, smallest, confirmed, minimised, None, name)
        else:  # the same defect in another group
            found = replace(found, occurrences=group.occurrences, also=list(group.seen), groups=[group.key])
        self._report(FindingReported(found, group.key, became), place)

    def _minimised(self, failure: Failure, minimiser: Minimiser) -> tuple[Failure, bool]:
        """Return the smallest failure of the same kind, and whether there was time to look for one.

        A call that fails only after another call of the op becomes a failure of both calls. A failure that earlier
        trials cause in another way stays as it is: nothing smaller would fail.
        """
        alone: Failure | None = failure
        if not failure.costly and minimiser.attempt(failure.trial, failure) is None:
            alone = minimiser.after_another(failure, self._outcomes.others(failure.trial))
        if alone is None:
            return failure, False
        smallest, minimised = minimiser.minimise(alone, self._is_handled)
        if smallest is not failure and (diagnosis := self._diagnosis(smallest)) and not diagnosis.holds(smallest):
            return failure, False  # minimising has changed the defect
        return smallest, minimised

    def _marked(self, failure: Failure) -> Failure:
        """Return ``failure`` with the mark of the first diagnosis that applies; a known finding may claim its key."""
        for diagnosis in self._diagnoses:
            if self._clock() <= self.until and (marked := diagnosis.mark(failure)) is not None:
                key = group_key(marked)
                for defect in self._defects.values():
                    if key not in self._of_key and defect.shown and diagnosis.same(marked, defect.shown):
                        self._of_key[key] = defect
                return marked
        return failure

    def _diagnosis(self, failure: Failure) -> Diagnosis | None:
        """Return the diagnosis that has marked ``failure``, if any."""
        return next((diagnosis for diagnosis in self._diagnoses if diagnosis.cause(failure)), None)

    def _report(self, reported: FindingReported, place: str) -> None:
        """Report a group as a finding from ``place``, and remember that it is one."""
        defect = self._defects.setdefault(reported.finding.fingerprint, Defect(finding=reported.finding))
        if place:
            self._of_place.setdefault(place, defect)
        for key in (reported.group, reported.became):
            self._of_key.setdefault(key, defect)
        defect.reported += reported.finding.occurrences
        self._emit(reported)

    def _is_shown(self, entry: BaselineEntry, failure: Failure, *keys: str) -> None:
        """Assign groups to a known finding; another op than the entry's may have shown it."""
        if isinstance(entry, Cause) and (failure.trial.case.op, symptom(failure)) not in self._explained:
            self._remember(failure, (entry,))
        if entry.fingerprint not in self._defects:
            self._defects[entry.fingerprint] = Defect(entry, failure)
            self.known = [known for known in self.known if known.fingerprint != entry.fingerprint]
        self._of_key |= dict.fromkeys(keys, self._defects[entry.fingerprint])

    def _record(
        self,
        group: Group,
        smallest: Failure,
        confirmed: ConfirmationRecord,
        minimised: bool,
        entry: BaselineEntry | None,
        name: str = "",
    ) -> FindingRecord:
        family = self.plan.families[smallest.trial.case.family]
        diagnosis = self._diagnosis(smallest)
        cause = diagnosis.cause(smallest) if diagnosis else family.likely_cause(smallest.trial, smallest.verdict)
        in_time = self._clock() < self.until
        return finding_record(
            group, smallest, confirmed, minimised, entry, family.name, cause, in_time, self.plan.imports,
            name=name, memory_limit=self.plan.rank_memory,
        )  # fmt: skip

    def _generator(self, failure: Failure) -> Callable[[MeshSpec], SearchStrategy[OpCase]] | None:
        """Return a generator of cases like that of ``failure``; None for a family whose cases are already small."""
        family = self.plan.families[failure.trial.case.family]
        if not family.shrinks:
            return None
        # the same ops as when it was drawn, so that the same choices draw the same case
        ops = self.plan.selected[family.name] if failure.drawn is None else failure.drawn.ops
        return lambda mesh: family.cases(DrawContext(mesh, self.plan.dtypes, ops))
