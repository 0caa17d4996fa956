"""The controller's end of a process that is, or may become, a rank."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe, wait
from typing import IO

import msgspec

from verifier.codec import pack, unpack
from verifier.logs import own_level
from verifier.meshes.worker import PHASE_CODES, WorkerConfig

__all__ = ["Gone", "PoolError", "RankProcess", "Spares"]

LOAD_LIMIT = 180.0
SEND_LIMIT = 20
STDERR_TAIL = 600
_PROGRAM = "from verifier.meshes.worker import main; main()"

_log = logging.getLogger(__name__)


class PoolError(RuntimeError):
    """The processes of a pool could not be started; nothing was tried."""


class Gone(Exception):  # noqa: N818 - an event, not an error: the process has ended, or does not read
    """Nothing can be sent to the process or received from it any more."""


class RankProcess:
    """A process that has loaded torch, or is about to, and waits to be told which rank it is.

    Parameters
    ----------
    imports
        Modules and files that it runs first.
    memory_limit
        Bytes that it may map on top of what it has once it is a rank; None for no limit.
    hash_seed
        Its ``PYTHONHASHSEED``. The order of a set of texts depends on it, and what DTensor chooses on that.

    Attributes
    ----------
    name
        What it is called in messages, such as ``rank 1``.
    loaded
        Whether it has said that it is ready to take a seat.
    """

    def __init__(self, imports: Sequence[str], memory_limit: int | None, hash_seed: int = 0) -> None:
        self.name = "spare"
        self.loaded = False
        self.connection, theirs = Pipe()
        self._limit_sending()
        lifeline_read, self._lifeline = os.pipe()
        breaker_read, self._breaker = os.pipe()
        phase_fd = os.memfd_create("phase")  # nothing on disk to be left behind
        os.ftruncate(phase_fd, mmap.PAGESIZE)
        self._phase = mmap.mmap(phase_fd, 0)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        fds = (theirs.fileno(), lifeline_read, breaker_read, phase_fd)
        config = WorkerConfig(*fds, list(imports), memory_limit, own_level())
        environment = dict(
            os.environ,
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            PYTHONHASHSEED=str(hash_seed),
            PYTHONPATH=os.pathsep.join([path for path in sys.path if path] or [""]),
        )
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, msgspec.json.encode(config).decode()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=fds,
                start_new_session=True,  # a Ctrl-C is the controller's to handle
                env=environment,
            )
        finally:
            theirs.close()
            for descriptor in (lifeline_read, breaker_read, phase_fd):
                os.close(descriptor)
        self.pid = self._popen.pid
        self._deadline = time.monotonic() + LOAD_LIMIT
        _log.debug("started process %d", self.pid)

    def _limit_sending(self) -> None:
        """Have sending to a process that does not read fail in the end: it may have been stopped."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT, 0))

    @property
    def phase(self) -> str:
        """The phase of a trial that it is in, or was in when it ended."""
        return PHASE_CODES[self._phase[0]]

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def send(self, kind: str, payload: object) -> None:
        """Send a message.

        Raises
        ------
        Gone
            If the process has ended or does not read.
        """
        self.send_packed(pack((kind, payload)))

    def send_packed(self, message: bytes) -> None:
        """Send a message that has been packed; see :meth:`send`."""
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise Gone from error

    def receive(self) -> tuple[str, int, object] | None:
        """Return a message as ``(kind, trial, payload)``; None for a log line, which goes to our own log.

        Raises
        ------
        Gone
            If the process has ended, be it within a message.
        """
        try:
            kind, about, payload = unpack(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise Gone from error
        if kind == "log":
            level, logger, text = payload
            logging.getLogger(logger).log(level, "%s: %s", self.name, text)
            return None
        return kind, about, payload

    def interrupt(self) -> None:
        """Have the process drop its connections to other ranks; a message ``pause`` has to follow."""
        try:
            os.write(self._breaker, b"b")
        except OSError as error:
            raise Gone from error

    def await_loaded(self) -> None:
        """Wait until the process can take a seat.

        Raises
        ------
        PoolError
            If it says that it cannot, as when a module of the user is missing.
        Gone
            If it is killed or crashes, or takes too long.
        """
        while not self.loaded:
            if not wait([self.connection], max(0.0, self._deadline - time.monotonic())):
                raise Gone(f"was not ready within {LOAD_LIMIT:.0f} s")
            message = self.receive()
            if message is not None and message[0] == "failed":
                raise PoolError(f"a rank did not start: {message[2]}")
            self.loaded = message is not None and message[0] == "loaded"

    def ending(self) -> str:
        """Return how the process ended, as ``signal SIGKILL`` or ``exit status 1``."""
        try:
            code = self._popen.wait(timeout=30)
        except subprocess.TimeoutExpired:
            return "a closed pipe"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def tail(self) -> str:
        """Return the end of what the process wrote to stderr."""
        end = os.fstat(self._stderr.fileno()).st_size
        start = max(0, end - STDERR_TAIL)
        return os.pread(self._stderr.fileno(), end - start, start).decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process without waiting for that."""
        self._popen.kill()

    def close(self) -> None:
        """End the process, if it lives, and release all that belongs to it."""
        self._popen.kill()
        self._popen.wait()
        self.connection.close()
        self._phase.close()
        self._stderr.close()
        os.close(self._lifeline)
        os.close(self._breaker)


class Spares:
    """Processes that wait to take the place of one that is lost; several pools may share them.

    A spare has loaded torch, and the user's files, and nothing else: it costs about as much memory as a rank and no
    time.

    Parameters
    ----------
    imports, memory_limit
        As for :class:`RankProcess`.
    count
        Number of processes that wait.
    eager
        Have them from the start; otherwise from the first loss on, since most pools never lose a process.
    """

    def __init__(
        self, imports: Sequence[str] = (), memory_limit: int | None = None, count: int = 1, eager: bool = False
    ) -> None:
        self.imports = tuple(imports)
        self.memory_limit = memory_limit
        self.count = count
        self._wanted = eager
        self._waiting: list[RankProcess] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of those that wait."""
        return [process.pid for process in self._waiting]

    def take(self, rank: int) -> RankProcess:
        """Return a process that waits, or else one that has just been started; it may still be loading.

        Ranks have hash seeds of their own, as they do wherever nobody sets one, and the same in each run. A process
        that has waited has that of rank 0.
        """
        while self._waiting:
            process = self._waiting.pop(0)
            if process.running:
                return process
            process.close()
        return self.start(rank)

    def start(self, rank: int) -> RankProcess:
        """Return a process that has just been started; those that wait are left for who is in a hurry."""
        return RankProcess(self.imports, self.memory_limit, hash_seed=rank)

    def lost(self) -> None:
        """Take note that a process was lost, so that others may be."""
        self._wanted = True

    def refill(self) -> None:
        """Start as many as are missing; does not wait for them."""
        while self._wanted and len(self._waiting) < self.count:
            self._waiting.append(RankProcess(self.imports, self.memory_limit))

    def close(self) -> None:
        """End all that wait."""
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            process.kill()
        for process in waiting:
            process.close()
