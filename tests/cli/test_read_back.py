"""What commands say of files that are damaged, or that hold what a terminal would obey: one line, and status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from plain_records import a_finding, a_header, a_run
from rich.text import Text
from run_factory import make_finding, make_run

from verifier.campaign import resuming as taking_over
from verifier.campaign.request import Request, make_plan
from verifier.cli import app as cli
from verifier.cli import main as entry
from verifier.cli import work
from verifier.cli.common import consoles
from verifier.core.verdict import Verdict, VerdictKind
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry
from verifier.records.schema import ConfirmationRecord, RunHeader, RunRecord
from verifier.report.html import render_html
from verifier.runs.store import RunStore

COMMANDS = typer.main.get_command(cli.app)
RUN_ID = "20260520T131502-048211-9f3a1c"
FINGERPRINT = "a1b2c3d4e5"
OBEYED = "\x1b]0;pwned\x07\x1b[2J\x9b31m\r\u202egnp\x1b]8;;http://evil\x1b\\"
SHOWN = r"\x1b]0;pwned\x07\x1b[2J\x9b31m\r\u202egnp\x1b]8;;http://evil\x1b" + "\\"
ON_CONSOLE = SHOWN.replace(r"\x07", "").replace(r"\r", "")
"""A console leaves these two out by itself."""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setattr(entry, "get_command", lambda app: COMMANDS)
    monkeypatch.setattr(work, "replay_trial", lambda *_: (Verdict(VerdictKind.PASS, OBEYED), False))

    def typed(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["verifier", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            entry.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return typed


@pytest.fixture
def nothing(tmp_path: Path) -> Path:
    path = tmp_path / "nothing.toml"
    Baseline().save(path)
    return path


def stored(out: Path, record: bytes | None = None, journal: bytes | None = None, run_id: str = RUN_ID) -> Path:
    folder = out / "runs" / run_id
    folder.mkdir(parents=True)
    for name, data in (("run.json", record), ("journal.jsonl", journal)):
        if data is not None:
            (folder / name).write_bytes(data)
    return folder


def journal_of(header: RunHeader, *lines: dict[str, Any]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in ({"format_version": 5, "header": header}, *lines))


# ----------------------------------------------------------------------------------------------------- broken records
def _with(**changes: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(a_run(a_finding())), **changes})


BROKEN = {
    "an unknown verdict": (_with(counts={"NONSENSE": 1}), "verdict 'NONSENSE' is none of PASS"),
    "an unknown verdict of an op": (_with(counts_by_op={"op": {"PAS": 1}}), "did you mean 'PASS'?"),
    "a finding that accuses nobody": (
        msgspec.json.encode(a_run(a_finding(verdict="PASS"))),
        "findings[0].verdict 'PASS' is none of WRONG_VALUE",
    ),
    "deep nesting": (b"[" * 100_000, "nested too deep"),
    "deep nesting within": (_with(counts=msgspec.json.decode(b"[" * 500 + b"]" * 500)), "Expected `object`"),
    "a wrong type": (_with(trials="412"), "Expected `int`, got `str` - at `$.trials`"),
    "a trial that is none": (
        msgspec.json.encode(a_run(replace(a_finding(), trial=replace(a_finding().trial, mesh="0")))),
        "findings[0].trial: mesh '0'",
    ),
    "a mesh that is none": (msgspec.json.encode(a_run(header=a_header(meshes=["4y"]))), "mesh '4y'"),
    "an id that is a path": (
        msgspec.json.encode(a_run(header=a_header(id="../../escaped"))),
        "'../../escaped' is none",
    ),
    "a fingerprint of two lines": (msgspec.json.encode(a_run(a_finding("a\nb"))), "findings[0].fingerprint"),
    "a number without an end": (_with(seconds=1e300), "seconds is no number"),
    "half of it": (_with()[:300], "not JSON"),
    "no UTF-8": (b'{"format_version": 5, "x": "\xff"}', "not JSON"),
    "nothing": (b"", "not JSON"),
}


@pytest.mark.parametrize(
    "words", [["report"], ["gate"], ["replay", "a1"], ["run", "--resume", RUN_ID], ["merge", RUN_ID]]
)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_one_line(
    name: str, words: list[str], command: Command, tmp_path: Path, nothing: Path
) -> None:
    record, what = BROKEN[name]
    shard = a_header(shard="1/1", request={"seed": 1})
    folder = stored(tmp_path / "out", record, journal_of(shard))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    status, out, err = command(*words, "--baseline", nothing, "--out", tmp_path / "out")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert f"{folder / 'run.json'}: " in err
    assert what in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# ---------------------------------------------------------------------------------------------------- damaged journals
def test_resume_names_the_run_whose_journal_is_damaged(tmp_path: Path, command: Command) -> None:
    made = journal_of(a_header(request={"seed": 1}), {"event": "case"}, {"event": "run started"})
    folder = stored(tmp_path, journal=made)
    status, _, err = command("run", "--resume", "--out", tmp_path)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: run {RUN_ID} is damaged, and may have been cut short: {folder}/journal.jsonl:2: ")
    assert f"mend the file, or move {folder} away and run again" in err
    whole = journal_of(a_header(id="20260101T000000-000000-000000", request={"seed": 1}))
    stored(tmp_path, journal=whole, run_id="20260101T000000-000000-000000")
    status, _, err = command("run", "--resume", "--out", tmp_path)
    assert status == 2
    assert err.endswith("or go on with run 20260101T000000-000000-000000: --resume 20260101T000000-000000-000000\n")


def test_resume_passes_over_what_has_no_line_and_what_another_version_wrote(tmp_path: Path, command: Command) -> None:
    stored(tmp_path, journal=b'{"format_ver')
    stored(tmp_path, journal=b'{"format_version": 9}\n', run_id="20260101T000000-000000-000000")
    status, _, err = command("run", "--resume", "--out", tmp_path)
    assert status == 2
    assert "was cut short, of 2; nothing to resume" in err


def test_the_torn_end_of_a_journal_stays_until_there_is_something_to_write(tmp_path: Path) -> None:
    made = a_header(request={"seed": 1})
    folder = stored(tmp_path, journal=journal_of(made) + b'{"event": "ca')
    writer, past = RunStore(tmp_path).reopen_run(RUN_ID)
    with writer:
        assert past.torn
        assert (folder / "journal.jsonl").read_bytes() == journal_of(made) + b'{"event": "ca'
        writer.append({"event": "skipped"})
        assert (folder / "journal.jsonl").read_bytes() == journal_of(made, {"event": "skipped"})


# ----------------------------------------------------------------------------------------- imports that a journal names
def test_what_a_journal_says_was_imported_is_not_imported(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, nothing: Path
) -> None:
    canary, rules = tmp_path / "canary", tmp_path / "rules.py"
    rules.write_text(f"open({str(canary)!r}, 'w').close()\n")
    request = Request(["embedding"], ["2"], max_examples=1, imports=[str(rules)], baseline=str(nothing), shard="1/1")
    header = replace(make_plan(request, Baseline()).header, id=RUN_ID)
    canary.unlink()
    stored(tmp_path / "out", journal=journal_of(header))
    status, _, err = command("run", "--resume", "--out", tmp_path / "out")
    typed = f"python -m verifier run --resume {RUN_ID} --import {rules} --out {tmp_path / 'out'}"
    assert (status, err.count("\n")) == (2, 1)
    assert err.endswith(f"so say it: {typed}\n")
    assert not canary.exists()

    def went_on(*_: object) -> RunRecord:
        raise SystemExit(0)

    monkeypatch.setattr(taking_over, "record", went_on)
    assert command(*typed.split()[3:])[0] == 0

    made = replace(make_run(), header=header)
    stored(tmp_path / "shards", msgspec.json.encode(made), journal_of(header))
    status, _, err = command("merge", RUN_ID, "--out", tmp_path / "shards")
    typed = f"python -m verifier merge {RUN_ID} --import {rules} --out {tmp_path / 'shards'}"
    assert status == 2
    assert err.endswith(f"so say it: {typed}\n")
    assert command(*typed.split()[3:])[0] == 0


# ------------------------------------------------------------------------------------------------- what is not obeyed
def test_nothing_in_a_baseline_is_obeyed_by_a_terminal(tmp_path: Path, command: Command) -> None:
    found = make_finding()
    known = BaselineEntry(
        fingerprint=FINGERPRINT, op=found.op, family=found.family, verdict=found.verdict, rule=OBEYED, mesh="4",
        summary=OBEYED, reason=OBEYED, torch=("2.13.0",), expires=date(2099, 1, 1),
        replay=msgspec.json.encode(found.trial).decode(),
    )  # fmt: skip
    Baseline((known,)).save(tmp_path / "baseline.toml")
    status, out, _ = command("replay", FINGERPRINT, "--baseline", tmp_path / "baseline.toml", "--out", tmp_path)
    assert status == 0
    assert out.count(ON_CONSOLE) == 4  # summary, rule, reason, and what the verdict says
    assert out.isascii()
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "words", [["report"], ["gate"], ["gate", "--format", "json"], ["replay", FINGERPRINT, "--script"]]
)
def test_nothing_in_a_record_is_obeyed_by_a_terminal(
    words: list[str], tmp_path: Path, command: Command, nothing: Path
) -> None:
    found = make_finding(
        message=f"{OBEYED}\n in",
        rule=OBEYED,
        script=f"# {OBEYED}\n",
        confirmed=ConfirmationRecord("unconfirmed", why=OBEYED),
    )
    made = a_run(
        found, tool_errors=[OBEYED], unsupported={OBEYED: 1}, header=a_header(command=OBEYED, imports=[OBEYED])
    )
    stored(tmp_path, msgspec.json.encode(made))
    _, out, err = command(*words, "--baseline", nothing, "--out", tmp_path)
    assert out
    if "json" in words:
        assert OBEYED in str(msgspec.json.decode(out, type=dict[str, Any]).values()).encode().decode("unicode_escape")
    else:
        assert (ON_CONSOLE if words == ["report"] else SHOWN) in out
    for text in (out, err):
        assert not {"\x1b", "\x07", "\r", "\x9b", "\u202e"} & set(text)


def test_a_page_shows_what_a_browser_would_obey() -> None:
    page = render_html(a_run(make_finding(message=f"{OBEYED}</script>")))
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(page)
    assert r"\u202egnp" in page


def test_our_own_styles_are_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    consoles()[0].print(Text("ours\x1b[31m theirs", style="bold"))
    assert capsys.readouterr().out == "\x1b[1mours\\x1b[31m theirs\x1b[0m\n"
