"""The program of a fork server: a process that has loaded torch and forks processes that need it.

A server loads a module, then waits for requests on a Unix socket. For each request it starts a process that runs the
function ``main`` of the module. It forks these processes, so that they start at once. Forking is safe because the
server has no thread, no process group and no CUDA context; if loading made any of these, the server does not fork.

The ``forkserver`` of :mod:`multiprocessing` is not enough: a program has only one, but ranks need one for each hash
seed. Its processes have the environment, folder and output of the server, and outlive a killed client.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import selectors
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from verifier.processes.limits import die_with

__all__ = ["ENDED", "NAME", "STARTED", "Request", "of_this_user", "send_request", "start"]

STARTED = struct.Struct("i")
"""The first answer of a server: the process id, sent with a pidfd."""
ENDED = struct.Struct("i")
"""The second answer: the exit status, or the signal that ended the process as a negative number."""
NAME = "fork server"
"""The name of a server's process."""
_LENGTH = struct.Struct("I")
_PEER = struct.Struct("3i")
_MOST_FDS = 32
_REQUEST_LIMIT = 10.0
"""Seconds that a client gets to send its request."""


@dataclass(frozen=True)
class Request:
    """A client's request. The descriptors of the process are sent with it, the first for stdout and stderr.

    Parameters
    ----------
    module
        The process runs the function ``main`` of this module; without one, the server retires.
    arguments
        Its command line, after the numbers of its descriptors.
    environment, folder, path
        Its environment, working directory and ``sys.path``.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    path: list[str]


def start(
    module: str, fds: Sequence[int], arguments: Sequence[str], log: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that runs the function ``main`` of ``module``.

    The process ignores SIGINT, SIGTERM and SIGHUP. Schedulers send these to all processes of a job; the controller
    gets them too, and would otherwise blame the trial for the end of a rank. Garbage is not collected, because loading
    leaves none and looking for it takes a sixth of the time. ``_signal`` loads faster than ``signal``.

    Parameters
    ----------
    fds
        Descriptors that it inherits; their numbers are its first argument.
    log
        The descriptor of its stdout and stderr.
    """
    ignored = "; ".join(f"s.signal(s.{name}, s.SIG_IGN)" for name in ("SIGINT", "SIGTERM", "SIGHUP"))
    source = f"import gc, _signal as s; gc.disable(); {ignored}; from {module} import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", source, ",".join(map(str, fds)), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=fds,
        start_new_session=True,  # otherwise it would share the controller's terminal and group
        env=environment,
    )


def of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user; other users can see the socket too."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())


def send_request(connection: socket.socket, request: Request, fds: Sequence[int]) -> None:
    """Send a request with its descriptors; raises an OSError if the server is gone."""
    text = pickle.dumps(request)  # variables and paths may be no UTF-8
    socket.send_fds(connection, [_LENGTH.pack(len(text))], list(fds))
    connection.sendall(text)


def receive_request(connection: socket.socket) -> tuple[Request, list[int]]:
    """Receive a request with its descriptors; raises an OSError or an EOFError if the client is gone."""
    head, fds, *_ = socket.recv_fds(connection, _LENGTH.size, _MOST_FDS)
    try:
        if len(head) < _LENGTH.size:
            raise EOFError
        text = bytearray()
        while len(text) < _LENGTH.unpack(head)[0]:
            if not (part := connection.recv(_LENGTH.unpack(head)[0] - len(text))):
                raise EOFError
            text += part
        return pickle.loads(text), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


@dataclass(frozen=True)
class _Process:
    """A started process, how to wait for its end, and the client to tell about the end."""

    pidfd: int
    wait: Callable[[], int]
    client: socket.socket


class _Server:
    def __init__(self, listener: socket.socket, lifeline: int, forks: bool, path: Sequence[str]) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._forks = forks
        self._path = path
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until a client retires this server, and its last process has ended."""
        while self._listener.fileno() >= 0 or self._processes:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._reap(self._processes.pop(key.fd))

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.settimeout(_REQUEST_LIMIT)
        try:
            if not of_this_user(client):
                raise PermissionError
            request, fds = receive_request(client)
        except (OSError, EOFError, pickle.UnpicklingError):
            client.close()
            return
        if not request.module:
            self._selector.unregister(self._listener)
            self._listener.close()
            client.close()
            return
        try:
            if _hung_up(client):  # while this server was loading
                raise ConnectionResetError
            pid, wait = self._fork(client, request, fds) if self._forks else _start(request, fds)
        except OSError:  # no memory, for example: the client sees that its connection is closed
            client.close()
            return
        finally:
            for fd in fds:
                os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._processes[pidfd] = _Process(pidfd, wait, client)
        self._selector.register(pidfd, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the client is gone, and so is the process in a moment
            socket.send_fds(client, [STARTED.pack(pid)], [pidfd])

    def _fork(self, client: socket.socket, request: Request, fds: list[int]) -> tuple[int, Callable[[], int]]:
        pid = os.fork()
        if pid == 0:
            held = [fd for process in self._processes.values() for fd in (process.pidfd, process.client.fileno())]
            own = [self._listener.fileno(), self._lifeline, self._selector.fileno()]
            _become(request, self._path, fds, [client.fileno(), *own, *held])
        return pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _reap(self, process: _Process) -> None:
        status = process.wait()
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        with contextlib.suppress(OSError):
            process.client.send(ENDED.pack(status))
        process.client.close()


def _hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _start(request: Request, fds: Sequence[int]) -> tuple[int, Callable[[], int]]:
    """Start the requested process without a fork."""
    os.chdir(request.folder)
    environment = {**request.environment, "PYTHONPATH": os.pathsep.join(request.path or [""])}
    process = start(request.module, fds[1:], request.arguments, fds[0], environment)
    return process.pid, process.wait


def _become(request: Request, path: Sequence[str], fds: Sequence[int], of_the_server: Sequence[int]) -> NoReturn:
    """Run the requested function in a process that was just forked, and end with its status."""
    status: object = 1
    try:
        _call_this_process("python")
        for fd in of_the_server:
            os.close(fd)
        os.setsid()
        log, *given = fds
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        for fd in given:
            os.set_inheritable(fd, False)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.path[:] = dict.fromkeys(["", *request.path, *path])
        importlib.invalidate_caches()
        sys.argv[:] = ["-c", ",".join(map(str, given)), *request.arguments]
        sys.modules[request.module].main()
        status = 0
    except SystemExit as asked:
        status = asked.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the end of the process
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF if isinstance(status, int) else 1)  # skips the exit handlers of the server


def _call_this_process(name: str) -> None:
    """Set the name of this process that ``ps`` and ``top`` show."""
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def _may_fork() -> bool:
    """Return whether a process forked from this one can use all loaded modules."""
    torch = sys.modules.get("torch")
    return len(os.listdir("/proc/self/task")) == 1 and not (torch is not None and torch.cuda.is_initialized())


def main() -> None:
    """Load a module, do further steps, and serve.

    The arguments are the descriptors of the listener and the lifeline, the module, and the steps in JSON: lists of a
    function, as ``module:name``, and its arguments.
    """
    descriptors, module, steps = sys.argv[1:]
    listener, lifeline = map(int, descriptors.split(","))
    die_with(lifeline)
    _call_this_process(NAME)
    path, forks = [*sys.path], True
    try:
        importlib.import_module(module)
        for function, *arguments in json.loads(steps):
            owner, _, name = function.partition(":")
            getattr(importlib.import_module(owner), name)(*arguments)
    except BaseException:  # noqa: BLE001 - a process that is not forked will show the error
        forks = False
    forks = forks and _may_fork()
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to all pages of loaded modules, and so copy them
    added = [folder for folder in sys.path if folder not in path]  # by imported files, for the modules beside them
    _Server(socket.socket(fileno=listener), lifeline, forks, added).serve()
