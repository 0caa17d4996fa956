"""A resumed campaign tells what one campaign tells: what its past has is recalled, and the rest is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies.embedding import FAMILY
from verifier.campaign.campaign import Campaign
from verifier.campaign.history import Past
from verifier.campaign.plan import Plan
from verifier.core.case import MeshSpec, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase
from verifier.events import RunFinished, RunResumed, TrialFinished, TrialRepeated
from verifier.records.schema import RunHeader
from verifier.runs.journal import read_journal
from verifier.runs.journal_lines import journal_listener
from verifier.runs.store import RunStore

MESH = MeshSpec((2,))
HEADER = RunHeader("run", "", 0, "dev", [FAMILY.name], [str(MESH)], ["float64"], "cpu", 3, None, [], {}, "")
PLAN = Plan(
    HEADER, {FAMILY.name: FAMILY}, {FAMILY.name: FAMILY.ops}, (MESH,), (torch.float64,), seed=0, max_examples=4,
    combinations=8, time_limit=None,
)  # fmt: skip
REFUSED = Raised(Phase.FORWARD, "NotImplementedError", "no strategy", "propagate (_sharding_prop.py)", refusal=True)


class Refusing:
    """Stands for pools whose ranks refuse every trial, or compute too long for it; keeps what was tried."""

    def __init__(self) -> None:
        self.tried: list[Trial] = []
        self.on_restart = None

    def of(self, _: MeshSpec) -> Refusing:
        return self

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run_alone(self, trial: Trial) -> Observation:
        raise AssertionError("nothing fails")

    def run(self, trials: Sequence[Trial], *, fresh: bool = False) -> Iterator[Observation]:
        for trial in trials:
            self.tried.append(trial)
            reports = tuple(ProcessReport((rank,), Phase.FORWARD, REFUSED) for rank in range(MESH.world_size))
            fate = Fate.SLOW if trial.cotangents else Fate.COMPLETED
            yield Observation(trial, fate, reports, "after 50 s" * (fate is Fate.SLOW))


def told(event: Any) -> object:
    """Return what two campaigns have to tell alike: not the tensors, which are drawn again, nor the seconds."""
    match event:
        case TrialFinished(observation, verdict, rows, position):
            return position, observation.fate, observation.detail, verdict, rows
        case RunFinished(complete=complete):
            return complete
        case _ if hasattr(event, "case"):
            return event.number, event.case.op, event.digest
        case _:
            return replace(event, recalled=False)


def run(store: RunStore, lines: int | None, jobs: int = 1) -> tuple[list[Any], list[Trial], list[dict[str, Any]]]:
    """Return what a campaign tells, tries and writes; with ``lines`` it goes on with a journal of the first ones."""
    if lines is None:
        writer, past = store.open_run(HEADER), Past()
    else:
        path = store.path(HEADER.id, "journal.jsonl")
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
        writer, journal = store.reopen_run(HEADER.id)
        past = Past.of_run(journal)
    events, pools = [], [Refusing() for _ in range(jobs)]
    with writer:
        write = journal_listener(writer)
        told = lambda event: (events.append(event), write(event))  # type: ignore[func-returns-value]  # noqa: E731
        Campaign(PLAN, pools[0], told, past, beside=pools[1:]).run()  # type: ignore[arg-type]
    return events, [trial for one in pools for trial in one.tried], read_journal(writer.journal_path).events


def plain(lines: Sequence[dict[str, Any]], *but: str) -> list[dict[str, Any]]:
    times = ("at", "seconds")
    return [
        {name: value for name, value in line.items() if name not in times} for line in lines if line["event"] not in but
    ]


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_resumed_campaign_is_the_same_campaign(tmp_path: Path, part: float, jobs: int) -> None:
    store = RunStore(tmp_path)
    whole, tried, lines = run(store, None)
    assert not any(event.recalled for event in whole)
    finished = [event for event in whole if isinstance(event, TrialFinished)]
    assert len(tried) == len(finished) > 4
    again, rest, written = run(store, 1 + int(part * (len(lines) - 1)), jobs)  # a header, and not the last line
    others = [event for event in again if not isinstance(event, RunResumed | TrialRepeated)]
    assert list(map(told, others)) == list(map(told, whole))
    recalled = [event for event in again if isinstance(event, TrialFinished) and event.recalled]
    assert len(recalled) + len(rest) == len(finished)
    assert recalled or part < 0.5
    assert rest or part > 0.5
    # what is not tried of a case that had begun is told to the summary, and not written behind its first trials
    untold = ("run resumed", "trial repeated", "skipped", "rules claimed")
    assert plain(written, *untold) == plain(lines, *untold)
