"""A child process that may be killed, crash or hang: ranks, level-1 workers and scripts of findings are such.

A :class:`Child` runs the function ``main`` of a module, which calls :func:`begin` first. It has a connection to this
process, memory that is shared with it, and a pipe whose end kills it when this process is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from verifier.core.wording import signal_name
from verifier.processes.fork_server import start
from verifier.processes.forks import Forked, Step, fork
from verifier.processes.limits import die_with

__all__ = ["Child", "begin", "run_to_end"]

ENDING_LIMIT = 30.0
"""Seconds that a process gets to end that is killed, or whose connection is closed."""
GROUP_ENDING_LIMIT = 2.0
"""Seconds that processes get to end once they are asked to."""
_LOG_READ = 8192


class Child:
    """The controller's end of a child process.

    Parameters
    ----------
    module
        Whose function ``main`` it runs.
    connection_fd
        Its end of the connection to this process; the caller closes its own copy.
    arguments
        What :func:`begin` returns to it.
    fds
        Further file descriptors that it inherits; the caller closes its own copies.
    environment
        Its environment, to which what every child has is added.
    steps
        What fork servers do before they start it; a process that is not forked has to do the same itself.

    Attributes
    ----------
    memory
        A page that it shares with this process; it can be read until :meth:`close`, whatever becomes of the child.
    """

    def __init__(
        self,
        module: str,
        connection_fd: int,
        arguments: Sequence[str] = (),
        fds: Sequence[int] = (),
        environment: Mapping[str, str] = os.environ,
        steps: Sequence[Step] = (),
    ) -> None:
        lifeline, self._lifeline = os.pipe()
        memory_fd = os.memfd_create("memory")  # nothing on disk to be left behind
        os.ftruncate(memory_fd, mmap.PAGESIZE)
        self.memory = mmap.mmap(memory_fd, 0)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        own = (connection_fd, lifeline, memory_fd, *fds)
        path = [path for path in sys.path if path]
        given = {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or [""])}
        log = self._log.fileno()
        try:
            forked = fork(module, arguments, log, own, given, path, steps)
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
        """Seconds of processors that it has used; 0 if it has ended."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]  # proc_pid_stat(5); a name may have blanks in it
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def ending(self) -> str:
        """Return how it ended, as ``signal SIGKILL`` or ``exit status 1``, once its end of the connection is closed."""
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
        """Return the end of what it has written since byte ``since``, and whether that begins within a line."""
        end = self.written
        start = max(since, end - _LOG_READ)
        return os.pread(self._log.fileno(), end - start, start).decode(errors="replace"), start > since

    def kill(self) -> None:
        """End it without waiting for that."""
        self._process.kill()

    def close(self) -> None:
        """End it, if it lives, and release all that belongs to it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, which kills it on the way out
            self._process.wait(timeout=ENDING_LIMIT)
        self._release()

    def _release(self) -> None:
        self.memory.close()
        self._log.close()
        os.close(self._lifeline)


def begin() -> tuple[Connection, mmap.mmap, list[int], list[str]]:
    """Return, in a child that has just started, the connection, the shared memory, further descriptors and arguments.

    From here on the child is killed when the controller is gone, and leaves no core behind.
    """
    connection_fd, lifeline, memory_fd, *fds = map(int, sys.argv[1].split(","))
    die_with(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # crashes are expected
    return Connection(connection_fd), mmap.mmap(memory_fd, 0), fds, sys.argv[2:]


def run_to_end(path: Path, limit: float) -> tuple[int | None, str]:
    """Run a script in its folder and end all that it has started.

    Return the exit status, None if the script has not ended after ``limit`` seconds, and what it wrote: stderr first.
    """
    with subprocess.Popen(
        [sys.executable, str(path)],
        cwd=path.parent,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group with what it starts, which would live on without it
    ) as script:
        try:
            said, errors = script.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # after a Ctrl-C as well
            _end_group(script)
    return script.returncode, errors + said


def _end_group(leader: subprocess.Popen[str]) -> None:
    """End the processes of a group, if they have not ended.

    They are asked to first: what unlinks their semaphores once they are gone ignores that, and goes by itself.
    """
    for asked in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GROUP_ENDING_LIMIT
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, asked)
            while time.monotonic() < until:
                leader.poll()
                os.killpg(leader.pid, 0)
                time.sleep(0.02)
            continue
        return
