"""Child processes that may be killed, crash or hang: ranks, level-1 workers and scripts of findings.

A :class:`Child` runs the function ``main`` of a module, which calls :func:`begin` first. It has a connection to this
process, memory shared with it, and a pipe that kills the child when this process has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from verifier.core.wording import signal_name
from verifier.processes.fork_server import start
from verifier.processes.forks import Forked, Step, fork, load_ahead
from verifier.processes.limits import die_with

__all__ = ["Child", "begin", "load_child_ahead", "without_launcher"]

ENDING_LIMIT = 30.0
"""Seconds that a process gets to end after it was killed or its connection was closed."""
_LOG_READ = 8192
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_PREFIXES_OF_A_LAUNCHER = ("ROLE_", "MASTER_", "TORCHELASTIC_")


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment without the variables by which a launcher, such as torchrun, says which rank this is."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_LAUNCHER and not name.startswith(_PREFIXES_OF_A_LAUNCHER)
    }


class Child:
    """The controller's end of a child process.

    Parameters
    ----------
    module
        The child runs the function ``main`` of this module.
    connection_fd
        The child's end of the connection; the caller closes its own copy.
    arguments
        What :func:`begin` returns in the child.
    fds
        Further file descriptors of the child; the caller closes its own copies.
    environment
        The child's environment, without the variables that every child gets.
    steps
        What fork servers do before they start the child; a process that is not forked must do this itself.
    base
        See :func:`verifier.processes.forks.fork`.

    Attributes
    ----------
    memory
        A page that the child shares with this process; readable until :meth:`close`, even after the child has ended.
    """

    def __init__(
        self,
        module: str,
        connection_fd: int,
        arguments: Sequence[str] = (),
        fds: Sequence[int] = (),
        environment: Mapping[str, str] = os.environ,
        steps: Sequence[Step] = (),
        base: str = "",
    ) -> None:
        lifeline, self._lifeline = os.pipe()
        memory_fd = os.memfd_create("memory")  # nothing on disk to be left behind
        os.ftruncate(memory_fd, mmap.PAGESIZE)
        self.memory = mmap.mmap(memory_fd, 0)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        own = (connection_fd, lifeline, memory_fd, *fds)
        given, path = _given(environment)
        log = self._log.fileno()
        try:
            forked = fork(module, arguments, log, own, given, path, steps, base)
            self._process: Forked | subprocess.Popen[bytes] = forked or start(module, own, arguments, log, given)
        except BaseException:
            self._release()
            raise
        finally:
            os.close(lifeline)
            os.close(memory_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def computed(self) -> float:
        """CPU seconds that it has used; 0 if it has ended."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]  # proc_pid_stat(5); a name may have blanks in it
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def ending(self) -> str:
        """Return how it ended, as ``signal SIGKILL`` or ``exit status 1``, after its connection was closed."""
        try:
            code = self._process.wait(timeout=ENDING_LIMIT)
        except subprocess.TimeoutExpired:
            return "a closed pipe"
        return f"signal {signal_name(-code)}" if code < 0 else f"exit status {code}"

    def signal(self) -> int:
        """Return the signal that ended it; 0 for none."""
        return max(0, -(self._process.poll() or 0))

    @property
    def written(self) -> int:
        """Bytes that it has written to stdout and stderr."""
        return os.fstat(self._log.fileno()).st_size

    def log(self, since: int = 0) -> tuple[str, bool]:
        """Return the last text that it wrote after byte ``since``, and whether this text begins within a line."""
        end = self.written
        start = max(since, end - _LOG_READ)
        return os.pread(self._log.fileno(), end - start, start).decode(errors="replace"), start > since

    def kill(self) -> None:
        """Kill it without waiting."""
        self._process.kill()

    def close(self) -> None:
        """End it if it runs, and release its resources."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, which kills it on the way out
            self._process.wait(timeout=ENDING_LIMIT)
        self._release()

    def _release(self) -> None:
        self.memory.close()
        self._log.close()
        os.close(self._lifeline)


def load_child_ahead(module: str, environment: Mapping[str, str], steps: Sequence[Step], base: str) -> None:
    """Start the fork server of children with these arguments, which loads while this process does other work."""
    given, path = _given(environment)
    load_ahead(module, steps, given, path, base)


def _given(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a child, and its ``sys.path``."""
    path = [path for path in sys.path if path]
    return {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or [""])}, path


def begin() -> tuple[Connection, mmap.mmap, list[int], list[str]]:
    """Return in a new child its connection, shared memory, further descriptors and arguments.

    From then on the child is killed when the controller has ended, and writes no core dump.
    """
    connection_fd, lifeline, memory_fd, *fds = map(int, sys.argv[1].split(","))
    die_with(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # crashes are expected
    return Connection(connection_fd), mmap.mmap(memory_fd, 0), fds, sys.argv[2:]
