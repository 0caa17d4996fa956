"""Processes that a fork server starts are as those that start in the usual way, whatever becomes of the server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
from command_processes import wait_until
from leftovers import nothing_left_behind

from verifier.processes import fork_server, forks
from verifier.processes.child import Child
from verifier.processes.forks import FORKS, Step, shared_servers

pytestmark = pytest.mark.processes

PROGRAM = """
import json, os, re, signal, sys, time
from verifier.processes.child import begin

LOADED_BY = os.getpid()

def opened(fd):
    # what is open, without the numbers that differ between two processes: of a pipe, a socket, a file without a name
    return re.sub(r":\\[[0-9]+\\]|[0-9]+ \\(deleted\\)", "", os.readlink(f"/proc/self/fd/{fd}"))

def main():
    connection, memory, fds, arguments = begin()
    while True:
        match connection.recv():
            case "about":
                numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
                ignored = [signal.getsignal(number) is signal.SIG_IGN for number in numbers]
                connection.send(json.dumps([
                    arguments, [os.readlink(f"/proc/self/fd/{fd}") for fd in fds], dict(os.environ), os.getcwd(),
                    sys.path[:3], sys.stdin.read(), os.getsid(0) == os.getpid(), ignored, hash("text"),
                    sorted(opened(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")),
                ]))
            case "forked":
                connection.send(os.getpid() != LOADED_BY)
            case "exit", status:
                print("said to the log", flush=True)
                sys.exit(status)
            case "raise":
                raise ValueError("raised here")
            case "kill":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "return":
                return
"""


class Running:
    """A child process that runs PROGRAM, or another module with a function ``main``, and the connection to it."""

    def __init__(self, module: str = "forked_program", steps: Sequence[Step] = (), **environment: str) -> None:
        self.connection, theirs = Pipe()
        with theirs, open(os.devnull) as file:
            variables = {**os.environ, "PYTHONHASHSEED": "7", **environment}
            self.child = Child(module, theirs.fileno(), ["an argument"], [file.fileno()], variables, steps)

    def ask(self, what: object) -> object:
        self.connection.send(what)
        return self.connection.recv()

    def close(self) -> None:
        self.child.close()
        self.connection.close()


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Servers for this test alone, and the module that their processes run."""
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    with shared_servers():
        yield tmp_path
        monkeypatch.undo()  # what it sets in the environment would outlive these servers


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def running(*arguments: Any, **environment: str) -> Iterator[Running]:
    one = Running(*arguments, **environment)
    try:
        yield one
    finally:
        one.close()


def test_a_forked_process_is_as_one_that_starts_in_the_usual_way(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program)
    monkeypatch.setenv("SAID", os.fsdecode(b"to the process, in no UTF-8: \xff"))
    with running() as forked:
        assert forked.ask("forked") is True
        theirs = json.loads(str(forked.ask("about")))
    monkeypatch.setenv("SAID", "something else")
    with running() as again:  # the server is the same
        assert json.loads(str(again.ask("about")))[2]["SAID"] == "something else"
    monkeypatch.setenv("SAID", os.fsdecode(b"to the process, in no UTF-8: \xff"))
    shared = os.environ[FORKS]
    monkeypatch.setenv(FORKS, "off")
    with running() as usual:
        assert usual.ask("forked") is False
        ours = json.loads(str(usual.ask("about")))
    ours[2][FORKS] = shared
    assert theirs == ours
    assert ours[0] == ["an argument"]
    assert ours[3] == str(program)


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "in the usual way"])
@pytest.mark.parametrize(
    ("asked", "ending", "said"),
    [
        (("exit", None), "exit status 0", "said to the log\n"),
        (("exit", 3), "exit status 3", "said to the log\n"),
        (("exit", "a reason"), "exit status 1", "a reason\n"),
        ("raise", "exit status 1", "ValueError: raised here\n"),
        ("kill", "signal SIGSEGV", ""),
        ("return", "exit status 0", ""),
    ],
    ids=str,
)
def test_an_end_is_told(asked: object, ending: str, said: str, forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not forks:
        monkeypatch.setenv(FORKS, "off")
    with running() as one:
        assert one.child.running
        one.connection.send(asked)
        with pytest.raises(EOFError):
            one.connection.recv()
        assert one.child.ending() == ending
        assert not one.child.running
        assert one.child.signal() == (signal.SIGSEGV if "SIGSEGV" in ending else 0)
        assert one.child.log()[0].endswith(said)


def test_servers_differ_by_hash_seed() -> None:
    hashes = []
    for seed in "7", "8", "7":
        with running(PYTHONHASHSEED=seed) as one:
            hashes.append(json.loads(str(one.ask("about")))[8])
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_process_that_is_killed_before_the_server_has_loaded_does_not_live(program: Path) -> None:
    (program / "slow_program.py").write_text(
        "import os, pathlib, time\n"
        "time.sleep(1)\n"
        "def main():\n"
        "    with open(pathlib.Path(__file__).with_name('ran'), 'a') as file:\n"
        "        print(os.getpid(), file=file)\n"
        "    time.sleep(300)\n"
    )
    with nothing_left_behind():
        one = Running("slow_program")
        assert one.child.running
        one.child.kill()
        assert one.child.ending() == "signal SIGKILL"
        one.close()
        with running("slow_program") as other:  # the server gets to it after the other one
            wait_until(lambda: (program / "ran").exists() and (program / "ran").read_text(), "the start of the other")
            assert (program / "ran").read_text().split() == [str(other.child.pid)]


def test_without_its_server_a_process_goes_on_and_others_start_in_the_usual_way() -> None:
    with running() as one:
        assert one.ask("forked") is True
        server = parent(one.child.pid)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: "State:\tZ" in Path(f"/proc/{server}/status").read_text(), "the end of the server")
        assert one.ask("forked") is True
        assert one.child.running
        with running() as other:
            assert other.ask("forked") is False
        one.child.kill()
        assert one.child.ending() == "exit status 1"  # who could tell is gone
        assert not one.child.running


def test_what_cannot_be_loaded_is_said_by_the_process() -> None:
    with running("no_such_module") as one:
        with pytest.raises(EOFError):
            one.connection.recv()
        assert one.child.ending() == "exit status 1"
        assert "No module named 'no_such_module'" in one.child.log()[0]


def test_what_starts_a_thread_as_it_is_loaded_is_not_forked(program: Path) -> None:
    head = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
    (program / "threaded_program.py").write_text(head + PROGRAM)
    with running("threaded_program") as one:
        assert one.ask("forked") is False
        one.connection.send(("exit", 4))
        with pytest.raises(EOFError):
            one.connection.recv()
        assert one.child.ending() == "exit status 4"


def test_steps_are_done_once_before_all_processes(program: Path) -> None:
    (program / "steps.py").write_text(
        "import forked_program, os\n"
        "def step(*names):\n"
        "    forked_program.LOADED_BY = 0\n"
        "    os.environ.clear()\n"
        "    with open('done', 'a') as file:\n"
        "        print(*names, file=file)\n"
    )
    with contextlib.chdir(program):
        for steps in ([("steps:step", "first")], [("steps:step", "first"), ("steps:step", "second", "too")]) * 2:
            with running("forked_program", steps) as one:
                assert one.ask("forked") is True
                assert json.loads(str(one.ask("about")))[2]["PYTHONHASHSEED"] == "7"
    assert (program / "done").read_text() == "first\nsecond too\n"


def test_of_servers_with_imports_the_last_ones_live(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that retires lives until its last process has ended, and tells how that ended."""
    (program / "steps.py").write_text("def step(*names):\n    pass\n")
    monkeypatch.setattr(forks, "MOST_OF_IMPORTS", 2)

    def steps(name: str) -> list[Step]:
        return [("steps:step",), ("steps:step", name)]

    with running("forked_program", steps("first")) as first:
        assert first.ask("forked") is True
        server = parent(first.child.pid)
        for name in "second", "third", "second":
            with running("forked_program", steps(name)) as one:
                assert one.ask("forked") is True
        assert os.path.exists(f"/proc/{server}")
        first.connection.send("kill")
        assert first.child.ending() == "signal SIGSEGV"
    wait_until(lambda: not os.path.exists(f"/proc/{server}"), "the end of the server")
    with running("forked_program", steps("first")) as again:
        assert again.ask("forked") is True


def test_a_step_that_fails_is_left_to_the_process(program: Path) -> None:
    (program / "steps.py").write_text("def step():\n    raise SystemExit(3)\n")
    with running("forked_program", [("steps:step",)]) as one:
        assert one.ask("forked") is False
        assert json.loads(str(one.ask("about")))[0] == ["an argument"]


OWNER = """
import sys, time
from multiprocessing.connection import Pipe
from verifier.processes.child import Child

connection, theirs = Pipe()
child = Child("forked_program", theirs.fileno())
stat = open(f"/proc/{child.pid}/stat").read()
print(child.pid, stat.rpartition(")")[2].split()[1], flush=True)
time.sleep(300)
"""


def test_servers_of_a_program_end_with_it_however_it_ends(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORKS)
    path = os.pathsep.join(path for path in sys.path if path)
    with nothing_left_behind(), subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
        owner.kill()


def test_a_program_that_shares_a_server_does_not_end_it(program: Path) -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    servers = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}, stdout=subprocess.PIPE, text=True,
        ) as owner:  # fmt: skip
            assert owner.stdout is not None
            rank, server = owner.stdout.readline().split()
            owner.kill()
            servers.append(server)
        wait_until(lambda rank=rank: not os.path.exists(f"/proc/{rank}"), "the end of a rank")  # type: ignore[misc]
    assert servers[0] == servers[1]
    with running() as one:
        assert Path(f"/proc/{one.child.pid}/stat").read_text().rpartition(")")[2].split()[1] == servers[0]


def test_another_user_gets_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of sockets that are in no file system can be seen by all users."""
    with running() as one:
        assert one.ask("forked") is True
        monkeypatch.setattr(fork_server.os, "getuid", lambda: 4711)
        with running() as other:
            assert other.ask("forked") is False


def test_a_start_takes_little_time(program: Path) -> None:
    (program / "heavy_program.py").write_text(f"import time\ntime.sleep(1)\n{textwrap.dedent(PROGRAM)}")
    with running("heavy_program") as one:
        one.ask("forked")
    began = time.monotonic()
    with running("heavy_program") as one:
        one.ask("forked")
    assert time.monotonic() - began < 1.0
