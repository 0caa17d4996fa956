"""What the tests of one process did with ``verify``, as a run: its events, and the failures that become findings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import ModuleType

from hypothesis import currently_in_test_context, settings
from hypothesis.control import current_build_context

from verifier.calls.verifier import likely_cause
from verifier.core.arguments import tensor_arguments
from verifier.core.case import OpCase
from verifier.core.versions import versions
from verifier.core.wording import plural
from verifier.events import CaseSkipped, Event, FindingReported, RunFinished, RunStarted, TrialFinished
from verifier.execution.imports import modules_of_rules, own_rules
from verifier.execution.registrations import Registered, registered_rules
from verifier.findings.failures import Failure
from verifier.findings.grouping import Collector, Group, fingerprint
from verifier.findings.record import finding_record
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry
from verifier.records.files import new_run_id
from verifier.records.schema import (
    CONFIRMED,
    NOT_RUN,
    OUT_OF_TIME,
    UNCONFIRMED,
    ConfirmationRecord,
    KnownRecord,
    RunHeader,
    RunRecord,
)
from verifier.runs.graph import RedistributionGraph
from verifier.runs.merging import merge_records
from verifier.runs.revision import BASELINE, revision
from verifier.runs.store import RunStore
from verifier.runs.summary import Summary

__all__ = ["SessionRecord", "store_session"]

SCRIPTS_LIMIT = 30.0
"""Seconds after the tests in which scripts of findings are begun; a script takes as long as starting its ranks does."""


@dataclass
class _Raised:
    """The last failure of a group that ended a test; ``final`` if Hypothesis had shrunk the case by then."""

    failure: Failure
    final: bool


@dataclass
class SessionRecord:
    """Listener that makes a run of all calls of ``verify`` in one process.

    Parameters
    ----------
    command
        The command line of the test session.
    seed
        Of the sampled combinations, the splits and the cotangents.
    imports
        What the ranks import, as far as it is known; the record has what it is at its end.
    baseline
        Tells which findings are known.
    """

    command: str
    seed: int = 0
    imports: tuple[str, ...] = ()
    baseline: Baseline = field(default_factory=Baseline)

    def __post_init__(self) -> None:
        self._header: RunHeader | None = None
        self._summary = Summary(RedistributionGraph())
        self._collector = Collector()
        self._raised: dict[str, _Raised] = {}
        self._rules: Mapping[str, Registered] = {}
        self._own_rules: set[str] = set()
        self._modules: dict[str, ModuleType] = {}
        self._began = time.monotonic()

    @property
    def used(self) -> bool:
        """True once a trial or anything else was reported."""
        return self._header is not None

    def __call__(self, event: Event) -> None:
        """Take in an event; the first one starts the run."""
        header = self._start()
        self._note_rules()
        if isinstance(event, TrialFinished):
            trial = event.observation.trial
            for known, name in (
                (header.meshes, str(trial.mesh)),
                (header.families, trial.case.family or "tests"),
                *((header.dtypes, name) for name in _dtypes(trial.case)),
            ):
                if name not in known:
                    known.append(name)
            header.device = trial.mesh.device
        self._summary(event)

    def _note_rules(self) -> None:
        """Take note of the rules that are registered now: a test may take them back at its end."""
        rules = registered_rules()
        if rules is not self._rules:
            self._rules = rules
            self._own_rules.update(own_rules())
            self._modules |= {module.__name__: module for module in modules_of_rules()}

    def failed(self, failure: Failure, *, raised: bool) -> None:
        """Take in a bad verdict; of those of a fingerprint that were raised the last is kept.

        Hypothesis raises what it has shrunk a failure to last of all, so that is the smallest.
        """
        self._collector.add(failure)
        if raised:
            final = currently_in_test_context() and current_build_context().is_final
            self._raised[fingerprint(failure)] = _Raised(failure, final)

    def record(self, complete: bool) -> RunRecord | None:
        """Return the run, with a finding for each group of failures; None if ``verify`` was never used.

        Parameters
        ----------
        complete
            False if the test session was interrupted.
        """
        if self._header is None:
            return None
        self._header.imports[:] = self.imports
        self._note_rules()
        self._header.own_rules = sorted(self._own_rules)
        self._header.digests = {BASELINE: self.baseline.digest, **revision(self.imports, self._modules.values())}
        known: dict[str, int] = {}
        until = time.monotonic() + (SCRIPTS_LIMIT if complete else 0.0)
        for group in self._collector.groups.values():
            name = fingerprint(group.smallest)
            entry = self._entry(group)
            if entry is not None:
                known[entry.fingerprint] = known.get(entry.fingerprint, 0) + group.occurrences
            raised = self._raised.get(name)
            smallest = raised.failure if raised is not None else group.smallest
            trial, imports = smallest.trial, smallest.imports
            in_time = time.monotonic() < until
            confirmed = ConfirmationRecord(CONFIRMED, trial.mesh.backend, trial.mesh.world_size)
            if trial.mesh.backend == "simulated":
                confirmed = ConfirmationRecord(UNCONFIRMED, why="ranks were simulated")
            try:
                finding = finding_record(
                    group,
                    smallest,
                    confirmed,
                    minimised=raised is not None and raised.final,
                    entry=entry,
                    family=trial.case.family or "tests",
                    cause=likely_cause(trial, smallest.verdict),
                    imports=imports,
                    script_status="" if in_time else f"{NOT_RUN}: {OUT_OF_TIME}",
                )
            except TypeError as error:  # a test may pass arguments that no file can hold
                self._summary(CaseSkipped(f"finding {name} in {trial.case.op}", f"cannot be stored: {error}"))
                continue
            self._summary(FindingReported(finding))
        self._summary(RunFinished(time.monotonic() - self._began, complete))
        return self._summary.record(
            [KnownRecord(name, "known", f"in {plural(n, 'trial')}") for name, n in known.items()]
        )

    def _entry(self, group: Group) -> BaselineEntry | None:
        """Return the known finding that ``group`` is, by its fingerprint or by what its failures look like."""
        assert self._header is not None
        known = self.baseline.about(self._header.imports, self._header.own_rules)
        looks_like = (entry for entry in known.entries if group.key in entry.groups)
        return known.get(fingerprint(group.smallest)) or next(looks_like, None)

    def _start(self) -> RunHeader:
        if self._header is None:
            self._began = time.monotonic()
            self._header = RunHeader(
                id=new_run_id(),
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                seed=self.seed,
                profile=settings.get_current_profile_name(),
                families=[],
                meshes=[],
                dtypes=[],
                device="cpu",
                max_examples=settings().max_examples,
                time_limit=None,
                imports=list(self.imports),
                versions=versions(),
                command=self.command,
            )
            self._summary(RunStarted(self._header))
        return self._header


def _dtypes(case: OpCase) -> list[str]:
    """Return the floating dtypes among the tensors of ``case``, as in a campaign's header."""
    dtypes = [tensor.dtype for tensor in tensor_arguments(case.args, case.kwargs)]
    return [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]


def store_session(records: list[RunRecord], store: RunStore, complete: bool) -> RunRecord:
    """Merge what the processes of a test session did, write it as one run, and return that.

    Parameters
    ----------
    complete
        False if a process ended without handing over what it did.

    Raises
    ------
    RunStoreError
        If the file system refuses.
    """
    merged = merge_records(records)
    run = replace(merged, header=replace(merged.header, id=new_run_id()), complete=merged.complete and complete)
    with store.open_run(run.header) as writer:
        graph = RedistributionGraph.from_record(run.graph)
        graph.write_json(store.path(run.header.id, "graph.json"))
        graph.write_graphml(store.path(run.header.id, "graph.graphml"))
        writer.finish(run)
    return run
