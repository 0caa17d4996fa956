"""What becomes of failures: known ones are recognised; of each other group one is minimised, confirmed and reported."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis.strategies import SearchStrategy

from verifier.campaign.history import Past, entry_position
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.core.case import MOST_RANKS, MeshSpec, OpCase, Trial
from verifier.core.verdict import Verdict, VerdictKind
from verifier.core.wording import plural
from verifier.events import CaseSkipped, EntryStarted, FindingReported, GroupSettled, GroupStarted, Listener
from verifier.findings.failures import Failure, Runner
from verifier.findings.grouping import Group, fingerprint, group_key, is_of_several_ranks, shows_on_some_ranks
from verifier.findings.minimising import Minimiser, confirm
from verifier.findings.record import finding_record
from verifier.gate.baseline import BaselineEntry
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.planning.boundary import refusal
from verifier.planning.families import DrawContext
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

__all__ = ["Investigation"]

MINIMISING_LIMIT = 20.0
"""Seconds after which a failure is reported as small as it is by then."""
_BY_HASH_SEED = "ranks that have one hash seed all do the same: do they choose by the order of a set of texts?"


class Investigation:
    """Holds the failures of a campaign against the baseline, and makes findings of the others.

    Parameters
    ----------
    run
        Runs one trial, with DTensor's caches empty.
    run_alike
        Does the same on ranks that all have one hash seed; None if there are no such ranks.
    outcomes
        Where the failures are.
    emit, recall
        As for :class:`verifier.campaign.campaign.Campaign`.

    Attributes
    ----------
    known
        What became of the entries of the baseline.
    until
        When to stop, by the monotonic clock.
    """

    def __init__(
        self,
        plan: Plan,
        past: Past,
        outcomes: Outcomes,
        run: Runner,
        run_alike: Runner | None,
        emit: Listener,
        recall: Listener,
    ) -> None:
        self.plan = plan
        self.known: list[KnownRecord] = []
        self.until = float("inf")
        self._past, self._outcomes, self._run, self._run_alike = past, outcomes, run, run_alike
        self._emit, self._recall = emit, recall
        self._known_groups: dict[str, BaselineEntry] = {}
        self._replayed: dict[str, Failure] = {}
        self._handled: dict[str, str] = {}
        """The finding that each group is, or that was minimised to one of its failures."""
        self._found: dict[str, FindingRecord] = {}
        self._told: Counter[str] = Counter()
        """Of how many failures each finding has been reported."""

    def replay_known(self) -> None:
        """Run every entry of the baseline that is in scope again, and learn what its failures look like.

        Those of as many ranks come together, since the pools of few numbers of ranks are alive at a time.
        """
        entries = self.plan.baseline.entries
        trials = {entry.fingerprint: load_trial(entry.trial()) for entry in entries if self._is_selected(entry)}
        replayed: dict[str, tuple[Verdict, Failure | None] | str] = {
            entry.fingerprint: f"{entry.op} {NOT_SELECTED}" for entry in entries if entry.fingerprint not in trials
        }
        try:
            for name, trial in sorted(trials.items(), key=lambda item: item[1].mesh.world_size):
                replayed[name] = self._replay(name, trial)
        finally:  # a Ctrl-C leaves those that came before it
            for entry in entries:
                if entry.fingerprint in replayed:
                    self._take_in(entry, replayed[entry.fingerprint])

    def _replay(self, name: str, trial: Trial) -> tuple[Verdict, Failure | None] | str:
        """Return what comes of the trial of the entry ``name``, or why it is not tried."""
        if trial.mesh.device != self.plan.header.device:
            return f"needs {trial.mesh.device}"
        cluster = self.plan.cluster
        if reason := refusal(trial, self.plan.imports, MOST_RANKS if cluster is None else cluster.world_size):
            return reason
        position = entry_position(name)
        if (result := self._past.result(position, trial)) is not None:
            return result[1], self._outcomes.keep(*result, None, position, self._recall)
        if time.monotonic() > self.until:
            return OUT_OF_TIME
        self._emit(EntryStarted(name))
        return self._outcomes.take(self._run(trial), make_reference(trial.case), None, position)

    def _take_in(self, entry: BaselineEntry, replayed: tuple[Verdict, Failure | None] | str) -> None:
        if isinstance(replayed, str):
            self.known.append(KnownRecord(entry.fingerprint, "untested", replayed, self._is_selected(entry)))
            return
        verdict, failure = replayed
        if failure is not None and failure.verdict.kind == entry.verdict:
            self._known_groups |= dict.fromkeys((*entry.groups, group_key(failure)), entry)
            self._replayed[entry.fingerprint] = failure
        elif verdict.kind is VerdictKind.PASS:
            self.known.append(KnownRecord(entry.fingerprint, "fixed", "passed when it was run again"))
        else:
            detail = f"was {verdict.kind} and not {entry.verdict} when it was run again: {verdict.message}"
            self.known.append(KnownRecord(entry.fingerprint, "untested", detail))

    def _is_selected(self, entry: BaselineEntry) -> bool:
        ops = self.plan.selected.get(entry.family)
        return ops is not None and self.plan.families[entry.family].covers(ops, entry.op)

    def settle(self) -> None:
        """Report what the findings have come to, once all has been tried."""
        self._settle_known()
        self._settle_found()

    def _settle_known(self) -> None:
        """Report each known finding that showed: as it was stored, with all groups that turned out to be it."""
        for fingerprint_, failure in self._replayed.items():
            groups = [g for key, g in self._outcomes.failures.groups.items() if self._is_entry(key, fingerprint_)]
            merged = Group(group_key(failure), failure, sum(group.occurrences for group in groups))
            for group in groups:
                merged.seen.update(group.seen)
            self.known.append(KnownRecord(fingerprint_, "known", f"in {plural(merged.occurrences, 'trial')}"))
            mesh = failure.trial.mesh
            where = ConfirmationRecord(CONFIRMED, mesh.backend, mesh.world_size)
            entry = self.plan.baseline.get(fingerprint_)
            found = self._record(merged, failure, where, True, entry)
            self._emit(FindingReported(replace(found, groups=sorted(group.key for group in groups))))

    def _settle_found(self) -> None:
        """Report the failures of new findings that came after these, or were in groups that look as they do."""
        for name, found in self._found.items():
            groups = [g for key, g in self._outcomes.failures.groups.items() if self._handled.get(key) == name]
            if more := sum(group.occurrences for group in groups) - self._told[name]:
                seen = {where: None for group in groups for where in group.seen}
                keys = sorted(group.key for group in groups)
                self._emit(FindingReported(replace(found, occurrences=more, also=list(seen), groups=keys)))

    def _is_handled(self, failure: Failure) -> bool:
        key, name = group_key(failure), fingerprint(failure)
        known = failure.by_hash_seed and self.plan.baseline.get(name) is not None
        return known or key in self._known_groups or name in self._found

    def _is_entry(self, key: str, fingerprint_: str) -> bool:
        entry = self._known_groups.get(key)
        return entry is not None and entry.fingerprint == fingerprint_

    def investigate(self) -> None:
        """Turn each group of failures that is not known into a finding."""
        in_order = sorted(
            self._outcomes.failures.groups.items(), key=lambda item: (item[1].smallest.size[:2], len(item[0]))
        )
        for key, group in in_order:  # simple ones first: what looks more complicated often turns out to be one of them
            if key in self._known_groups or key in self._handled:
                continue
            if self._recall_group(key):
                continue
            self._emit(GroupStarted(key))
            failure = self._looked_into(group.smallest)
            until = min(self.until, time.monotonic() + MINIMISING_LIMIT)
            minimiser = Minimiser(self._run, self._generator(group.smallest), self.plan.seed, until)
            known = failure.by_hash_seed and self._is_handled(failure)
            shown = failure if known else self._by_itself(failure, minimiser)
            if shown is None:  # nor would anything smaller show it
                smallest, minimised = failure, False
            else:
                smallest, minimised = (shown, True) if known else minimiser.minimise(shown, self._is_handled)
            if smallest.by_hash_seed and smallest is not failure and not self._agree_alike(smallest):
                smallest, minimised = failure, False  # on its way it has become something else
            if time.monotonic() > self.until:
                self._emit(CaseSkipped("findings", "minimised no further within the time limit"))
            smallest, confirmed = (smallest, ConfirmationRecord(NOT_TRIED)) if known else confirm(smallest, minimiser)
            name = fingerprint(smallest)
            entry = self.plan.baseline.get(name)
            known_group = group_key(smallest)
            if entry is None and known_group in self._known_groups:
                entry = self._known_groups[known_group]
            if entry is not None:
                self._is_seen(entry, key, smallest)
                self._emit(GroupSettled(key, entry.fingerprint))
                continue
            if name not in self._found:
                found = self._found[name] = self._record(group, smallest, confirmed, minimised, None)
            else:  # another way to the same defect
                found = replace(self._found[name], occurrences=group.occurrences, also=list(group.seen), groups=[key])
            self._tell(FindingReported(found, key, known_group), self._emit)

    def _by_itself(self, failure: Failure, minimiser: Minimiser) -> Failure | None:
        """Return ``failure`` as it shows where nothing is left of earlier trials; None if it does not.

        What fails only after another call of the op becomes a failure of both.
        """
        if failure.costly or minimiser.attempt(failure.trial, failure) is not None:
            return failure
        return minimiser.after_another(failure, self._outcomes.others(failure.trial))

    def _looked_into(self, failure: Failure) -> Failure:
        """Return ``failure``, marked if it shows again on ranks that have hash seeds of their own, and not with one."""
        of_ranks = is_of_several_ranks(failure) and failure.trial.mesh.backend != "simulated"
        if not of_ranks or time.monotonic() > self.until or not self._agree_alike(failure):
            return failure
        again = Minimiser(self._run, None, self.plan.seed, self.until).replay(
            failure.trial, replace(failure, by_hash_seed=True)
        )
        if again is None:
            return failure
        self._find_entry_alike(again)
        return replace(again, drawn=failure.drawn)

    def _find_entry_alike(self, failure: Failure) -> None:
        """Take ``failure`` for a known finding of the same op that one hash seed avoids as well, if there is one."""
        key = group_key(failure)
        for name, shown in self._replayed.items():
            if key in self._known_groups:
                return
            entry = self.plan.baseline.get(name)
            same = is_of_several_ranks(shown) and group_key(replace(shown, by_hash_seed=True)) == key
            if same and entry is not None and self._agree_alike(shown):
                self._known_groups[key] = entry

    def _agree_alike(self, failure: Failure) -> bool:
        """Return whether ranks that all have one hash seed do the same in its trial; False without such.

        What they fail of then is a defect of its own, which their differences only hid. Not so of wrong results: they
        have to pass, since ranks may choose differently and be wrong by a rule that all of them have.
        """
        if self._run_alike is None:
            return False
        observation = self._run_alike(failure.trial)
        verdict = judge(observation, make_reference(failure.trial.case))
        if verdict.kind is VerdictKind.TOOL_ERROR or is_of_several_ranks(Failure(failure.trial, observation, verdict)):
            return False
        return shows_on_some_ranks(failure) or verdict.kind is VerdictKind.PASS

    def _tell(self, reported: FindingReported, tell: Listener) -> None:
        """Report what a group of failures turned out to be."""
        name = reported.finding.fingerprint
        for key in (reported.group, reported.became):
            self._handled.setdefault(key, name)
        self._told[name] += reported.finding.occurrences
        tell(reported)

    def _is_seen(self, entry: BaselineEntry, key: str, failure: Failure) -> None:
        """Take a group for a known finding, which another op may have shown than that of its entry."""
        self._known_groups[key] = entry
        if entry.fingerprint not in self._replayed:
            self._replayed[entry.fingerprint] = failure
            self.known = [known for known in self.known if known.fingerprint != entry.fingerprint]

    def _recall_group(self, key: str) -> bool:
        """Take what the group ``key`` turned out to be from the past; return whether that is known."""
        settled = self._past.groups.get(key)
        if settled is None:
            return False
        if settled.finding is None:
            entry = self.plan.baseline.get(settled.entry)
            assert entry is not None, f"{settled.entry} is not in the baseline that the run began with"
            self._is_seen(entry, key, self._outcomes.failures.groups[key].smallest)
            return True
        self._found.setdefault(settled.finding.fingerprint, settled.finding)
        self._tell(FindingReported(settled.finding, key, settled.became), self._recall)
        return True

    def _record(
        self,
        group: Group,
        smallest: Failure,
        confirmed: ConfirmationRecord,
        minimised: bool,
        entry: BaselineEntry | None,
    ) -> FindingRecord:
        family = self.plan.families[smallest.trial.case.family]
        cause = _BY_HASH_SEED if smallest.by_hash_seed else family.likely_cause(smallest.trial, smallest.verdict)
        in_time = time.monotonic() < self.until
        return finding_record(
            group, smallest, confirmed, minimised, entry, family.name, cause, in_time, self.plan.imports,
            memory_limit=self.plan.rank_memory,
        )  # fmt: skip

    def _generator(self, failure: Failure) -> Callable[[MeshSpec], SearchStrategy[OpCase]] | None:
        """Return what draws cases like that of ``failure``; None for a family whose cases are small as drawn."""
        family = self.plan.families[failure.trial.case.family]
        if not family.shrinks:
            return None
        # the same ops as when it was drawn, so that the same choices draw the same case
        ops = self.plan.selected[family.name] if failure.drawn is None else failure.drawn.ops
        return lambda mesh: family.cases(DrawContext(mesh, self.plan.dtypes, ops))
