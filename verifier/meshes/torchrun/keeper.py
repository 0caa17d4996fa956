"""A keeper: the work of each process of torchrun except the controller; see :mod:`.environment`."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from types import FrameType

from verifier.meshes.hosts import own_place
from verifier.meshes.processes import PoolError
from verifier.meshes.torchrun.connections import connect
from verifier.meshes.torchrun.environment import (
    VERSIONS,
    Hello,
    KeeperFailure,
    TorchrunRank,
    WorkerHello,
    gloo_interface,
)
from verifier.meshes.worker_program import ProgramSpec, WorkerProgram

__all__ = ["keep_place"]


def keep_place(own: TorchrunRank) -> int:
    """Hold the place of a rank until the controller ends, and return the status that the controller gave.

    Raises
    ------
    PoolError
        If the controller cannot be reached.
    """
    if own.node == 0:  # torchrun passes a Ctrl-C to all its processes; the controller decides what to do
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_first_to_controller(signal.SIGTERM, signal.SIGHUP)
    try:
        host, port, key = own.store().get("controller").decode().split()
        address = host, int(port), bytes.fromhex(key)
        control = connect(*address, Hello(own.rank, own_place(own.local_rank), VERSIONS))
    except (OSError, RuntimeError, EOFError, AuthenticationError) as error:  # a store's errors are RuntimeErrors
        raise PoolError(f"rank {own.rank} did not find rank 0: {error}") from error
    keeper = _Keeping(own.rank, address, control)
    try:
        return keeper.serve()
    finally:
        keeper.close()


def _leave_first_to_controller(*signals: signal.Signals) -> None:
    """Ignore the first of ``signals`` and all within a second after it; later ones have their usual effect.

    Torchrun and schedulers send them to all processes, and the controller needs its ranks to end a run in order.
    """
    kept = {number: signal.getsignal(number) for number in signals}
    until = float("inf")

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal until
        now = time.monotonic()
        if until == float("inf"):
            until = now + 1.0
        elif now >= until:
            otherwise = kept[signal.Signals(number)]
            if callable(otherwise):
                otherwise(number, frame)
            raise KeyboardInterrupt

    for number, handler in kept.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)


class _Keeping:
    """The worker processes of one rank, in its keeper."""

    def __init__(self, rank: int, address: tuple[str, int, bytes], control: Connection) -> None:
        self.rank = rank
        self._address = address
        self._control = control
        self._programs: dict[int, WorkerProgram] = {}

    def serve(self) -> int:
        """Do what the controller asks until the controller is gone, and return the exit status that it gave."""
        status: int | None = None
        while True:
            try:
                number, action, arguments = self._control.recv()
                if action == "end":
                    (status,) = arguments
                else:
                    self._control.send((number, self._do(action, *arguments)))
            except (EOFError, OSError):
                break
        if status is None:
            sys.stderr.write(f"error: rank 0 is gone, so rank {self.rank} ends\n")
            return 2
        return status

    def _do(self, action: str, number: int, *arguments: ProgramSpec) -> object:
        if action == "start":
            try:
                self._start(number, *arguments)
                return None
            except (OSError, EOFError, AuthenticationError) as error:
                return KeeperFailure(f"cannot start a process: {error}")
        program = self._programs.get(number)
        if program is None:  # it was closed before
            return False
        if action == "close":
            del self._programs[number]
        with contextlib.suppress(OSError):  # what is to be interrupted has ended, which the controller notices
            asked = getattr(program, action)  # one of a Program's
            return asked() if callable(asked) else asked
        return None

    def _start(self, number: int, spec: ProgramSpec) -> None:
        if spec.interface is None:
            spec = replace(spec, interface=gloo_interface(self._control))
        connection = connect(*self._address, WorkerHello(self.rank, number))
        try:
            self._programs[number] = WorkerProgram(spec, connection.fileno())
        finally:
            connection.close()  # only the worker's end is left, so that the controller sees it close

    def close(self) -> None:
        for program in self._programs.values():
            program.close()
