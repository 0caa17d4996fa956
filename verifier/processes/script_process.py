"""The program of a script's process, and of the ranks that the script starts.

The fork servers of this module have loaded torch alone. A script starts its ranks by :mod:`multiprocessing` with the
method ``spawn``. Here a rank is forked from the server that has the rank's hash seed. All else is as with ``spawn``:
the rank runs the script again, as the module ``__mp_main__``, and gets its arguments as a pickle.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import context, popen_spawn_posix, process, reduction, spawn, util
from typing import Any

import torch.distributed.tensor  # noqa: F401 - what is loaded once

from verifier.processes.forks import Forked, fork
from verifier.processes.limits import die_with
from verifier.processes.scripts import TORCH_ALONE, WITH_COMPILER

_FREE = 256
"""The descriptors of a new process are below this number."""


class _ForkedRank(popen_spawn_posix.Popen):
    """A process that a script starts, forked from a process that has loaded torch."""

    _forked: Forked | None = None
    _pid = 0

    @property
    def pid(self) -> int:
        """The process id. A server may still be loading torch, so that it is waited for only when it is asked for."""
        return self._pid if self._forked is None else self._forked.pid

    @pid.setter
    def pid(self, pid: int) -> None:
        self._pid = pid

    def _launch(self, process_obj: Any) -> None:
        message = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), message)
            reduction.dump(process_obj, message)
        finally:
            context.set_spawning_popen(None)
        given: list[int] = self._fds
        self._fds: list[int] = []
        (theirs, ours), (self.sentinel, alive), (lifeline, kept) = os.pipe(), os.pipe(), os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, [self.sentinel, ours, kept])  # type: ignore[attr-defined]
        fds = [1, theirs, alive, lifeline, *given]
        self._forked = fork(
            TORCH_ALONE, ["rank", json.dumps(given)], 2, fds, os.environ, [p for p in sys.path if p], WITH_COMPILER,
            TORCH_ALONE,
        )  # fmt: skip
        for fd in (theirs, alive, lifeline):
            os.close(fd)
        if self._forked is None:
            super()._launch(process_obj)  # type: ignore[misc]
            return
        with open(ours, "wb", closefd=False) as file:
            file.write(message.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self._forked is None:
            return super().poll(flag)
        if self.returncode is None:
            try:
                self.returncode = self._forked.wait(0.0 if flag else 1e6)
            except subprocess.TimeoutExpired:
                return None
        return self.returncode


def main() -> None:
    """Run a script as ``python FILE`` does, or a rank that a script starts."""
    received, kind, given = sys.argv[1:]
    fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, _FREE) for fd in received.split(",")]
    for fd in received.split(","):
        os.close(int(fd))
    os.dup2(fds[0], 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores these
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    context.SpawnProcess._Popen = staticmethod(_ForkedRank)  # type: ignore[method-assign]
    if kind == "rank":
        message, _, lifeline, *others = fds[1:]
        die_with(lifeline)
        for other, number in zip(others, json.loads(given), strict=True):  # the message has its sender's numbers
            os.dup2(other, number, inheritable=False)
        sys.exit(spawn._main(message, os.dup(message)))
    sys.path[:] = json.loads(kind)
    sys.argv = [given]
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # not the server's
    runpy.run_path(given, run_name="__main__")
