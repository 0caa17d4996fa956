"""What processes leave behind: processes, ports, shared memory, open files. Also of those whose parent is gone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from verifier.processes.forks import FORKS, server_pids

MARK = "DTENSOR_VERIFIER_TESTS"
"""In the environment of all that is started by these tests, of which an orphan has nothing else to tell it by."""
PATIENCE = 15.0
"""Seconds that what is about to end has for it."""


@dataclass(frozen=True)
class Leftovers:
    """What this process, its children and all that they have started hold that outlives a trial."""

    processes: frozenset[int]
    listening: int
    descriptors: frozenset[str]
    files: frozenset[Path]


def children() -> frozenset[int]:
    """Return the ids of all processes below this one, and of those that its fork servers started, zombies included.

    The servers are left out: they last as long as this process, or the session that shares them.
    """
    parents = _parents()
    servers = _shared_servers(parents) | {*server_pids()}
    found: set[int] = set()
    todo = {os.getpid(), *servers}
    while todo:
        todo = {pid for pid, parent in parents.items() if parent in todo} - servers
        found |= todo
    return frozenset(found)


def orphans() -> frozenset[int]:
    """Return the ids of the processes that have the mark of this one, whoever their parent is now."""
    marked = _with(f"{MARK}={os.getpid()}")
    return frozenset(marked - {os.getpid()} - _shared_servers(_parents()))


def _parents() -> dict[int, int]:
    """Return the parent of each process of this machine."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _with(variable: str, command: str = "") -> set[int]:
    """Return the ids of the processes that were started with a variable, and whose command has ``command`` in it."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            if variable.encode() in variables and command.encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def _shared_servers(parents: Mapping[int, int]) -> set[int]:
    """Return the ids of the fork servers of this session. In /proc the processes that they forked look the same."""
    found = _with(f"{FORKS}={os.environ.get(FORKS)}", "verifier.processes.fork_server")
    return {pid for pid in found if parents.get(pid) not in found}


def open_in(pid: int) -> Iterator[str]:
    """Yield what the descriptors of a process lead to."""
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            yield os.readlink(link)
        except OSError:
            continue


def listening_ports(pids: Iterable[int]) -> int:
    """Return the number of TCP ports on which processes listen."""
    found = (re.fullmatch(r"socket:\[(\d+)\]", target) for pid in pids for target in open_in(pid))
    inodes = {match[1] for match in found if match is not None}
    count = 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            count += fields[3] == "0A" and fields[9] in inodes
    return count


def leftovers() -> Leftovers:
    """Return what there is now: processes, ports, open files, and files in shared memory or of a core dump."""
    started = children() | orphans()
    descriptors = [
        target
        for target in open_in(os.getpid())
        if "memfd:" in target or "(deleted)" in target or target.startswith("pipe:")
    ]
    files = {*Path("/dev/shm").glob("*"), *Path.cwd().glob("core*")}
    return Leftovers(started, listening_ports([os.getpid(), *started]), frozenset(descriptors), frozenset(files))


def of_others(path: Path, ours: Iterable[int]) -> bool:
    """Return whether a file is gone, another user's, or in use by a process that is none of ``ours``."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return True
    others = {int(folder.name) for folder in Path("/proc").glob("[0-9]*")} - {os.getpid(), *ours}
    return about.st_uid != os.getuid() or any((about.st_dev, about.st_ino) in used_by(pid) for pid in others)


def used_by(pid: int) -> set[tuple[int, int]]:
    """Return the device and inode of each file that a process has open or mapped.

    Not their names: that of a semaphore is a link to a file that was mapped under another one.
    """
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # it has been closed, or is another user's
            about = link.stat()
            found.add((about.st_dev, about.st_ino))
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = (int(part, 16) for part in device.split(":"))
            found.add((os.makedev(major, minor), int(inode)))
    return found


def added(before: Leftovers, after: Leftovers) -> Iterator[str]:
    """Yield, in words, what there is more of, without the files of others."""
    yield from (f"process {pid}" for pid in sorted(after.processes - before.processes))
    if after.listening > before.listening:
        yield f"{after.listening} listening ports, {before.listening} before"
    yield from sorted(after.descriptors - before.descriptors)
    yield from (str(path) for path in sorted(after.files - before.files) if not of_others(path, after.processes))


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Raise AssertionError if there is more after the block than before it; what ends within 15 s is not left.

    Files in shared memory count, whatever their names, unless a process that is none of ours has them in use: other
    tests and other programs of this machine have theirs there.
    """
    before = leftovers()
    outer = os.environ.get(MARK)
    os.environ[MARK] = str(os.getpid())
    try:
        yield
    finally:
        if outer is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = outer
    deadline = time.monotonic() + PATIENCE
    while (left := list(added(before, leftovers()))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left behind: {', '.join(left)}"
