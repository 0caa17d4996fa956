"""Resumes a run that was cut short, and merges the shards of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from verifier.campaign.history import Past
from verifier.campaign.recorded import record
from verifier.campaign.request import Request, make_plan
from verifier.core.parts import RunPart
from verifier.core.wording import import_options, plural
from verifier.events import Event, Listener, RunResumed
from verifier.gate.baseline import Baseline
from verifier.meshes.torchrun.controller import Cluster
from verifier.planning.boundary import OutsideError, needs_imports
from verifier.records.commands import resume_text
from verifier.records.files import OtherVersionError, RunFormatError, out_option, read_bytes, read_record
from verifier.records.schema import INTERRUPTED, RunHeader, RunRecord
from verifier.runs.journal import JOURNAL_NAME, RECORD_NAME, Journal, is_open, read_journal
from verifier.runs.store import RunStore

__all__ = ["merge", "resume", "resume_notice", "run_to_resume"]

_MOST_NAMED = 100
"""The most missing shards that a message names, because a record may name any number of shards."""
BaselineLoader = Callable[[Path], Baseline]


# ------------------------------------------------------------------------------------------------------------- resuming
def run_to_resume(store: RunStore) -> str:
    """Return the id of the newest run on meshes that was killed or interrupted and that no process is resuming.

    Raises
    ------
    ValueError
        If there is none; the message says what the store has.
    """
    going_on = 0
    damaged: dict[str, RunFormatError] = {}  # it is not known whether these were cut short
    for run_id in store.ids():
        path = store.path(run_id, JOURNAL_NAME)
        try:
            # without a line, the run was killed before its header was written, and nothing is lost
            if not path.is_file() or _nothing_left(store, run_id) or b"\n" not in read_bytes(path):
                continue
            resumable = bool(read_journal(path).header.request)
        except OtherVersionError:
            continue
        except RunFormatError as error:
            damaged[run_id] = error
            continue
        if resumable and not is_open(path):
            if any(not store.path(one).exists() for one in damaged):
                raise ValueError(f"{_damage(store, damaged)}; or go on with run {run_id}: --resume {run_id}")
            return run_id
        going_on += resumable
    if damaged:
        raise ValueError(_damage(store, damaged))
    others = f", and {going_on} still going on" if going_on else ""
    raise ValueError(f"no run in {store.directory} was cut short, of {len(store.ids())}{others}; nothing to resume")


def _damage(store: RunStore, damaged: Mapping[str, RunFormatError]) -> str:
    """Return the message on runs that cannot be read and may have been cut short, newest first."""
    run_id, error = next(iter(damaged.items()))
    others = f", as are {len(damaged) - 1} older ones" if len(damaged) > 1 else ""
    return (
        f"run {run_id} is damaged{others}, and may have been cut short: {error}; mend the file, or move "
        f"{store.directory / run_id} away and run again"
    )


def _nothing_left(store: RunStore, run_id: str) -> str:
    """Return why a run cannot be resumed; empty if it was killed or ended by Ctrl-C."""
    try:
        run = read_record(store.path(run_id))
    except FileNotFoundError:
        return ""
    if run.complete or run.rules is not None:
        return "has finished"
    if any(one.reason == INTERRUPTED for one in run.untested):
        return ""
    # A resumed run would stop at once, because its past time counts; a merged run has all that its shards tried.
    return "was neither killed nor interrupted: its time was up, and a longer --time-limit is another run"


def _refuse_ended(store: RunStore, run_id: str) -> None:
    if run_id in store.ids() and (why := _nothing_left(store, run_id)):
        raise ValueError(f"run {run_id} {why}; there is nothing to resume")


def resume(
    run_id: str,
    store: RunStore,
    load_baseline: BaselineLoader,
    listeners: Sequence[Listener] = (),
    baseline: Path | None = None,
    cluster: Cluster | None = None,
    imports: Sequence[str] = (),
    jobs: int | None = None,
) -> tuple[RunRecord, Path]:
    """Resume the run ``run_id``, and return its record and the path of its baseline.

    Parameters
    ----------
    baseline
        The path of the baseline, if it was moved.
    cluster
        Where the ranks are now, if torchrun started them.
    imports
        The modules to import; nothing is imported only because a journal names it.
    jobs
        How many trials run at a time; None for the default.

    Raises
    ------
    ValueError
        If there is no such run, it was neither killed nor interrupted, another process is resuming it, or something
        that decides what it does has changed.
    """
    _refuse_ended(store, run_id)
    writer, journal = store.reopen_run(run_id)
    with writer:
        _refuse_ended(store, run_id)  # it may have finished before we got the journal
        header = journal.header
        request = _with_imports(_request(header), imports, f"python -m verifier run --resume {run_id}", store.root)
        path = baseline or Path(request.baseline)
        plan = make_plan(replace(request, jobs=jobs), load_baseline(path), cluster)
        _check_same(header, plan.header, f"run {run_id} cannot be resumed", ("when it began", "now"))
        return record(replace(plan, header=header), store, listeners, Past.of_run(journal), writer), path


def resume_notice(say: Callable[[str], None]) -> Listener:
    """Return a listener that says what a resumed run keeps, and what was in flight when it was cut short."""

    def listen(event: Event) -> None:
        if isinstance(event, RunResumed):
            kept = plural(event.trials, "finished trial is", "finished trials are")
            say(f"resumed: {kept} kept; in flight when it ended: {event.in_flight or 'nothing'}")
            if event.torn:
                say("the last line of the journal was cut off in the middle; it is left out")

    return listen


# -------------------------------------------------------------------------------------------------------------- merging
@dataclass(frozen=True)
class _Part:
    name: str
    shard: RunPart
    journal: Journal
    run: RunRecord


def merge(
    runs: Sequence[str],
    store: RunStore,
    load_baseline: BaselineLoader,
    command: str,
    listeners: Sequence[Listener] = (),
    baseline: Path | None = None,
    imports: Sequence[str] = (),
) -> tuple[RunRecord, Path]:
    """Merge the shards of a run into a new run, and return its record and the path of its baseline.

    Their trials are not run again. Their failures are grouped, minimised and confirmed together, because the smallest
    failure of a group is known only now.

    Parameters
    ----------
    runs
        Ids of runs in ``store``, or the folders of runs.
    imports
        The modules to import, as the shards did; nothing is imported only because a journal names it.

    Raises
    ------
    ValueError
        If they are not all the shards of one run, or one has not finished.
    """
    parts = sorted((_part(name, store) for name in runs), key=lambda part: part.shard)
    if not parts:
        raise ValueError("merge joins the shards of a run; none was named")
    first = parts[0]
    header = first.journal.header
    for part in parts[1:]:
        problem = f"{first.name} and {part.name} are not shards of one run"
        _check_same(header, part.journal.header, problem, (f"in {first.name}", f"in {part.name}"))
    _check_whole(parts)
    again = shlex.join(["python", "-m", "verifier", "merge", *runs])
    request = replace(_with_imports(_request(header), imports, again, store.root), shard=None, command=command)
    path = baseline or Path(request.baseline)
    plan = make_plan(request, load_baseline(path))
    _check_same(header, plan.header, "the shards cannot be merged", ("when they were made", "here"))
    past = Past.of_shards([part.journal for part in parts], all(part.run.complete for part in parts))
    # shard 1 of 1: steering sees every case, as it did in each shard
    return record(replace(plan, time_limit=None, shard=RunPart(1, 1)), store, listeners, past), path


def _part(name: str, store: RunStore) -> _Part:
    folder = store.directory / name if name in store.ids() else Path(name)
    if not (folder / JOURNAL_NAME).is_file():
        store.load(name)  # raises, with the nearest run id
        raise ValueError(f"{name} has no {JOURNAL_NAME}; name the folder of a run, or an id in {store.directory}")
    journal = read_journal(folder / JOURNAL_NAME)
    header = journal.header
    if not header.shard:
        raise ValueError(f"run {header.id} is no shard; make each part with run --shard I/N, and merge those")
    if not (folder / RECORD_NAME).is_file():
        raise ValueError(
            f"run {header.id}, shard {header.shard}, did not finish; first "
            f"{resume_text(header.id, header.imports)}, where it was made"
        )
    return _Part(header.id, RunPart.parse(header.shard), journal, read_record(folder / RECORD_NAME))


def _check_whole(parts: Sequence[_Part]) -> None:
    """Raise a ValueError unless every shard is there exactly once."""
    count = parts[0].shard.count
    names: dict[RunPart, str] = {}
    for part in parts:
        if part.shard.count != count:
            raise ValueError(
                f"{parts[0].name} is shard {parts[0].shard} and {part.name} is shard {part.shard}; N has to be the same"
            )
        if part.shard in names:
            raise ValueError(f"shard {part.shard} was given twice, as {names[part.shard]} and as {part.name}")
        names[part.shard] = part.name
    if missing := count - len(names):
        absent = (str(shard) for index in range(1, count + 1) if (shard := RunPart(index, count)) not in names)
        more = ", …" if missing > _MOST_NAMED else ""
        listed = ", ".join(islice(absent, _MOST_NAMED))
        raise ValueError(f"{missing} of {count} shards missing: {listed}{more}; merge needs all of them")


# ------------------------------------------------------------------------------------------------------------- requests
def _request(header: RunHeader) -> Request:
    """Return the request of a run."""
    if not header.request:
        raise ValueError(f"run {header.id} does not say what was asked for: it is no run on meshes, or an older one")
    try:
        return msgspec.convert(header.request, Request)
    except msgspec.ValidationError as error:
        raise RunFormatError(f"run {header.id}: what was asked for cannot be read: {error}") from error


def _with_imports(request: Request, imports: Sequence[str], command: str, folder: Path) -> Request:
    """Return ``request`` with the command line's imports; a message adds missing ones to ``command``."""
    if missing := needs_imports(request.imports, imports):
        raise OutsideError(
            f"the run imported {', '.join(missing)}; nothing that a journal names is imported, so say it: "
            f"{command} {import_options(request.imports)}{out_option(folder)}"
        )
    return replace(request, imports=list(imports))


def _check_same(one: RunHeader, other: RunHeader, problem: str, where: tuple[str, str]) -> None:
    """Raise a ValueError that names the first difference between two runs that decides what a run does."""
    ours, theirs = _decisive(one), _decisive(other)
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            values = " and ".join(
                f"{side.get(name)!r} {place}" for side, place in zip((ours, theirs), where, strict=True)
            )
            raise ValueError(f"{problem}: {name} is {values}")


def _decisive(header: RunHeader) -> dict[str, Any]:
    asked = {name: value for name, value in header.request.items() if name not in ("shard", "command", "baseline")}
    return {
        **asked,
        "seed": header.seed,
        "families": header.families,
        "meshes": header.meshes,
        "dtypes": header.dtypes,
        "max_examples": header.max_examples,
        **{f"the version of {name}": version for name, version in header.versions.items()},
        **{f"the digest of {name}": digest for name, digest in header.digests.items()},
    }
