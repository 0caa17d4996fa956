"""Runs that are killed and resumed, and runs in shards, come to what one run comes to. Real processes throughout."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_processes import LIMIT, WRONG_GRADIENT_RULE, comparable
from fault_trials import wait_for_end
from forked_commands import Command
from leftovers import children, nothing_left_behind

from verifier.core.wording import plural
from verifier.records.files import encode_record, read_record
from verifier.records.schema import RunHeader
from verifier.runs.journal import read_journal
from verifier.runs.store import RunStore

pytestmark = [pytest.mark.ranks, pytest.mark.cli, pytest.mark.long]

END = "\nexit statuses: "
"""Stands before the exit statuses of commands, behind all that they print."""
PROGRAM = """
import json
import resource
import sys
from unittest.mock import patch

from verifier.campaign import investigation
from verifier.cli import main as entry

# so that what is minimised does not depend on how busy the machine is
patch.object(investigation, "MINIMISING_LIMIT", 1e6).start()


def run(commands):
    for arguments in commands:
        sys.argv = ["verifier", *arguments]
        try:
            entry.main()
        except SystemExit as ended:
            yield ended.code or 0


commands, largest_file = map(json.loads, sys.argv[1:])
if largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
print(END, json.dumps([*run(commands)]), sep="")
""".replace("END", repr(END))

REQUEST = ["run", "embedding_dense_backward", "--mesh", "2", "--mesh", "simulated:3", "--max-examples", "4"]
RULES_TOO = ["--import", "rules.py"]
"""What a run imported is said again where it goes on, or its shards are merged: its journal has nothing imported."""
REQUEST += RULES_TOO


class Commands:
    """Runs the verifier's command line in other processes, each with the same modules as the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.others = frozenset[int]()
        """What processes there were before the last one was started."""
        shutil.copy(WRONG_GRADIENT_RULE, folder / "rules.py")

    def start(self, *commands: Sequence[str], largest_file: int = 0) -> Command:
        self.others = children()
        return Command(["-c", PROGRAM, json.dumps(commands), json.dumps(largest_file)], self.folder)

    def finish(self, process: Command) -> tuple[list[int], str]:
        """Return the exit status of each command, and all that was printed."""
        (printed,) = process.communicate()
        assert process.returncode == 0, printed
        process.close()
        printed, _, statuses = printed.rpartition(END)
        return json.loads(statuses), printed

    def __call__(self, *commands: Sequence[str]) -> tuple[list[int], str]:
        """Return the exit status of each command, and all that was printed."""
        return self.finish(self.start(*commands))

    def journal(self, out: str) -> Path:
        (path,) = (self.folder / out / "runs").glob("*/journal.jsonl")
        return path

    def result(self, out: str) -> dict[str, Any]:
        """Return what has to be equal of the only run under ``out``."""
        (path,) = (self.folder / out / "runs").glob("*/run.json")
        return comparable(path)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def uninterrupted(commands: Commands) -> dict[str, Any]:
    statuses, printed = commands([*REQUEST, "--out", "whole"])
    assert statuses == [1], printed
    whole = commands.result("whole")
    assert len(whole["findings"]) == 1
    assert whole["graph"]["edges"]
    return whole


@pytest.fixture
def nothing_left(uninterrupted: dict[str, Any]) -> Iterator[None]:
    """Fail if there are processes, ports, shared memory or files after the test that were not there before it."""
    with nothing_left_behind():
        yield


@contextmanager
def cut_short(commands: Commands, process: Command, when: Callable[[], bool], number: signal.Signals) -> Iterator[None]:
    """Send a signal as soon as ``when`` holds; afterwards no rank of the process is left."""
    deadline = time.monotonic() + LIMIT
    while not when():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ranks = sorted(children() - commands.others - {process.pid})
    process.send_signal(number)
    yield
    process.wait()
    assert ranks
    assert wait_for_end(ranks, 30.0) == []


def lines_of(commands: Commands, out: str) -> list[str]:
    paths = list((commands.folder / out / "runs").glob("*/journal.jsonl"))
    return paths[0].read_text().splitlines() if paths else []


def count(commands: Commands, out: str, event: str) -> int:
    return sum(f'"event":"{event}"' in line for line in lines_of(commands, out))


# ------------------------------------------------------------------------------------------------------------- resuming
def test_killed_and_resumed_is_as_if_nothing_had_happened(
    commands: Commands,
    uninterrupted: dict[str, Any],
    record_property: Callable[[str, object], None],
    nothing_left: None,
) -> None:
    """Killed twice: after some trial, and while its failures are minimised."""
    moment = random.randrange(1, uninterrupted["trials"] // 2)
    record_property("killed after trial", moment)
    first = commands.start([*REQUEST, "--out", "killed"])
    with cut_short(commands, first, lambda: count(commands, "killed", "trial") >= moment, signal.SIGKILL):
        pass
    journal = commands.journal("killed")
    kept, begun = count(commands, "killed", "trial"), count(commands, "killed", "minimising")  # it may have gone so far
    with journal.open("a") as file:
        file.write('{"event":"trial","at":1')  # killed in the middle of a line
    assert not journal.with_name("run.json").exists()

    second = commands.start(["run", "--resume", *RULES_TOO, "--out", "killed"])
    with cut_short(commands, second, lambda: count(commands, "killed", "minimising") > begun, signal.SIGKILL):
        pass
    (said,) = second.printed()
    assert f"resumed: {plural(kept, 'finished trial is', 'finished trials are')} kept" in said
    assert "the last line of the journal was cut off in the middle; it is left out" in said

    run_id = journal.parent.name
    statuses, said = commands(["run", "--resume", run_id, *RULES_TOO, "--out", "killed"])
    assert statuses == [1], said
    assert "in flight when it ended: minimising of aten.embedding_dense_backward.default | WRONG_VALUE" in said
    assert commands.result("killed") == uninterrupted
    events = read_journal(journal).events
    positions = [event["trial"] for event in events if event["event"] == "trial"]
    assert len(positions) == len(set(positions)) == uninterrupted["trials"]
    assert next(event["trials"] for event in events if event["event"] == "run resumed") == kept
    sent = [event["case"] for event in events if event["event"] == "case"]
    assert sent == sorted(set(sent))

    statuses, said = commands(
        ["run", "--resume", *RULES_TOO, "--out", "killed"], ["run", "--resume", run_id, *RULES_TOO, "--out", "killed"]
    )
    assert statuses == [2, 2]
    assert "nothing to resume" in said


def test_the_trial_in_flight_is_named_and_tried_again(commands: Commands, uninterrupted: dict[str, Any]) -> None:
    """With the journal of a whole run cut after some line, which is what a kill at that moment leaves."""
    text = commands.journal("whole").read_text().splitlines(keepends=True)
    trials = [number for number, line in enumerate(text) if '"event":"trial"' in line]
    last = next(number for number in trials if '"trial":"2/3"' in text[number])
    run_id = commands.journal("whole").parent.name
    copy = commands.folder / "cut" / "runs" / run_id
    copy.mkdir(parents=True)
    (copy / "journal.jsonl").write_text("".join(text[: last + 1]))

    statuses, said = commands(["run", "--resume", *RULES_TOO, "--out", "cut"])

    assert statuses == [1], said
    op = "aten.embedding_dense_backward.default"
    assert f"{trials.index(last) + 1} finished trials are kept; in flight when it ended: trial 4 of " in said
    assert f" of case 2, {op} on mesh 2\n" in said
    assert f"tried again: trial 2/4, {op}(grad_output=" in said
    assert commands.result("cut") == uninterrupted


def test_what_was_changed_since_is_refused(commands: Commands, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Results of before are never mixed with those of other rules or other cases."""
    lines = commands.journal("whole").read_text().splitlines(keepends=True)[:30]
    digest = next(json.loads(line)["digest"] for line in lines if '"event":"case"' in line)
    for out, text in (("rules", "".join(lines)), ("case", "".join(lines).replace(digest, "0" * 16))):
        folder = tmp_path / out / "runs" / "run"
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").write_text(text)

    statuses, said = commands(["run", "--resume", *RULES_TOO, "--out", str(tmp_path / "case")])
    assert statuses == [2]
    assert f"case 1 (aten.embedding_dense_backward.default on mesh 2) is drawn as {digest} now and was 0000" in said

    elsewhere = Commands(tmp_path)
    (tmp_path / "rules.py").write_text(WRONG_GRADIENT_RULE.read_text() + "\n# changed\n")
    statuses, said = elsewhere.finish(elsewhere.start(["run", "--resume", *RULES_TOO, "--out", "rules"]))
    assert statuses == [2]
    assert "run run cannot be resumed: the digest of rules.py is" in said


def test_ctrl_c_while_minimising_keeps_what_is_done_and_can_be_resumed(
    commands: Commands, uninterrupted: dict[str, Any], nothing_left: None
) -> None:
    process = commands.start([*REQUEST, "--out", "interrupted"])
    with cut_short(commands, process, lambda: count(commands, "interrupted", "minimising") >= 1, signal.SIGINT):
        statuses, said = commands.finish(process)
    assert statuses in ([1], [2]), said  # 1 if the finding was there already
    assert "Traceback" not in said
    half = commands.result("interrupted")
    assert not half["complete"]
    assert half["counts_by_mesh"] == {"2": uninterrupted["counts_by_mesh"]["2"]}
    assert ["the rest of the run", "interrupted"] in [[one["what"], one["reason"]] for one in half["untested"]]

    statuses, said = commands(["run", "--resume", *RULES_TOO, "--out", "interrupted"])
    assert statuses == [1], said
    assert commands.result("interrupted") == uninterrupted


def test_a_full_disk_is_one_message_and_the_run_goes_on_when_there_is_room(
    commands: Commands, uninterrupted: dict[str, Any], nothing_left: None
) -> None:
    """The kernel lets no file grow further than a few lines of the journal."""
    size = commands.journal("whole").stat().st_size // 4
    statuses, said = commands.finish(commands.start([*REQUEST, "--out", "full"], largest_file=size))
    assert statuses == [2]
    assert "Traceback" not in said
    journal = commands.journal("full")
    run_id = journal.parent.name
    refused = re.search(r"journal\.jsonl: File too large; its first (\d+) lines are kept", said)
    assert refused is not None, said
    kept = read_journal(journal)
    # a shorter line may have had room yet, which says that the run has ended
    assert len(kept.events) - int(refused[1]) + 1 in (0, 1)
    assert not kept.torn
    assert f"python -m verifier run --resume {run_id} --import rules.py --out full\n" in said
    assert not journal.with_name("run.json").exists()

    statuses, said = commands(["run", "--resume", *RULES_TOO, "--out", "full"])
    assert statuses == [1], said
    assert commands.result("full") == uninterrupted


# --------------------------------------------------------------------------------------------------------------- shards
def test_shards_merged_are_one_run(commands: Commands, uninterrupted: dict[str, Any]) -> None:
    shards = [[*REQUEST, "--shard", f"{index}/3", "--out", f"shard{index}"] for index in (1, 2, 3)]
    statuses, said = commands(*shards)
    assert 1 in statuses, said
    folders = [str(commands.journal(f"shard{index}").parent) for index in (1, 2, 3)]
    parts = [comparable(Path(folder) / "run.json") for folder in folders]
    assert sum(part["trials"] for part in parts) == uninterrupted["trials"]
    assert all(part["trials"] for part in parts)
    left = [one for one in parts[0]["untested"] if one["reason"] == "left to other shards than 1/3"]
    assert sum(one["count"] for one in left) == 5  # of 8 cases

    fingerprint = uninterrupted["findings"][0]["fingerprint"]
    statuses, said = commands(
        ["merge", *RULES_TOO, folders[2], folders[0], "--out", "merged"],
        ["merge", *RULES_TOO, folders[2], folders[0], folders[1], "--out", "merged"],
        ["gate", "--out", "merged"],
        ["replay", fingerprint, *RULES_TOO, "--out", "merged"],
        ["report", "--out", "merged"],
    )
    assert statuses == [2, 1, 1, 1, 1], said
    assert "1 of 3 shards missing: 2/3" in said
    assert f"NEW {fingerprint}" in said
    assert "still fails: WRONG_VALUE" in said
    merged = commands.result("merged")
    assert merged == uninterrupted
    assert RunStore(commands.folder / "merged").find_finding(fingerprint).confirmed.text == "confirmed on gloo, 2 ranks"


def test_a_shard_that_was_cut_short_by_its_time_limit_can_be_merged(
    commands: Commands, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    """Made of a whole run: the first shard did not get beyond its first case, the second tried all of its own."""
    header, *lines = commands.journal("whole").read_text().splitlines(keepends=True)
    numbered = [(line, re.search(r'"(?:trial":"|case":)(\d+)', line)) for line in lines]
    record = read_record(commands.journal("whole").with_name("run.json"))
    for index, numbers in ((1, (1,)), (2, (2, 4, 6, 8))):
        folder = tmp_path / str(index)
        folder.mkdir()
        made = json.loads(header)
        made["header"]["id"] = f"part{index}"
        made["header"]["shard"] = made["header"]["request"]["shard"] = f"{index}/2"
        own = [line for line, number in numbered if number is not None and int(number[1]) in numbers]
        (folder / "journal.jsonl").write_text(json.dumps(made) + "\n" + "".join(own))
        part = replace(record, header=msgspec.convert(made["header"], RunHeader), complete=index == 2)
        (folder / "run.json").write_bytes(encode_record(part))

    statuses, said = commands(
        ["merge", *RULES_TOO, str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(tmp_path / "merged")]
    )

    assert statuses in ([1], [2]), said  # by what fails in the cases that are left
    (path,) = (tmp_path / "merged" / "runs").glob("*/run.json")
    merged = read_record(path)
    assert not merged.complete
    assert 0 < merged.trials < uninterrupted["trials"]
    reasons = [one.count for one in merged.untested if one.reason == "not reached within the time limit"]
    assert sum(reasons) == 3
