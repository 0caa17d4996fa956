"""Events as lines of a journal."""

from __future__ import annotations

import time
from collections.abc import Callable

from verifier import events
from verifier.cases import format_placements
from verifier.journal import RunWriter
from verifier.record_files import version_first

__all__ = ["FINDING", "journal_listener"]

FINDING = "finding"
"""Name of the lines that hold a whole finding."""


def journal_listener(writer: RunWriter, clock: Callable[[], float] = time.monotonic) -> events.Listener:
    """Return a listener that writes each event to ``writer``: trials in a few words, findings whole.

    Every line has ``event`` and ``at``, the seconds since this function was called. Tensors occur only in findings, by
    value.
    """
    start = clock()

    def listen(event: events.Event) -> None:
        writer.append({"event": _NAMES[type(event)], "at": round(clock() - start, 4), **_describe(event)})

    return listen


_NAMES: dict[type, str] = {
    events.RunStarted: "run started",
    events.MeshStarted: "mesh started",
    events.TrialFinished: "trial",
    events.CaseSkipped: "skipped",
    events.PoolRestarted: "pool restarted",
    events.FindingReported: FINDING,
    events.RunFinished: "run finished",
}


def _describe(event: events.Event) -> dict[str, object]:
    match event:
        case events.RunStarted(header):
            return {"id": header.id}
        case events.MeshStarted(mesh, family, examples):
            return {"mesh": str(mesh), "family": family, "examples": examples}
        case events.TrialFinished(observation, verdict, rows):
            trial = observation.trial
            named = ", ".join(f"{name}={placements}" for name, placements in rows)
            return {
                "op": trial.case.op,
                "mesh": str(trial.mesh),
                "combination": named or ", ".join(map(format_placements, trial.combination)),
                "verdict": verdict.kind.value,
                "seconds": round(observation.seconds, 6),
                **({"message": verdict.message} if verdict.message else {}),
            }
        case events.CaseSkipped(what, reason, count):
            return {"what": what, "reason": reason, "count": count}
        case events.PoolRestarted(mesh, reason, seconds):
            return {"mesh": str(mesh), "reason": reason, "seconds": seconds}
        case events.FindingReported(finding):
            return {"finding": version_first(finding)}
        case events.RunFinished(seconds, complete):
            return {"seconds": seconds, "complete": complete}
