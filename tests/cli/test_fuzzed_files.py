"""Files that are read back, with anything in them: one clear line and status 2, and nothing done that they name.

Valid files are changed in their structure and in their bytes, and each is given to the commands that read it, in this
process. Where a file is still valid, a command would go on to its ranks; here it ends with a mark instead.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from run_factory import make_finding, make_run

from verifier.campaign import resuming as taking_over
from verifier.campaign.history import Past
from verifier.campaign.request import Request, make_plan
from verifier.cli import app as cli
from verifier.cli import main as entry
from verifier.cli import work
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import Verdict, VerdictKind
from verifier.gate import baseline as baselines
from verifier.gate.baseline import Baseline
from verifier.placements.parsing import parse_placements
from verifier.records.schema import FORMAT_VERSION
from verifier.report import html

RUN_ID = "20260520T131502-048211-9f3a1c"
SHARDS = ("20260520T131502-048211-000001", "20260520T131502-048211-000002")
NEXT_TO_NONE = "20250520T131502-048211-9f3a1c"
FINGERPRINT = "a1b2c3d4e5"


# ---------------------------------------------------------------------------------------------------- what is changed
@dataclass(frozen=True)
class Change:
    """One change of a structure: ``kind`` at the place ``position`` (modulo how many there are)."""

    kind: str
    position: int
    other: int
    junk: Any


ESCAPES = (
    "\x1b]0;pwned\x07",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "a\rb",
    "\u202e\u2066",
    "\x1b]8;;http://evil\x1b\\",
    "\x00",
)
CALLS = (
    "os.system", "posix.system", "builtins.exec", "evil_module.f", "torch.save", "torch.ops.load_library",
    "torch.ops.aten.from_file.default", "torch.ops.import_module", "strategies.opinfo.programs.consumed",
    "strategies.redistribution.programs.sequence", "verifier.execution.imports.run_imports",
    "../../etc", "torch.neg", "x" * 400,
)  # fmt: skip
JUNK = (
    None, True, -1, 0, 10**6, 1 << 63, 1 << 64, 10**40, 0.5, -1e308, "", "NONSENSE", "../../../escaped", "/etc/passwd",
    "R", "S(0)", "S(99)", "P(sum)", "_S(0, 0)", "_NormP(1.2.3)", "S(99999999999)", "100000", "simulated:100000", "0x0",
    "2x2", "<script>alert(1)</script>", "{{ 7 * 7 }}", "%s%n", "☃ \U0001f4a5", [], {}, [[]], {"tensor": {}},
    {"dtype": "_dynamo"}, {"tuple": [{"size": [-1]}]}, {"device": "cuda:999"}, {"float": "nan"}, {"complex": [1]},
    {"placement": "S(1)"}, {"dict": {"__class__": 1}}, "EVIL", "touch CANARY",
    {"tensor": {"dtype": "float64", "shape": [10**12], "values": []}},
    {"tensor": {"dtype": "int8", "shape": [1], "values": [999]}},
    {"tensor": {"dtype": "float64", "shape": [0, 1 << 62], "values": []}},
    *ESCAPES, *CALLS,
)  # fmt: skip
KINDS = ("delete", "replace", "replace", "replace", "duplicate", "swap", "rename", "nest", "text", "call", "import")


def changes() -> SearchStrategy[list[Change]]:
    """Return a generator of one to four changes."""
    place = st.integers(0, 400)
    return st.lists(
        st.builds(Change, st.sampled_from(KINDS), place, place, st.sampled_from(JUNK)), min_size=1, max_size=4
    )


@dataclass(frozen=True)
class Bytes:
    """A change of the bytes of a file: what is at a share of it is cut off, replaced or inserted."""

    kind: str
    share: float
    data: bytes


def byte_changes() -> SearchStrategy[Bytes | None]:
    """Return a generator of changes of bytes; three files in four stay whole."""
    kinds = st.sampled_from(("truncate", "overwrite", "insert", "all"))
    odd = st.sampled_from(
        (b"\xff\xfe", b"\xed\xa0\x80", b"\x00" * 9, b"[" * 5000, b"\x1b[31m", b"\xef\xbb\xbf", b"\n{\n")
    )
    one = st.builds(Bytes, kinds, st.floats(0, 1), st.one_of(odd, st.binary(max_size=40)))
    return st.one_of(st.none(), st.none(), st.none(), one)


def slots(value: Any) -> list[tuple[Any, Any]]:
    """Return each container and key in a structure under which something stands."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            waiting.append(holder[key])
    return found


def changed(value: Any, made: list[Change]) -> Any:
    """Return a copy of plain values after changes."""
    value = json.loads(json.dumps(value))
    for change in made:
        places = slots(value)
        if not places:
            return value
        holder, key = places[change.position % len(places)]
        other, its = places[change.other % len(places)]
        match change.kind:
            case "delete":
                del holder[key]
            case "replace":
                holder[key] = json.loads(json.dumps(change.junk))  # which later changes may be of
            case "duplicate":
                copied = json.loads(json.dumps(holder[key]))
                holder.append(copied) if isinstance(holder, list) else holder.update({f"{key}_": copied})
            case "swap":
                holder[key], other[its] = json.loads(json.dumps(other[its])), json.loads(json.dumps(holder[key]))
            case "rename" if isinstance(holder, dict):
                holder[str(change.junk)[:50]] = holder.pop(key)
            case "nest":
                depth = (5, 90, 400)[change.other % 3]
                holder[key] = json.loads("[" * depth + "]" * depth)
            case "text":
                text = ESCAPES[change.other % len(ESCAPES)]
                strings = [(one, name) for one, name in places if isinstance(one[name], str)]
                if strings:
                    one, name = strings[change.position % len(strings)]
                    one[name] += text
            case "call" | "import":
                name = "call" if change.kind == "call" else "imports"
                named = [(one, each) for one, each in places if each == name]
                if named:
                    one, each = named[change.position % len(named)]
                    one[each] = CALLS[change.other % len(CALLS)] if name == "call" else ["EVIL"]
    return value


def spoilt(data: bytes, change: Bytes | None) -> bytes:
    if change is None:
        return data
    at = int(change.share * len(data))
    match change.kind:
        case "truncate":
            return data[:at]
        case "overwrite":
            return data[:at] + change.data + data[at + len(change.data) :]
        case "insert":
            return data[:at] + change.data + data[at:]
    return change.data


def as_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=True).encode()


def as_toml(value: Any) -> bytes:
    try:
        return tomli_w.dumps(value).encode()
    except (TypeError, ValueError, AttributeError, RecursionError):  # TOML has no null
        return str(value).encode(errors="surrogateescape")


# ------------------------------------------------------------------------------------------------------- what is read
@dataclass
class World:
    """A folder with whole files of every kind; an example makes one of them anew, and takes that back."""

    folder: Path
    run: dict[str, Any]
    finding: dict[str, Any]
    baseline: dict[str, Any]
    journal: list[dict[str, Any]]
    shards: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    went_on: list[str] = field(default_factory=list)

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(f"World({self.folder})")  # Hypothesis would print all of it

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @property
    def nothing(self) -> Path:
        """A baseline without an entry."""
        return self.folder / "nothing.toml"

    def filled(self, data: bytes) -> bytes:
        evil = str(self.folder / "evil.py").encode()
        return data.replace(b"CANARY", str(self.canary).encode()).replace(b"EVIL", evil)


def a_trial() -> Trial:
    case = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (torch.ones(2),), family="opinfo")
    return Trial(case, MeshSpec((2,)), (parse_placements("S(0)"),))


def lines(header: dict[str, Any], finding: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the journal of a run that was cut short, with a line of each kind."""
    op, mesh = "aten.embedding.default", "2"
    trial = {"op": op, "mesh": mesh, "combination": "weight=S(0), input=R", "seconds": 0.001}
    failed = {
        "verdict": "WRONG_VALUE", "message": "output on rank 1: got 0.0, expected 1.0",
        "judged": {"phase": "forward", "subject": "output"}, "shares": {"forward": 0.1},
        "steps": [
            ["forward", "S(0)", "R", 0, "all_gather", 64, "S(0)", "R", "float32[4, 4]", True, True, "2", "", "", ""]
        ],
        "reports": [{"ranks": [0], "reached": "done", "placements": [["output", "S(0)"]]}],
    }  # fmt: skip
    return [
        {"format_version": FORMAT_VERSION, "header": header},
        {"event": "run started", "at": 0.0, "id": header["id"]},
        {"event": "mesh started", "at": 0.1, "mesh": mesh, "family": "embedding", "examples": 2},
        {"event": "case", "at": 0.2, "case": 1, "op": op, "mesh": mesh, "trials": 2, "digest": "0123456789abcdef"},
        {"event": "trial", "at": 0.3, "trial": "1/1", **trial, "verdict": "PASS"},
        {"event": "trial", "at": 0.4, "trial": "1/2", **trial, **failed},
        {"event": "pool restarted", "at": 0.5, "mesh": mesh, "reason": "rank 1 died", "seconds": 0.1},
        {"event": "entry", "at": 0.6, "fingerprint": FINGERPRINT},
        {"event": "trial", "at": 0.7, "trial": f"entry:{FINGERPRINT}", **trial, "verdict": "PASS"},
        {"event": "minimising", "at": 0.8, "key": "k"},
        {"event": "settled", "at": 0.9, "key": "k", "fingerprint": FINGERPRINT},
        {"event": "finding", "at": 1.0, "group": "g", "became": "h", "finding": finding},
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("files")
    canary = folder / "canary"
    for name in ("evil.py", "evil_module.py"):
        (folder / name).write_text(f"open({str(canary)!r}, 'w').close()\n")
    finding = msgspec.to_builtins(make_finding())
    run = msgspec.to_builtins(make_run())
    replayed = msgspec.json.encode(make_finding().trial).decode()
    known = {
        "fingerprint": FINGERPRINT, "op": "aten.embedding.default", "family": "embedding", "verdict": "WRONG_GRADIENT",
        "rule": "S(0), R -> P(sum)", "mesh": "4", "summary": "weight.grad row 3: got 0.0", "reason": "issue 1",
        "link": "https://example.org/1", "torch": ["2.13.0"], "groups": ["a group"], "replay": replayed,
    }  # fmt: skip
    other = {**known, "fingerprint": "0b4a15ec4750"}
    nothing = folder / "nothing.toml"
    nothing.write_text(f"format_version = {baselines.FORMAT_VERSION}\n")
    request = Request(["embedding"], ["2"], max_examples=2, baseline=str(nothing))
    header = msgspec.to_builtins(make_plan(request, Baseline()).header)
    shards = {}
    for number, run_id in enumerate(SHARDS, 1):
        part = make_plan(replace(request, shard=f"{number}/2"), Baseline()).header
        shards[run_id] = lines({**msgspec.to_builtins(part), "id": run_id}, finding)
    made = World(
        folder, run, finding, {"format_version": baselines.FORMAT_VERSION, "finding": [known, other]},
        lines({**header, "id": RUN_ID}, finding), shards,
    )  # fmt: skip
    patch = pytest.MonkeyPatch()

    def mark(name: str) -> Callable[..., Any]:
        def reached(*given: Any, **_: Any) -> Any:
            for past in (each for each in given if isinstance(each, Past)):
                for position in past.trials:
                    past.result(position, a_trial())
                assert isinstance(past.in_flight, str)
            made.went_on.append(name)
            raise SystemExit(0)

        return reached

    def replayed_trial(*_: object) -> tuple[Verdict, bool]:
        made.went_on.append("replay")
        return Verdict(VerdictKind.PASS), False

    commands = typer.main.get_command(cli.app)  # which takes a tenth of a second, and so is made once
    patch.setattr(entry, "get_command", lambda app: commands)
    patch.setattr(html, "page_environment", functools.cache(html.page_environment))  # or templates are compiled again
    patch.setattr(work, "replay_trial", replayed_trial)
    patch.setattr(work, "record", mark("record"))
    patch.setattr(taking_over, "record", mark("record"))
    patch.syspath_prepend(str(folder))
    yield made
    patch.undo()


def store_run(folder: Path, run_id: str, record: bytes | None, journal: bytes | None) -> None:
    place = folder / "runs" / run_id
    place.mkdir(parents=True)
    if record is not None:
        (place / "run.json").write_bytes(record)
    if journal is not None:
        (place / "journal.jsonl").write_bytes(journal)


def digest(folder: Path) -> str:
    """Return what stands for all files of a folder; the reports that a command is there to write are left out."""
    found = hashlib.sha256()
    for path, _, names in sorted(os.walk(folder)):
        if "latest" not in Path(path).parts and "__pycache__" not in path:
            for name in sorted(names):
                found.update(f"{path}/{name}".encode() + (Path(path) / name).read_bytes())
    return found.hexdigest()


def checked(world: World, *words: object) -> tuple[int, str]:
    """Run a command, and check all that has to hold whatever it reads; return its status and what it said on stderr."""
    world.went_on.clear()
    before, modules = digest(world.folder), set(sys.modules)
    out, err = io.StringIO(), io.StringIO()
    typed, sys.argv = sys.argv, ["verifier", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            entry.main()
    finally:
        sys.argv = typed
    status, said = ended.value.code, err.getvalue()
    assert status in (0, 1, 2)
    assert "Traceback" not in said + out.getvalue(), said
    assert not world.canary.exists()
    assert "evil_module" not in sys.modules
    assert {
        name for name in set(sys.modules) - modules if name.startswith(("torch._dynamo", "torch._inductor"))
    } == set()
    for text in (out.getvalue(), said):
        assert not [letter for letter in text if letter in "\x1b\x07\r\x9b\u202e\u2066\x00"]
    assert digest(world.folder) == before
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if errors:
        assert status == 2
        assert len(errors) == 1
        assert said.count("\n") == 1, said
        assert not world.went_on
    return int(status), said


def is_whole(data: bytes) -> bool:
    """Return whether JSON can be read at all, which is the least that a file without an error has to be."""
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


@contextlib.contextmanager
def stored(world: World) -> Iterator[Path]:
    folder = world.folder / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder


@given(changes(), byte_changes(), st.sampled_from(("report", "gate", "merge", "replay")))
def test_records(world: World, made: list[Change], spoil: Bytes | None, command: str) -> None:
    data = spoilt(world.filled(as_json(changed(world.run, made))), spoil)
    with stored(world) as out:
        if command == "merge":
            for run_id in SHARDS:
                journal = b"".join(as_json(line) + b"\n" for line in world.shards[run_id])
                store_run(out, run_id, data, journal)
            status, said = checked(world, "merge", *SHARDS, "--out", out)
        else:
            store_run(out, RUN_ID, data, None)
            options = ["--baseline", world.nothing, "--out", out]
            words = [command, FINGERPRINT] if command == "replay" else [command]
            status, said = checked(world, *words, *options)
            if status in (0, 1):
                assert is_whole(data)
    if not is_whole(data):
        assert status == 2
        assert "error: " in said


@given(changes(), byte_changes(), st.booleans())
def test_findings(world: World, made: list[Change], spoil: Bytes | None, script: bool) -> None:
    data = spoilt(world.filled(as_json(changed(world.finding, made))), spoil)
    with stored(world) as out:
        file = world.folder / "finding.json"
        file.write_bytes(data)
        status, said = checked(world, "replay", file, "--baseline", world.nothing, "--out", out, *["--script"] * script)
    if not is_whole(data):
        assert status == 2
        assert said.startswith("error: ")
    else:
        assert status == 0 or said.startswith("error: ")


@given(changes(), changes(), byte_changes(), st.sampled_from(("gate", "replay")))
def test_baselines(world: World, made: list[Change], inner: list[Change], spoil: Bytes | None, command: str) -> None:
    baseline = json.loads(json.dumps(world.baseline))
    first = baseline["finding"][0]
    if made[0].position % 2:
        first["replay"] = as_json(changed(json.loads(first["replay"]), inner)).decode()
    else:
        baseline = changed(baseline, made)
    for one in baseline.get("finding", ()) if isinstance(baseline.get("finding"), list) else ():
        if isinstance(one, dict) and "fingerprint" in one:
            one.setdefault("expires", tomllib.loads("d = 2099-01-01")["d"])
    data = spoilt(world.filled(as_toml(baseline)), spoil)
    with stored(world) as out:
        file = world.folder / "baseline.toml"
        file.write_bytes(data)
        if command == "replay":
            checked(world, "replay", FINGERPRINT, "--baseline", file, "--out", out)
        else:
            store_run(out, RUN_ID, as_json(world.run), None)
            checked(world, command, "--baseline", file, "--out", out)


@given(changes(), byte_changes(), st.sampled_from(("resume", "resume newest", "replay")))
def test_journals(world: World, made: list[Change], spoil: Bytes | None, command: str) -> None:
    journal = b"".join(as_json(line) + b"\n" for line in changed(world.journal, made))
    with stored(world) as out:
        store_run(out, RUN_ID, None, spoilt(world.filled(journal), spoil))
        if command == "replay":
            status, said = checked(world, "replay", FINGERPRINT, "--baseline", world.nothing, "--out", out)
        else:
            words = ["run", "--resume", *[RUN_ID] * (command == "resume"), "--out", out]
            status, said = checked(world, *words)
            assert status == 2 or world.went_on
    assert status == 0 or said.startswith("error: ")


@given(changes(), byte_changes(), st.integers(0, 1))
def test_journals_of_shards(world: World, made: list[Change], spoil: Bytes | None, which: int) -> None:
    with stored(world) as out:
        for number, run_id in enumerate(SHARDS):
            journal = [world.shards[run_id], changed(world.shards[run_id], made)][number == which]
            data = b"".join(as_json(line) + b"\n" for line in journal)
            store_run(out, run_id, as_json(world.run), spoilt(world.filled(data), spoil if number == which else None))
        status, said = checked(world, "merge", *SHARDS, "--out", out)
    assert (status == 0 and world.went_on) or said.startswith("error: ")


# --------------------------------------------------------------------------------------- that the tests test something
def test_whole_files_are_taken(world: World) -> None:
    with stored(world) as out:
        store_run(out, RUN_ID, as_json(world.run), None)
        assert "error: " not in checked(world, "report", "--baseline", world.nothing, "--out", out)[1]
        assert "error: " not in checked(world, "gate", "--baseline", world.nothing, "--out", out)[1]
    with stored(world) as out:
        store_run(out, RUN_ID, None, b"".join(as_json(line) + b"\n" for line in world.journal))
        assert checked(world, "run", "--resume", "--out", out)[0] == 0
        assert world.went_on == ["record"]
    with stored(world) as out:
        for run_id in SHARDS:
            store_run(out, run_id, as_json(world.run), b"".join(as_json(x) + b"\n" for x in world.shards[run_id]))
        assert checked(world, "merge", *SHARDS, "--out", out)[0] == 0
        assert world.went_on == ["record"]
    with stored(world) as out:
        file = world.folder / "finding.json"
        file.write_bytes(as_json(world.finding))
        assert checked(world, "replay", file, "--baseline", world.nothing, "--out", out)[0] == 0
        assert world.went_on == ["replay"]
