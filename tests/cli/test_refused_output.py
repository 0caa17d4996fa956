"""A file or a stdout that cannot be written costs that, and not what else is to be said."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from run_factory import make_header, make_run

from verifier.cli import main as entry
from verifier.cli import work
from verifier.core.versions import versions
from verifier.runs.revision import revision
from verifier.runs.store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A store with one run, made with the sources of now."""
    run = make_run(header=make_header(digests=revision(), versions=versions()))
    store = RunStore(tmp_path / "reports")
    with store.open_run(run.header) as writer:
        writer.finish(run)
    return store


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["verifier", *arguments])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    return ended.value.code


@pytest.mark.parametrize("output", ["text", "json"])
def test_without_room_for_the_page_the_rest_is_said(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target.name == "index.html":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    latest = store.root / "latest"
    latest.mkdir()
    (latest / "index.html").write_text("the page of before")
    run = store.newest()
    assert run is not None
    monkeypatch.setattr(work, "make_run", lambda *_: run)
    monkeypatch.setattr(os, "replace", refuse)
    assert status_of(monkeypatch, "run", "--format", output, "--out", str(store.root)) == 2
    said = capsys.readouterr()
    assert all(finding.fingerprint in said.out for finding in run.findings)
    assert f"open {latest}" not in said.out
    assert said.err == (
        f"error: cannot write {latest}/index.html: No space left on device; the records in {store.directory} are "
        f"whole; once it can be written: python -m verifier report --out {store.root}\n"
    )
    assert (latest / "index.html").read_text() == "the page of before"
    assert [path.name for path in latest.iterdir()] == ["index.html"]


@pytest.mark.parametrize(
    "command", [["report"], ["gate"], ["gate", "--format", "json"], ["layouts", "row-wise-even"]], ids=" ".join
)
def test_a_full_stdout_is_a_line_and_status_2(
    store: RunStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    place = [] if command[0] == "layouts" else ["--out", str(store.root)]
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert status_of(monkeypatch, *command, *place) == 2
        assert sys.stdout is full
    assert capsys.readouterr().err == "error: cannot write to standard output: No space left on device\n"


def test_a_reader_that_is_gone_costs_no_word(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        status_of(monkeypatch, "gate", "--out", str(store.root))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["report"], ["gate"], ["gate", "--format", "json"]], ids=" ".join)
def test_a_stdout_that_was_closed_costs_no_word(
    store: RunStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it for `>&-`
    assert status_of(monkeypatch, *command, "--out", str(store.root)) == 1
    assert capsys.readouterr().err == ""
