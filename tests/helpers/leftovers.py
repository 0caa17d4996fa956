"""Finds what processes leave behind: processes (also orphans), ports, shared memory, and open files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from verifier.processes.fork_server import NAME
from verifier.processes.forks import FORKS, server_pids

MARK = "DTENSOR_VERIFIER_TESTS"
"""An environment variable of all processes that these tests start, by which an orphan is recognised."""
PATIENCE = 15.0
"""Seconds to wait for ending processes."""


@dataclass(frozen=True)
class Leftovers:
    """Resources of this process and its descendants that outlive a trial."""

    processes: frozenset[int]
    listening: int
    descriptors: frozenset[str]
    files: frozenset[Path]


def children() -> frozenset[int]:
    """Return the ids of this process's descendants and of its fork servers' processes, zombies included.

    The servers are left out: they last as long as this process, or the session that shares them.
    """
    parents = _parents()
    servers = _shared_servers() | {*server_pids()}
    found: set[int] = set()
    todo = {os.getpid(), *servers}
    while todo:
        todo = {pid for pid, parent in parents.items() if parent in todo} - servers
        found |= todo
    return frozenset(found)


def orphans() -> frozenset[int]:
    """Return the ids of the processes that have the mark of this one, whatever their parent is now."""
    marked = _with(f"{MARK}={os.getpid()}")
    return frozenset(marked - {os.getpid()} - _shared_servers())


def _parents() -> dict[int, int]:
    """Return the parent of each process of this machine."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _with(variable: str, name: str | None = None) -> set[int]:
    """Return the ids of the processes with this environment variable, of a certain name if one is given."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            if variable.encode() in variables and name in (None, (folder / "comm").read_text().strip()):
                found.add(int(folder.name))
    return found


def _shared_servers() -> set[int]:
    """Return the ids of the fork servers of this session. Some of them were forked from others."""
    return _with(f"{FORKS}={os.environ.get(FORKS)}", NAME)


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
    """Return the present processes, ports, open files, and files in shared memory or of core dumps."""
    started = children() | orphans()
    descriptors = [
        target
        for target in open_in(os.getpid())
        if "memfd:" in target or "(deleted)" in target or target.startswith("pipe:")
    ]
    files = {*Path("/dev/shm").glob("*"), *Path.cwd().glob("core*")}
    return Leftovers(started, listening_ports([os.getpid(), *started]), frozenset(descriptors), frozenset(files))


def of_others(path: Path, ours: Iterable[int]) -> bool:
    """Return whether a file is gone, belongs to another user, or is used by a process not in ``ours``."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return True
    others = {int(folder.name) for folder in Path("/proc").glob("[0-9]*")} - {os.getpid(), *ours}
    return about.st_uid != os.getuid() or any((about.st_dev, about.st_ino) in used_by(pid) for pid in others)


def used_by(pid: int) -> set[tuple[int, int]]:
    """Return the device and inode of each file that a process has open or mapped.

    Names are not enough: the name of a semaphore is a link to a file that was mapped under another name.
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
    """Yield, in words, the additional leftovers, without the files of others."""
    yield from (f"process {pid}" for pid in sorted(after.processes - before.processes))
    if after.listening > before.listening:
        yield f"{after.listening} listening ports, {before.listening} before"
    yield from sorted(after.descriptors - before.descriptors)
    yield from (str(path) for path in sorted(after.files - before.files) if not of_others(path, after.processes))


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Raise AssertionError if there is more after the block than before it, and still after 15 s.

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
