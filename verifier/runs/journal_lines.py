"""Converts events to lines of a journal, and the line of a trial back to its observation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

import msgspec

from verifier import events
from verifier.core.case import Trial
from verifier.core.observation import Executed, Fate, Issued, Observation, ProcessReport, Redistribution
from verifier.core.placement_text import format_placements
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.records.files import RunFormatError, version_first
from verifier.runs.coverage import ran_at
from verifier.runs.journal import FINDING, RunWriter

__all__ = ["NAMES", "describe_outcome", "journal_listener", "load_observation"]

NAMES: dict[type, str] = {
    events.RunStarted: "run started",
    events.RunResumed: "run resumed",
    events.MeshStarted: "mesh started",
    events.EntryStarted: "entry",
    events.CaseStarted: "case",
    events.RulesClaimed: "rules claimed",
    events.TrialRepeated: "trial repeated",
    events.TrialFinished: "trial",
    events.CaseSkipped: "skipped",
    events.PoolRestarted: "pool restarted",
    events.GroupStarted: "minimising",
    events.GroupSettled: "settled",
    events.FindingReported: FINDING,
    events.RunFinished: "run finished",
}
"""The name of each event in a line."""


def journal_listener(
    writer: RunWriter, clock: Callable[[], float] = time.monotonic, before: float = 0.0
) -> events.Listener:
    """Return a listener that writes each event to ``writer``: trials as a summary, findings completely.

    Every line has ``event`` and ``at``, the seconds since this call plus ``before``. Only findings have tensors, by
    value. If the writer continues a journal, recalled events are left out, because the journal already has them.
    """
    start = clock() - before

    def listen(event: events.Event) -> None:
        if not (event.recalled and writer.past is not None):
            writer.append({"event": NAMES[type(event)], "at": round(clock() - start, 4), **_describe(event)})

    return listen


def _describe(event: events.Event) -> dict[str, object]:
    match event:
        case events.RunStarted(header):
            return {"id": header.id}
        case (
            events.RunResumed() | events.EntryStarted() | events.RulesClaimed() | events.CaseSkipped()
            | events.GroupStarted() | events.GroupSettled() | events.RunFinished()
        ):  # fmt: skip
            return {name: getattr(event, name) for name in event.__match_args__}
        case events.MeshStarted(mesh, family, examples):
            return {"mesh": str(mesh), "family": family, "examples": examples}
        case events.CaseStarted(number, case, mesh, trials, digest):
            return {"case": number, "op": case.op, "mesh": str(mesh), "trials": trials, "digest": digest}
        case events.TrialRepeated(trial, rows, position):
            return {"trial": position, **_describe_trial(trial, rows)}
        case events.TrialFinished(observation, verdict, rows, position):
            return {
                **({"trial": position} if position else {}),
                **_describe_trial(observation.trial, rows),
                **describe_outcome(observation, verdict),
            }
        case events.PoolRestarted(mesh, reason, seconds):
            return {"mesh": str(mesh), "reason": reason, "seconds": seconds}
        case events.FindingReported(finding, group, became):
            return {**({"group": group, "became": became} if group else {}), "finding": version_first(finding)}


def _describe_trial(trial: Trial, rows: tuple[tuple[str, str], ...]) -> dict[str, object]:
    named = ", ".join(f"{name}={placements}" for name, placements in rows)
    combination = named or ", ".join(map(format_placements, trial.combination))
    return {"op": trial.case.op, "mesh": str(trial.mesh), "combination": combination}


# ---------------------------------------------------------------------------------------------- what listeners ask for
def describe_outcome(observation: Observation, verdict: Verdict, every_rank: bool = False) -> dict[str, object]:
    """Return the fields of a line from which :func:`load_observation` makes the observation and the verdict again.

    Without ``every_rank``, at most three reports of a bad verdict are kept, and none of another.
    """
    return {
        "verdict": verdict.kind.value,
        "seconds": round(observation.seconds, 6),
        **({"message": verdict.message} if verdict.message else {}),
        **_describe_observation(observation, verdict, every_rank),
    }


def _describe_observation(observation: Observation, verdict: Verdict, every_rank: bool) -> dict[str, object]:
    """Return the parts of an observation that listeners and the grouping of failures need, without tensors.

    The steps of redistributions are those of one rank, as in the graph. A bad verdict has at most three reports: the
    first, the first of a process that raised, and the first with another choice of rules.
    """
    reports = [report for report in observation.reports if report is not None]
    shares: dict[str, float] = {}
    for report in reports:
        for share, seconds in report.seconds:
            shares[share] = shares.get(share, 0.0) + seconds
    kept: list[ProcessReport] = reports if every_rank else []
    if verdict.kind.bad and not every_rank:
        raised = [report for report in reports if report.raised is not None]
        unlike = [report for report in reports if report.executed != reports[0].executed]
        telling = {id(report) for report in (*reports[:1], *raised[:1], *unlike[:1])}
        kept = [report for report in reports if id(report) in telling]
    described: dict[str, object] = {
        "judged": _given(replace(verdict, kind=VerdictKind.PASS, message=""), ("kind",)),
        "fate": "" if observation.fate is Fate.COMPLETED else observation.fate.value,
        "detail": observation.detail,
        "signals": [*observation.signals],
        "shares": {share: round(seconds, 6) for share, seconds in shares.items()},
        "steps": [[*_step(step)] for step in reports[0].redistributions] if reports else [],
        "ran": ran_at(observation),
        "reports": [_given(report, _NOT_KEPT) for report in kept],
    }
    return {name: value for name, value in described.items() if value}


_NOT_KEPT = ("differences", "contributions", "redistributions", "collectives", "unchecked", "seconds", "cache_misses")


def _given(record: Verdict | ProcessReport, but: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as plain values."""
    plain: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name not in but and (field.default is MISSING or value != field.default):
            plain[field.name] = msgspec.to_builtins(value)
    return plain


def _step(step: Redistribution) -> tuple[object, ...]:
    """Return all fields of a step, with the two ends of its path one after the other, and without last defaults."""
    before = (step.phase, step.source, step.target, step.mesh_dim, step.collective, step.bytes, *step.path)
    rest = [(getattr(step, field.name), field.default) for field in fields(step)[7:]]
    while rest and rest[-1][0] == rest[-1][1]:
        rest.pop()
    return (*before, *(_plain(value) for value, _ in rest))


def _plain(value: object) -> object:
    """Return the fields of a collective in place of it, and seconds to the microsecond."""
    if isinstance(value, tuple):
        return [[one.name, [*one.ranks], one.dtype, one.sent, one.received] for one in value]
    return round(value, 6) if isinstance(value, float) else value


def _load_step(fields_of_step: Sequence[Any]) -> Redistribution:
    phase, source, target, mesh_dim, collective, size, begin, end, *whole = fields_of_step
    if len(whole) > _ISSUED:
        whole[_ISSUED] = tuple(
            Issued(name, tuple(map(int, ranks)), dtype, int(sent), int(received))
            for name, ranks, dtype, sent, received in whole[_ISSUED]
        )
    return Redistribution(Phase(phase), source, target, mesh_dim, collective, size, (begin, end), *whole)


_ISSUED = [field.name for field in fields(Redistribution)[7:]].index("issued")


def _executed(line: Mapping[str, Any], trial: Trial) -> tuple[Executed, ...]:
    """Return the placements on which DTensor ran the op of a trial whose reports are not kept."""
    ran = line.get("ran")
    return (Executed(Phase.FORWARD, None, trial.case.op, tuple(ran)),) if ran else ()


def load_observation(line: Mapping[str, Any], trial: Trial) -> tuple[Observation, Verdict]:
    """Return observation and verdict of ``trial`` from its line, with the parts that listeners and grouping need.

    Raises
    ------
    RunFormatError
        If :func:`journal_listener` does not write such a line for a trial.
    """
    try:
        judged = {"kind": line["verdict"], "message": line.get("message", ""), **line.get("judged", {})}
        verdict = msgspec.convert(judged, Verdict)
        steps = tuple(map(_load_step, line.get("steps", ())))
        reports = [msgspec.convert(report, ProcessReport) for report in line.get("reports", ())]
        seconds = tuple(line.get("shares", {}).items())
        if (steps or seconds) and not reports:
            reports = [ProcessReport((0,), Phase.DONE, executed=_executed(line, trial))]
        if reports:
            reports[0] = replace(reports[0], redistributions=steps, seconds=seconds)
        fate = Fate(line.get("fate", Fate.COMPLETED))
        observation = Observation(trial, fate, tuple(reports), line.get("detail", ""), line["seconds"])
        observation = replace(observation, signals=tuple(map(int, line.get("signals", ()))))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFormatError(f"trial {line.get('trial')} of the journal cannot be read: {error}") from error
    return observation, verdict
