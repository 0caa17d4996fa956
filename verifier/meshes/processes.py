"""The controller's end of a process that is, or may become, a rank."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait

from verifier.core.errors import ReportedError
from verifier.core.logs import own_level
from verifier.core.wording import plural
from verifier.execution.imports import has_changed
from verifier.execution.packing import pack
from verifier.execution.registrations import (
    Lacking,
    Registered,
    as_option,
    defining_modules,
    lacking,
    referring_modules,
)
from verifier.meshes.hosts import Place, local_places
from verifier.meshes.messages import unpack_message
from verifier.meshes.worker_program import Program, ProgramSpec, WorkerProgram, load_ahead_of

__all__ = ["Gone", "PoolError", "RankProcess", "RulesNotInRanks", "Starter"]

LOAD_LIMIT = 180.0
SEND_LIMIT = 20
_SHOWN = 200
"""Most characters of a description of an op's rules that a message shows."""

_log = logging.getLogger(__name__)


class PoolError(ReportedError):
    """The processes of a pool could not be started; nothing was tried."""


class RulesNotInRanks(PoolError):  # noqa: N818 - says what is wrong, as the verdicts do
    """The ranks would run an op by other rules than this process has, and no import corrects that.

    Parameters
    ----------
    found
        The op, and what each side has for it.
    tried
        What the ranks have imported for it.
    refused
        The message of a rank that could not import it.
    others
        Number of further ops for which the same is true.
    """

    def __init__(self, found: Lacking, tried: Sequence[str], refused: str, others: int) -> None:
        self.found = found
        self.tried = tuple(tried)
        self.refused = refused
        self.others = others
        super().__init__(self.text("--import FILE"))

    def text(self, option: str) -> str:
        """Return the message for a user who can name imports by ``option``."""
        found, sources = self.found, self.found.ours.sources if self.found.ours is not None else ()
        others = f"; the same is true of {plural(self.others, 'other op')}" if self.others else ""
        remedy = f"register what is to be verified in a module of its own, and name that by {option}"
        if not found.untouched and (found.ours is None or not sources):
            return (
                f"{found.op}: the ranks have a rule that this process does not have, {_short(found.theirs)}: it was "
                f"taken back or replaced here{others}; {remedy}"
            )
        if found.ours is None:
            return f"{found.op}: torch's own rule was taken back here, and the ranks have it{others}; {remedy}"
        if not sources:
            return (
                f"{found.op}: this process has a rule that the ranks do not have, {_short(found.ours.text)}, and no "
                f"module is known that registers it{others}; {remedy}"
            )
        source = sources[-1]
        if has_changed(source.file):
            return f"{found.op}: {source.file} has changed since this process ran it{others}; run the command again"
        if self.refused:
            why = f"a rank cannot import it ({self.refused})"
        elif not source.file:
            why = "it is in no file that a rank could import"
        elif "<locals>" in source.name:
            why = "a rank that imports the module does not register it, since it is made inside a function"
        else:
            why = f"a rank that imports {', '.join(self.tried) or source.module} does not register it"
        return f"{found.op}: this process has a rule that the ranks do not have, {source}: {why}{others}; {remedy}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


class Gone(Exception):  # noqa: N818 - an event, not an error: the process has ended, or does not read
    """The process can no longer be sent anything, nor can anything be received from it."""


class RankProcess:
    """A process that has loaded torch, or is about to, and waits to be told which rank it is.

    Parameters
    ----------
    connection
        The connection to it; this object closes it.
    program
        The process.

    Attributes
    ----------
    name
        Its name in messages, such as ``rank 1``.
    loaded
        Whether it has reported that it is ready to take a seat.
    brought
        What it has imported since its start, to have the rules that this process has; see :meth:`follow`.
    """

    def __init__(self, connection: Connection, program: Program) -> None:
        self.name = "a rank"
        self.loaded = False
        self.brought: list[str] = []
        self._torchs: Mapping[str, str] = {}
        self._changes: Mapping[str, str] = {}
        self._given: frozenset[str] = frozenset()
        self.connection = connection
        self._program = program
        self._limit_sending()
        self._deadline = time.monotonic() + LOAD_LIMIT

    @classmethod
    def start(cls, spec: ProgramSpec) -> RankProcess:
        """Start a process on this machine."""
        connection, theirs = Pipe()
        try:
            return cls(connection, WorkerProgram(spec, theirs.fileno()))
        finally:
            theirs.close()

    def _limit_sending(self) -> None:
        """Limit the time that sending may take: a process that was stopped does not read."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT, 0))

    @property
    def pid(self) -> int:
        """The process id; waits until the process has started."""
        return self._program.pid

    @property
    def phase(self) -> str:
        """The phase of the trial that the process is in, or was in when it ended."""
        return self._program.phase

    @property
    def running(self) -> bool:
        return self._program.running

    @property
    def computed(self) -> float:
        """CPU seconds that the process has used; 0 if they are not known."""
        return self._program.computed

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
            If the process has ended, even within a message.
        """
        try:
            kind, about, payload = unpack_message(self.connection.recv_bytes())
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
            self._program.interrupt()
        except OSError as error:
            raise Gone from error

    def await_loaded(self) -> None:
        """Wait until the process can take a seat.

        Raises
        ------
        PoolError
            If the process reports that it cannot, for example because a module of the user is missing.
        Gone
            If the process is killed, crashes or takes too long.
        """
        while not self.loaded:
            if not wait([self.connection], max(0.0, self._deadline - time.monotonic())):
                raise Gone(f"was not ready within {LOAD_LIMIT:.0f} s")
            message = self.receive()
            if message is not None and message[0] == "failed":
                raise PoolError(f"a rank did not start: {message[2]}")
            self.loaded = message is not None and message[0] == "loaded"
            if self.loaded:
                assert message is not None
                assert isinstance(message[2], tuple)
                self._torchs, self._changes = message[2]
                self._given = frozenset(self._changes)

    def lacks(self, rules: Mapping[str, Registered], alike: bool) -> list[Lacking]:
        """Return the ops for which the process has other rules; see :meth:`follow`."""
        return lacking(rules, self._torchs, self._changes, () if alike else self._given)

    def follow(self, rules: Mapping[str, Registered], alike: bool, also: Sequence[str] = ()) -> None:
        """Have the process register the same rules as this process, by importing the modules that register them.

        Parameters
        ----------
        rules
            The rules of this process.
        alike
            Whether the process must have torch's own rules for every op for which this process has them; if not, the
            imports of the process may have replaced some.
        also
            What the process imports first.

        Raises
        ------
        RulesNotInRanks
            If no import makes it register the same rules.
        Gone
            If the process ends or takes too long.
        """
        if refused := self._import(also):
            raise PoolError(f"a rank did not start: {refused}")
        for modules in (defining_modules, referring_modules):
            if not (found := self.lacks(rules, alike)):
                return
            options = [as_option(source.module, source.file, sys.path) for source in modules(found)]
            if refused := self._import(options):
                raise RulesNotInRanks(found[0], options, refused, len(found) - 1)
        if found := self.lacks(rules, alike):
            raise RulesNotInRanks(found[0], self.brought, "", len(found) - 1)

    def _import(self, options: Sequence[str]) -> str:
        """Have the process import what it has not been told to import yet; return the reason if it cannot."""
        names = [name for name in dict.fromkeys(options) if name and name not in self.brought]
        if not names:
            return ""
        _log.info("%s imports %s, too", self.name, ", ".join(names))
        self.brought += names
        self.send("import", names)
        kind, _, payload = self._answer("imported", "refused")
        if kind == "refused":
            return str(payload)
        assert isinstance(payload, dict)
        self._changes = payload
        return ""

    def _answer(self, *kinds: str) -> tuple[str, int, object]:
        deadline = time.monotonic() + LOAD_LIMIT
        while wait([self.connection], max(0.0, deadline - time.monotonic())):
            message = self.receive()
            if message is not None and message[0] in kinds:
                return message
        raise Gone(f"did not answer within {LOAD_LIMIT:.0f} s")

    def ending(self) -> str:
        """Return how the process ended, as ``signal SIGKILL`` or ``exit status 1``."""
        return self._program.ending()

    def signal(self) -> int:
        """Return the signal that ended the process; 0 for none."""
        return self._program.signal()

    def tail(self) -> str:
        """Return the end of what the process wrote to stderr."""
        return self._program.tail()

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self._program.kill()

    def close(self) -> None:
        """End the process if it still runs, and release its resources."""
        self._program.close()
        self.connection.close()


class Starter:
    """Starts the processes that become ranks.

    Parameters
    ----------
    imports, memory_limit
        As for :class:`~verifier.meshes.worker_program.ProgramSpec`.
    hash_seeds
        The number of values of ``PYTHONHASHSEED`` that the ranks have; None for one each. Each value takes a fork
        server that loads torch.
    imported_here
        Whether this process has run ``imports``, too. If so, ranks with other rules are an error.
    """

    store_host = "127.0.0.1"
    """The host of the store in which the ranks meet; the controller serves the store."""

    def __init__(
        self,
        imports: Sequence[str] = (),
        memory_limit: int | None = None,
        hash_seeds: int | None = None,
        imported_here: bool = False,
    ) -> None:
        self.imports = tuple(imports)
        self.memory_limit = memory_limit
        self.hash_seeds = hash_seeds
        self.imported_here = imported_here

    def places(self, size: int) -> tuple[Place, ...]:
        """Return the places of the ranks of a world of ``size``.

        Raises
        ------
        PoolError
            If there is no room for that many ranks.
        """
        return local_places(size)

    def load_ahead(self) -> None:
        """Start what processes are forked from, which loads while this process does other work."""
        for rank in range(self.hash_seeds or 1):
            load_ahead_of(self.spec(rank))

    def start(self, rank: int) -> RankProcess:
        """Return a process that may become ``rank`` and is still loading."""
        return RankProcess.start(self.spec(rank))

    def spec(self, rank: int) -> ProgramSpec:
        """Return the specification of the process of ``rank``."""
        seed = rank if self.hash_seeds is None else rank % self.hash_seeds
        return ProgramSpec(self.imports, self.memory_limit, own_level(), seed)
