"""The client of fork servers, which have loaded torch so that processes start at once.

A program has one server for each hash seed and each module whose ``main`` its processes run, and shares it among all
pools. A server may be forked from another one, which has loaded torch alone. A further server, which that one forks,
loads the user's imports. ``DTENSOR_VERIFIER_FORKS=off`` turns servers off. Several programs, such as those of a test
session, share the servers of the program that sets the variable by :func:`shared_servers`; each program has its own
imports.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

from verifier.processes.fork_server import ENDED, STARTED, Request, of_this_user, send_request, start

__all__ = ["FORKS", "Forked", "Step", "fork", "load_ahead", "server_pids", "servers_name", "shared_servers"]

FORKS = "DTENSOR_VERIFIER_FORKS"
"""Environment variable: ``off``, or the name under which programs share servers."""
LOAD_LIMIT = 180.0
"""Seconds that a server gets to load torch."""
MOST_OF_IMPORTS = 8
"""Most servers with imports of the user's that a process has."""
LISTEN_LIMIT = 2.0
"""Seconds to wait for a server that another process is starting."""
_AT_LOAD = ("ATEN_", "CUDA_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH")
"""Prefixes of environment variables that torch may read while loading; each set of values gets its own server."""
_NOT_AT_LOAD = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""Variables that torch does not read while loading: it sets the first one then; torchrun sets the second one."""


Step: TypeAlias = tuple[str, ...]
"""A function that a server calls once, as ``module:name``, and its arguments."""


class Forked:
    """A process that a fork server starts for this one, with the methods of :class:`subprocess.Popen`.

    Parameters
    ----------
    connection
        The connection to the server, after the request was sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = 0
        self._pidfd = -1
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """The process id, after waiting for the server; 0 if the server ended before it started the process."""
        self._meet(LOAD_LIMIT)
        return self._pid

    def poll(self) -> int | None:
        """Return how the process ended, as :meth:`subprocess.Popen.poll` does; None if it has not ended."""
        return self._ended(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the end; raises :class:`subprocess.TimeoutExpired`."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return status

    def kill(self) -> None:
        """Kill the process. If the server has not started it yet, it ends when it finds its lifeline closed."""
        if self._status is None and not self._meet(0.0):
            self._leave(-signal.SIGKILL)
        elif self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _meet(self, timeout: float) -> bool:
        """Return whether the process id has come within ``timeout`` seconds, or will never come."""
        if self._pid or self._status is not None:
            return True
        if not _readable(self._connection.fileno(), timeout):
            return False
        answer, fds = b"", list[int]()
        with contextlib.suppress(OSError):
            answer, fds, *_ = socket.recv_fds(self._connection, STARTED.size, 1)
        if fds:
            self._pid, self._pidfd = STARTED.unpack(answer)[0], fds[0]
            os.set_inheritable(self._pidfd, False)
        else:  # the server is gone
            self._leave(1)
        return True

    def _ended(self, timeout: float) -> int | None:
        until = time.monotonic() + timeout
        if self._meet(timeout) and self._status is None and _readable(self._pidfd, max(0.0, until - time.monotonic())):
            answer = b""
            if _readable(self._connection.fileno(), 1.0):
                with contextlib.suppress(OSError):
                    answer = self._connection.recv(ENDED.size)
            self._leave(ENDED.unpack(answer)[0] if answer else 1)  # 1: the server is gone, so the status is not known
        return self._status

    def _leave(self, status: int) -> None:
        self._status = status
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def fork(
    module: str,
    arguments: Sequence[str],
    log: int,
    fds: Sequence[int],
    environment: Mapping[str, str],
    path: Sequence[str],
    steps: Sequence[Step] = (),
    base: str = "",
    folder: str = "",
) -> Forked | None:
    """Have a fork server start a process when it has loaded torch; return None if there is no server.

    Parameters
    ----------
    module
        The process runs the function ``main`` of this module.
    arguments
        Its command line, after the numbers of its descriptors.
    log
        Where it writes its stdout and stderr.
    fds
        Its other descriptors, whose numbers are its first argument.
    environment, path
        Its environment and its ``sys.path``.
    steps
        What the server does before it forks. Programs share the first step, but not others.
    base
        A module that is loaded in a server of its own, from which the server is forked; empty for none.
    folder
        Where it runs; empty for the folder of this process.
    """
    if os.environ.get(FORKS) == "off":
        return None
    try:
        with _starting:
            connection = _server(module, steps, environment, path, base)
    except OSError:
        return None
    if connection is None:
        return None
    try:
        request = Request(module, [*arguments], {**environment}, folder or os.getcwd(), [*path])
        send_request(connection, request, [log, *fds])
    except OSError:
        connection.close()
        return None
    return Forked(connection)


def load_ahead(
    module: str, steps: Sequence[Step], environment: Mapping[str, str], path: Sequence[str], base: str = ""
) -> None:
    """Start the server from which :func:`fork` will start processes; it loads while this process does other work."""
    if os.environ.get(FORKS) == "off":
        return
    with contextlib.suppress(OSError), _starting:
        if (connection := _server(module, [*steps], environment, path, base)) is not None:
            connection.close()


def _server(
    module: str, steps: Sequence[Step], environment: Mapping[str, str], path: Sequence[str], base: str = ""
) -> socket.socket | None:
    """Return a connection to a server that has done ``steps``, or is about to; None if it has ended."""
    own = len(steps) > 1
    owner = (not own and os.environ.get(FORKS)) or _own_name(os.getpid())
    given = {name: value for name, value in environment.items() if name not in _NOT_AT_LOAD}
    at_load = sorted(pair for pair in given.items() if pair[0].startswith(_AT_LOAD))
    about: list[object] = [module, environment.get("PYTHONHASHSEED"), at_load, sys.executable, __file__]
    about += [[*steps], [*path] if own else _installed_in(path), os.getcwd() if own else ""] if steps else []
    name = f"{owner}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"
    connection = _connect(name)
    if connection is not None or name in _started:
        if name in _with_imports:  # the one that was used last is the last
            _with_imports.append(_with_imports.pop(_with_imports.index(name)))
        return connection
    lifeline = _connect(owner)  # its end tells the server that its owner has ended
    if lifeline is None:
        return None
    with lifeline, socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return _await(name)
        listener.listen(128)
        fds = listener.fileno(), lifeline.fileno()
        arguments = [module, json.dumps(steps[-1:])]
        if own or base:
            parent = (
                _server(module, steps[:-1], environment, path, base) if own else _server(base, (), environment, path)
            )
            if parent is None:
                return None
            request = Request("verifier.processes.fork_server", arguments, {**environment}, os.getcwd(), [*path])
            with open(os.devnull, "wb") as log:
                send_request(parent, request, [log.fileno(), *fds])
            _started[name] = Forked(parent)
            if own:
                _with_imports.append(name)
                _retire_all_but(MOST_OF_IMPORTS)
        else:
            loading = {**environment, "PYTHONPATH": os.pathsep.join(path or [""])}
            _started[name] = start("verifier.processes.fork_server", fds, arguments, subprocess.DEVNULL, loading)
        return _connect(name)


def _connect(name: str) -> socket.socket | None:
    """Return a connection to the server ``name``, which may still be loading; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_address(name))
    except ConnectionRefusedError:
        connection.close()
        return None
    if not of_this_user(connection):
        connection.close()
        raise PermissionError(f"the socket {name} is another user's")
    return connection


def _address(name: str) -> bytes:
    return b"\0" + name.encode()  # an abstract address, so that no file stays behind


def _installed_in(path: Sequence[str]) -> list[str]:
    """Return the folders of ``path`` in which distributions are installed, whose entry points a step may load.

    What an installed package has vendored, and adds to the path once it is imported, is left out.
    """
    found: list[str] = []
    for folder in dict.fromkeys(path):
        if any(folder.startswith(f"{other}{os.sep}") for other in found):
            continue
        with contextlib.suppress(OSError):
            if any(name.endswith((".dist-info", ".egg-info")) for name in os.listdir(folder or ".")):
                found.append(folder)
    return found


def _retire_all_but(most: int) -> None:
    """Have the servers with imports that were used longest ago end, once their processes have ended."""
    retired, _with_imports[:-most] = _with_imports[:-most], []
    for name in retired:
        del _started[name]
        if (connection := _connect(name)) is not None:
            with connection:
                send_request(connection, Request("", [], {}, "", []), [])


def _await(server: str) -> socket.socket | None:
    """Return a connection to a server that another process of the session is just starting."""
    until = time.monotonic() + LISTEN_LIMIT
    while (connection := _connect(server)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return connection


_starting = threading.Lock()
"""Several threads may start pools at a time."""
_started: dict[str, subprocess.Popen[bytes] | Forked] = {}
_with_imports: list[str] = []
"""The servers with imports of the user's, by the time of their last use."""
_listeners: list[socket.socket] = []


@cache
def _own_name(pid: int) -> str:
    """Return the name of the servers that only this process uses; forked processes have other names."""
    name = f"dtensor-verifier-{pid}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address(name))
    listener.listen(128)
    _listeners.append(listener)  # open as long as this process lives
    return name


def servers_name() -> str:
    """Return the name under which other processes share the servers of this process; ``off`` if it has none."""
    return os.environ.get(FORKS) or _own_name(os.getpid())


def server_pids() -> list[int]:
    """Return the process ids of the servers that this process has started."""
    return [server.pid for server in _started.values()]


@contextmanager
def shared_servers() -> Iterator[None]:
    """Let all programs that this one starts share its servers, which end with the block."""
    before = os.environ.get(FORKS)
    name = f"dtensor-verifier-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_address(name))
        listener.listen(128)
        os.environ[FORKS] = name
        try:
            yield
        finally:
            os.environ.pop(FORKS, None)
            if before is not None:
                os.environ[FORKS] = before
