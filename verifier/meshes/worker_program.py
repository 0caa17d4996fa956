"""A worker's process on its own machine: how it is started, watched and ended. Its messages are handled elsewhere."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Protocol

import msgspec

from verifier.meshes import worker
from verifier.meshes.worker import PHASE_CODES, WorkerConfig
from verifier.processes.child import Child, load_child_ahead, without_launcher
from verifier.processes.forks import Step
from verifier.processes.scripts import TORCH_ALONE

__all__ = ["LOOPBACK", "Program", "ProgramSpec", "WorkerProgram", "load_ahead_of"]

LOOPBACK = "lo"
_MODULE = worker.__name__
_PRELOAD = f"{_MODULE}:{worker.preload.__name__}"
STDERR_TAIL = 600


_LOG_RECORD = re.compile(r"^(\[rank\d+\]:)?[DIWE]\d{4} \d\d:\d\d:\d\d")
_ENDS = re.compile(r"^(terminate called|Fatal Python error)", re.MULTILINE)


def last_words(text: str, cut: bool = False) -> str:
    """Return the lines at the end of a process's stderr that explain how it ended: about 600 characters at most.

    Lines that torch logs are left out, because its earlier warnings are not the cause. The text of an abort starts at
    the runtime's own message. ``cut`` says that ``text`` begins within a line.

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
    """A worker's process, on any machine, without its messages: what the controller needs to watch it and end it."""

    @property
    def pid(self) -> int:
        """Process id, on the machine that it runs on."""

    @property
    def phase(self) -> str:
        """The phase of the trial that it is in, or was in when it ended."""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""

    @property
    def computed(self) -> float:
        """CPU seconds that it has used; 0 if they are not known."""

    def interrupt(self) -> None:
        """Have it drop its connections to other ranks; raises an OSError if it has ended."""

    def ending(self) -> str:
        """Return how it ended, as ``signal SIGKILL`` or ``exit status 1``."""

    def signal(self) -> int:
        """Return the signal that ended it; 0 for none."""

    def tail(self) -> str:
        """Return the end of what it wrote to stderr."""

    def kill(self) -> None:
        """Kill it without waiting for its end."""

    def close(self) -> None:
        """End it if it still runs, and release its resources."""


@dataclass(frozen=True)
class ProgramSpec:
    """The options with which a worker is started.

    Parameters
    ----------
    imports
        Modules and files that it runs first.
    memory_limit
        Bytes that it may map in addition to those mapped when it becomes a rank; None for no limit.
    log_level
        The lowest level of the log lines that it sends.
    hash_seed
        Its ``PYTHONHASHSEED``. The order of a set of texts depends on it, and DTensor's choices depend on that order.
    interface
        The network interface on which gloo meets other ranks; None leaves the choice to gloo.
    """

    imports: tuple[str, ...]
    memory_limit: int | None
    log_level: int
    hash_seed: int
    interface: str | None = LOOPBACK


class WorkerProgram(Child):
    """A :class:`Program` on this machine, a child of this process.

    Parameters
    ----------
    spec
        The options with which it is started.
    connection_fd
        Its end of the connection to the controller; the caller closes its own copy.
    """

    def __init__(self, spec: ProgramSpec, connection_fd: int) -> None:
        breaker, self._breaker = os.pipe()
        config = WorkerConfig(list(spec.imports), spec.memory_limit, spec.log_level)
        arguments = [msgspec.json.encode(config).decode()]
        try:
            super().__init__(
                _MODULE, connection_fd, arguments, [breaker], _environment(spec), _steps(spec), TORCH_ALONE
            )
        finally:
            os.close(breaker)

    @property
    def phase(self) -> str:
        return PHASE_CODES[self.memory[0]]

    def interrupt(self) -> None:
        os.write(self._breaker, b"b")

    def tail(self) -> str:
        return last_words(*self.log())

    def _release(self) -> None:
        super()._release()
        os.close(self._breaker)


def load_ahead_of(spec: ProgramSpec) -> None:
    """Start the fork server of programs with these options, which loads while this process does other work."""
    load_child_ahead(_MODULE, _environment(spec), _steps(spec), TORCH_ALONE)


def _steps(spec: ProgramSpec) -> list[Step]:
    return [(_PRELOAD, *imports) for imports in ((), *filter(None, [spec.imports]))]


def _environment(spec: ProgramSpec) -> dict[str, str]:
    """Return the environment of a worker.

    DeviceMesh and the user's files would take a launcher's variables for the worker's own (LOCAL_RANK names a GPU).
    """
    kept = without_launcher()
    if spec.interface is not None:
        kept["GLOO_SOCKET_IFNAME"] = spec.interface
    return dict(kept, PYTHONHASHSEED=str(spec.hash_seed))
