"""A worker's process as the machine that it runs on sees it: started, watched and ended, whoever talks to it."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import msgspec

from verifier.core.process_limits import program_of
from verifier.core.wording import signal_name
from verifier.meshes.worker import PHASE_CODES, WorkerConfig

__all__ = ["LOOPBACK", "Program", "ProgramSpec", "WorkerProgram"]

LOOPBACK = "lo"
STDERR_READ = 8192
STDERR_TAIL = 600
ENDING_LIMIT = 30.0
"""Seconds that a process gets to end that is killed, or whose connection is closed."""
_SOURCE = program_of("verifier.meshes.worker")
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_PREFIXES_OF_A_LAUNCHER = ("ROLE_", "MASTER_", "TORCHELASTIC_")


_LOG_RECORD = re.compile(r"^(\[rank\d+\]:)?[DIWE]\d{4} \d\d:\d\d:\d\d")
_ENDS = re.compile(r"^(terminate called|Fatal Python error)", re.MULTILINE)


def last_words(text: str, cut: bool = False) -> str:
    """Return what the end of a process's stderr tells of its end: whole lines, some 600 characters at most.

    What torch logs is left out: it warns of this and that before. An abort begins where the runtime says so. ``cut``
    says that ``text`` begins within a line.

    >>> last_words("[rank0]:W1122 12:05:01.628000 26003 torch/x.py:1] falling back\\nkilled by hand\\n")
    'killed by hand'
    """
    if (end := _ENDS.search(text)) is not None:
        return text[end.start() :][:STDERR_TAIL].strip()
    lines = text.splitlines()[1 if cut else 0 :]
    kept = [line for line in lines if not _LOG_RECORD.match(line)]
    while len(kept) > 1 and sum(len(line) + 1 for line in kept) > STDERR_TAIL:
        del kept[0]
    return "\n".join(kept)[-STDERR_TAIL:].strip()


class Program(Protocol):
    """What the controller does with a worker's process besides talking to it, on whatever machine it is."""

    @property
    def pid(self) -> int:
        """Process id, on the machine that it runs on."""

    @property
    def phase(self) -> str:
        """The phase of a trial that it is in, or was in when it ended."""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""

    @property
    def computed(self) -> float:
        """Seconds of processors that it has used; 0 if that is not known."""

    def interrupt(self) -> None:
        """Have it drop its connections to other ranks; raises an OSError if it has ended."""

    def ending(self) -> str:
        """Return how it ended, as ``signal SIGKILL`` or ``exit status 1``."""

    def signal(self) -> int:
        """Return the signal that ended it; 0 for none."""

    def tail(self) -> str:
        """Return the end of what it wrote to stderr."""

    def kill(self) -> None:
        """End it without waiting for that."""

    def close(self) -> None:
        """End it, if it lives, and release all that belongs to it."""


@dataclass(frozen=True)
class ProgramSpec:
    """What a worker is started with.

    Parameters
    ----------
    imports
        Modules and files that it runs first.
    memory_limit
        Bytes that it may map on top of what it has once it is a rank; None for no limit.
    log_level
        The level from which on it sends log lines.
    hash_seed
        Its ``PYTHONHASHSEED``. The order of a set of texts depends on it, and what DTensor chooses on that.
    interface
        The network interface on which gloo meets other ranks; None leaves that to gloo.
    """

    imports: tuple[str, ...]
    memory_limit: int | None
    log_level: int
    hash_seed: int
    interface: str | None = LOOPBACK


class WorkerProgram:
    """A :class:`Program` on this machine, a child of this process.

    Parameters
    ----------
    spec
        What it is started with.
    connection_fd
        Its end of the connection to the controller; the caller closes its own copy.
    """

    def __init__(self, spec: ProgramSpec, connection_fd: int) -> None:
        lifeline_read, self._lifeline = os.pipe()
        breaker_read, self._breaker = os.pipe()
        phase_fd = os.memfd_create("phase")  # nothing on disk to be left behind
        os.ftruncate(phase_fd, mmap.PAGESIZE)
        self._phase = mmap.mmap(phase_fd, 0)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        fds = (connection_fd, lifeline_read, breaker_read, phase_fd)
        config = WorkerConfig(*fds, list(spec.imports), spec.memory_limit, spec.log_level)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _SOURCE, msgspec.json.encode(config).decode()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=fds,
                start_new_session=True,  # its terminal and its group are the controller's
                env=_environment(spec),
            )
        except BaseException:
            self._release()
            raise
        finally:
            for descriptor in (lifeline_read, breaker_read, phase_fd):
                os.close(descriptor)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def phase(self) -> str:
        return PHASE_CODES[self._phase[0]]

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    @property
    def computed(self) -> float:
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]  # proc_pid_stat(5); a name may have blanks in it
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def interrupt(self) -> None:
        os.write(self._breaker, b"b")

    def ending(self) -> str:
        try:
            code = self._popen.wait(timeout=ENDING_LIMIT)
        except subprocess.TimeoutExpired:
            return "a closed pipe"
        return f"signal {signal_name(-code)}" if code < 0 else f"exit status {code}"

    def signal(self) -> int:
        return max(0, -(self._popen.poll() or 0))

    def tail(self) -> str:
        end = os.fstat(self._stderr.fileno()).st_size
        start = max(0, end - STDERR_READ)
        return last_words(os.pread(self._stderr.fileno(), end - start, start).decode(errors="replace"), cut=start > 0)

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, which kills it on the way out
            self._popen.wait(timeout=ENDING_LIMIT)
        self._release()

    def _release(self) -> None:
        self._phase.close()
        self._stderr.close()
        os.close(self._lifeline)
        os.close(self._breaker)


def _environment(spec: ProgramSpec) -> dict[str, str]:
    """Return the environment of a worker: ours, without what a launcher told us of our own rank.

    DeviceMesh and the user's files would take that for the worker's (LOCAL_RANK names a GPU, for one).
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_LAUNCHER and not name.startswith(_PREFIXES_OF_A_LAUNCHER)
    }
    if spec.interface is not None:
        kept["GLOO_SOCKET_IFNAME"] = spec.interface
    path = os.pathsep.join([path for path in sys.path if path] or [""])
    return dict(kept, OMP_NUM_THREADS="1", PYTHONHASHSEED=str(spec.hash_seed), PYTHONPATH=path)
