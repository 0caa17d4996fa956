"""A run survives a kill, a full disk and another version of its file format, and is found again."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import plain_records
import pytest
import torch
from plain_records import a_finding, a_run
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation
from verifier.core.verdict import Verdict, VerdictKind
from verifier.events import (
    CaseSkipped,
    FindingReported,
    MeshStarted,
    PoolRestarted,
    RunFinished,
    RunStarted,
    TrialFinished,
)
from verifier.records.files import RunFormatError, RunStoreError, encode_record, new_run_id, read_finding
from verifier.records.schema import FindingRecord, RunHeader, RunRecord
from verifier.runs.journal import read_journal
from verifier.runs.journal_lines import journal_listener
from verifier.runs.store import RunStore

MESH = MeshSpec((2, 2))
TRIAL = Trial(
    OpCase("aten.embedding.default", "torch.nn.functional.embedding", (torch.full((4, 4), 12345.0),)),
    MESH,
    ((Shard(0), Replicate()),),
)


def a_header(run_id: str = "") -> RunHeader:
    return plain_records.a_header(id=run_id or new_run_id())


def finished(store: RunStore, run_id: str, *findings: FindingRecord) -> RunRecord:
    header = a_header(run_id)
    record = a_run(*findings, header=header)
    with store.open_run(header) as writer:
        writer.finish(record)
    return record


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "reports")


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow past ``size`` bytes, after writing what fits, as a full disk does."""
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old_limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)


# ---------------------------------------------------------------------------------------------------------------- ids
def test_ids_sort_by_time_and_differ() -> None:
    ids = [new_run_id() for _ in range(200)]
    assert len(set(ids)) == 200
    times = [run_id.rpartition("-")[0] for run_id in ids]
    assert times == sorted(times)
    assert all(re.fullmatch(r"\d{8}T\d{6}-\d{6}-[0-9a-f]{6}", run_id) for run_id in ids)


def test_id_that_exists_is_refused_and_its_run_left_alone(store: RunStore) -> None:
    record = finished(store, "2026")
    with pytest.raises(ValueError, match="run 2026 exists already"):
        store.open_run(a_header("2026"))
    assert store.load("2026") == record


# -------------------------------------------------------------------------------------------------------- write, read
def test_run_is_read_as_it_was_written(store: RunStore) -> None:
    record = finished(store, "2026", a_finding())
    assert store.load("2026") == record
    assert store.load(store.path("2026")) == record
    assert store.load(str(store.path("2026").parent)) == record
    assert store.path("2026").read_bytes().startswith(b'{"format_version":8,')
    assert sorted(path.name for path in store.path("2026").parent.iterdir()) == ["journal.jsonl", "run.json"]


def test_newest_skips_what_did_not_finish(store: RunStore) -> None:
    assert store.newest() is None
    finished(store, "2025")
    newest = finished(store, "2026")
    with store.open_run(a_header("2027")):
        assert store.newest() == newest
    assert store.ids() == ["2027", "2026", "2025"]


def test_newest_is_never_replaced_by_an_older_one_that_reads_better(store: RunStore) -> None:
    finished(store, "2025")
    finished(store, "2026")
    store.path("2026").write_text("{")
    with pytest.raises(RunFormatError, match="not JSON"):
        store.newest()


def test_load_suggests_the_nearest_run(store: RunStore) -> None:
    finished(store, "20260520T131502-048211-9f3a1c")
    with pytest.raises(ValueError, match=r"no run '20260520T1315'; did you mean '20260520T131502-.*'\?"):
        store.load("20260520T1315")
    store.open_run(a_header("2027")).close()
    with pytest.raises(ValueError, match=r"run 2027 did not finish: .*journal\.jsonl"):
        store.load("2027")


def test_field_of_another_type_is_named(store: RunStore) -> None:
    finished(store, "2026")
    path = store.path("2026")
    path.write_text(path.read_text().replace('"trials":412', '"trials":"many"'))
    with pytest.raises(RunFormatError, match=r"Expected `int`, got `str` - at `\$\.trials`"):
        store.load("2026")


# ------------------------------------------------------------------------------------------------------------ journal
def test_journal_has_one_line_per_event_as_it_happens(store: RunStore) -> None:
    header = a_header()
    with store.open_run(header) as writer:
        listen = journal_listener(writer, clock=iter(range(10)).__next__)
        for event in (
            RunStarted(header),
            MeshStarted(MESH, "embedding", 7),
            TrialFinished(
                Observation(TRIAL, Fate.COMPLETED, (), seconds=0.25),
                Verdict(VerdictKind.PASS),
                (("weight", "(S(0), R)"),),
            ),
            TrialFinished(Observation(TRIAL, Fate.HANG, (), seconds=5.0), Verdict(VerdictKind.HANG, "after 5 s"), ()),
            CaseSkipped("mesh 8", "only 4 ranks", 3),
            PoolRestarted(MESH, "HANG", 1.5),
            FindingReported(a_finding()),
            RunFinished(9.0, complete=False),
        ):
            listen(event)
            # Not a byte waits in this process: what a kill would leave behind is all of it.
            assert writer.journal_path.read_bytes().endswith(b"}\n")
        lines = [json.loads(line) for line in writer.journal_path.read_text().splitlines()]
    assert lines[0] == {"format_version": 8, "header": msgspec.to_builtins(header)}
    assert [line["at"] for line in lines[1:]] == list(range(1, 9))
    op = {"op": "aten.embedding.default", "mesh": "2x2"}
    place = {"combination": "weight=(S(0), R)"}
    assert lines[3] == {"event": "trial", "at": 3, **op, **place, "verdict": "PASS", "seconds": 0.25}
    assert lines[4]["combination"] == "(S(0), R)"
    assert lines[4]["message"] == "after 5 s"
    assert "12345" not in json.dumps(lines[1:7])
    assert [line["event"] for line in lines[5:]] == ["skipped", "pool restarted", "finding", "run finished"]
    assert lines[5]["count"] == 3
    assert lines[7]["finding"] == json.loads(encode_record(a_finding()))
    journal = read_journal(writer.journal_path)
    assert (journal.header, journal.events, journal.torn) == (header, lines[1:], False)


@pytest.mark.parametrize(
    "tail", [b'{"event":"tri', b'{"event":"trial","n":3}', b"\xc3"], ids=["half", "no newline", "byte"]
)
def test_torn_last_line_is_left_out(store: RunStore, tail: bytes) -> None:
    with store.open_run(a_header()) as writer:
        writer.append({"n": 1})
        writer.append({"n": 2})
    with writer.journal_path.open("ab") as file:
        file.write(tail)
    journal = read_journal(writer.journal_path)
    assert (journal.events, journal.torn) == ([{"n": 1}, {"n": 2}], True)


def test_line_that_is_broken_in_the_middle_is_no_journal(store: RunStore) -> None:
    with store.open_run(a_header()) as writer:
        writer.append({"n": 1})
    with writer.journal_path.open("ab") as file:
        file.write(b'{"n": \n{"n": 3}\n')
    with pytest.raises(RunFormatError, match=r"journal\.jsonl:3: not an event"):
        read_journal(writer.journal_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no header line"),
        ('{"format_version":5,"header":', "has no header line"),
        ('{"format_version":1,"header":{}}\n', "journal:1: format_version is 1"),
        ('{"format_version":5,"header":{}}\n', "journal:1: not a RunHeader"),
    ],
)
def test_journal_without_our_header_says_why(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "journal"
    path.write_text(content)
    with pytest.raises(RunFormatError, match=message):
        read_journal(path)


@pytest.mark.processes
def test_killed_process_leaves_every_event_that_it_wrote(store: RunStore) -> None:
    script = (
        "import sys, os, msgspec, pathlib\n"
        "from verifier.records.schema import RunHeader\n"
        "from verifier.runs.store import RunStore\n"
        "header = msgspec.json.decode(sys.stdin.buffer.read(), type=RunHeader)\n"
        "writer = RunStore(pathlib.Path(sys.argv[1])).open_run(header)\n"
        "for n in range(100): writer.append({'n': n})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    header = a_header()
    command = [sys.executable, "-c", script, str(store.root)]
    done = subprocess.run(command, input=msgspec.json.encode(header), timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    [run_id] = store.ids()
    assert not store.path(run_id).exists()
    journal = read_journal(store.path(run_id, "journal.jsonl"))
    assert (journal.header, journal.events) == (header, [{"n": n} for n in range(100)])


# ---------------------------------------------------------------------------------------------------------- full disk
def test_journal_on_a_full_disk_keeps_whole_lines_and_goes_on_when_there_is_room(store: RunStore) -> None:
    with store.open_run(a_header()) as writer:
        writer.append({"n": 1})
        size = writer.journal_path.stat().st_size
        with files_limited_to(size + 10), pytest.raises(RunStoreError) as caught:
            writer.append({"n": 2, "long": "x" * 100})
        assert isinstance(caught.value.__cause__, OSError)
        assert str(caught.value) == (
            f"cannot write {writer.journal_path}: File too large; its first 2 lines are kept, "
            "and the run can go on without a journal"
        )
        assert writer.journal_path.stat().st_size == size
        writer.append({"n": 3})
    assert [event["n"] for event in read_journal(writer.journal_path).events] == [1, 3]


def test_journal_that_cannot_be_mended_takes_no_more_lines(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with store.open_run(a_header()) as writer:
        writer.append({"n": 1})
        size = writer.journal_path.stat().st_size
        monkeypatch.setattr(os, "ftruncate", refuse)
        with files_limited_to(size + 4), pytest.raises(RunStoreError, match="File too large"):
            writer.append({"n": 2})
        with pytest.raises(RunStoreError, match="an earlier line failed"):
            writer.append({"n": 3})
    journal = read_journal(writer.journal_path)
    assert ([event["n"] for event in journal.events], journal.torn) == ([1], True)


def test_full_disk_at_the_end_leaves_no_part_of_a_record(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    header = a_header("2026")
    real = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) > 100:
            return real(descriptor, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with store.open_run(header) as writer:
        writer.append({"n": 1})
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(RunStoreError, match=r"cannot write .*run\.json: No space left on device; the events"):
                writer.finish(a_run(header=header))
        assert [path.name for path in writer.directory.iterdir()] == ["journal.jsonl"]
        writer.finish(a_run(header=header))
    assert store.path("2026").is_file()


def test_root_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStoreError, match=r"cannot make .*: Not a directory; nothing of this run is kept"):
        RunStore(tmp_path / "file").open_run(a_header())


# ----------------------------------------------------------------------------------------------------------- findings
def test_finding_is_found_by_prefix_in_the_newest_run_that_has_it(store: RunStore) -> None:
    finished(store, "2024", a_finding("a1b2"), a_finding("ff00"))
    finished(store, "2025", replace(a_finding("a1b2"), occurrences=9), a_finding("cd12"), a_finding("cd34"))
    finished(store, "2026")
    assert store.find_finding("a1").occurrences == 9
    assert store.find_finding("ff").fingerprint == "ff00"
    with pytest.raises(ValueError, match="'cd' names 2 findings of run 2025: cd12, cd34"):
        store.find_finding("cd")
    with pytest.raises(ValueError, match=r"no finding 'ff10'; did you mean 'ff00'\?"):
        store.find_finding("ff10")
    with pytest.raises(ValueError, match=r"no finding 'xyz'; 4 findings in .*runs, the newest is a1b2$"):
        store.find_finding("xyz")
    with pytest.raises(ValueError, match="got none"):
        store.find_finding(" ")


def test_whole_fingerprint_is_not_ambiguous(store: RunStore) -> None:
    finished(store, "2026", a_finding("ab"), a_finding("abc"))
    assert store.find_finding("ab").fingerprint == "ab"


def test_finding_of_a_killed_run_is_found_in_its_journal(store: RunStore) -> None:
    with store.open_run(a_header()) as writer:
        journal_listener(writer)(FindingReported(a_finding("a1b2")))
    assert store.find_finding("a1") == a_finding("a1b2")


def test_run_that_cannot_be_read_does_not_hide_the_others(store: RunStore) -> None:
    finished(store, "2025", a_finding("a1b2"))
    finished(store, "2026")
    store.path("2026").write_text('{"format_version": 9}')
    assert store.find_finding("a1").fingerprint == "a1b2"
    with pytest.raises(ValueError, match=r"the newest is a1b2 \(could not read 2026\)"):
        store.find_finding("b1")


def test_finding_is_read_from_its_own_file(store: RunStore, tmp_path: Path) -> None:
    path = tmp_path / "finding.json"
    path.write_bytes(encode_record(a_finding()))
    assert store.find_finding(path) == read_finding(path) == a_finding()
    path.write_text('{"format_version": 9}')
    with pytest.raises(RunFormatError, match=r"finding\.json: format_version is 9"):
        store.find_finding(str(path))


def test_store_without_runs_has_no_findings(store: RunStore) -> None:
    with pytest.raises(ValueError, match=r"no finding 'a1'; no run in .*runs has a finding"):
        store.find_finding("a1")
