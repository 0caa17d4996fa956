"""The program that each process of a pool runs.

It reads batches of trials from a pipe, runs its part of each and writes reports. A second pipe, the lifeline, ends it
when the controller is gone, even while it waits inside a collective; a byte on it breaks the collective off.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from verifier.cases import OpCase, Phase, ProcessReport, Trial
from verifier.codec import pack, unpack
from verifier.imports import run_imports
from verifier.oracle import Reference, make_reference
from verifier.runtime import Exchange, TrialRunner
from verifier.torch_internals import clear_caches, mesh_of_world, simulated_mode, start_simulated_world

__all__ = ["PHASE_CODES", "WorkerConfig"]

PHASE_CODES: tuple[str, ...] = ("idle", *Phase, "exchange")
"""What the byte that each process keeps in shared memory stands for."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker is told on its command line, as JSON."""

    index: int
    world_size: int
    backend: str
    device: str
    store_port: int
    connection_fd: int
    lifeline_fd: int
    phases_fd: int
    imports: list[str]

    @property
    def simulated(self) -> bool:
        return self.backend == "simulated"


@dataclass
class _Messages:
    """Reports to the controller, and the phase byte that it reads when a trial hangs."""

    connection: Connection
    phases: mmap.mmap
    index: int
    trial: int = 0

    def send(self, kind: str, payload: object) -> None:
        self.connection.send_bytes(pack((kind, self.trial, payload)))

    def announce(self, report: ProcessReport) -> None:
        self.send("raised", report)

    def enter(self, phase: str) -> None:
        self.phases[self.index] = PHASE_CODES.index(phase)


class _Ranks:
    """This process's rank in the world, or all of them if they are simulated; can be made anew after a fault."""

    def __init__(self, config: WorkerConfig, messages: _Messages) -> None:
        self.config = config
        self.messages = messages
        self.ranks = tuple(range(config.world_size)) if config.simulated else (config.index,)
        self._stopping = threading.Event()
        self._broken = threading.Event()
        self._runners: dict[tuple[int, ...], TrialRunner] = {}
        if config.simulated:
            start_simulated_world(config.world_size)
            self._exchange = Exchange(messages.announce, lambda failed, _digest: not failed, messages.enter)
            return
        if config.device == "cuda":
            torch.cuda.set_device(config.index % torch.cuda.device_count())
        self._store = dist.TCPStore("127.0.0.1", config.store_port, config.world_size, is_master=False)  # type: ignore[attr-defined]
        self.build(0)

    def build(self, epoch: int) -> None:
        """Make the process groups; ``epoch`` counts how often that has been done."""
        if epoch:
            # the watching thread may be slower than this one, and must not close the connections that are made below
            assert self._broken.wait(timeout=60), "no byte came on the lifeline"
            dist.destroy_process_group()
            self._runners.clear()
            clear_caches()  # they hold meshes of the old groups
            self._stopping.clear()
            self._broken.clear()
        dist.init_process_group(
            self.config.backend,
            store=PrefixStore(f"epoch {epoch}", self._store),
            rank=self.config.index,
            world_size=self.config.world_size,
            timeout=timedelta(minutes=10),
        )
        # apart from the mesh's own groups, so that its collectives never pair up with theirs
        self._control = dist.new_group(backend="gloo")
        self._exchange = Exchange(self.messages.announce, self._agree, self.messages.enter)

    def _agree(self, failed: bool, digest: int) -> bool:
        self.messages.enter("exchange")
        flags = torch.tensor([int(failed), digest, -digest])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._control)
        anyone_failed, highest, minus_lowest = flags.tolist()
        return not anyone_failed and highest == -minus_lowest

    def runner(self, shape: tuple[int, ...]) -> TrialRunner:
        """Return what runs trials on a mesh of ``shape``."""
        if shape not in self._runners:
            self._runners[shape] = TrialRunner(mesh_of_world(self.config.device, shape), self.ranks, self._exchange)
        return self._runners[shape]

    def run_batch(self, batch: list[tuple[int, Trial]]) -> None:
        """Run trials and report each, until the last one or until the connections are broken."""
        case: OpCase | None = None
        reference: Reference | None = None
        for number, trial in batch:
            if self._stopping.is_set():
                return
            self.messages.trial = number
            if trial.case is not case:
                case, reference = trial.case, make_reference(trial.case)
            assert reference is not None
            self.messages.enter(Phase.SETUP)
            runner = self.runner(trial.mesh.shape)
            with simulated_mode(self.config.world_size) if self.config.simulated else contextlib.nullcontext():
                report = runner.run(trial, reference)
            self.messages.enter("idle")
            self.messages.send("report", report)

    def break_connections(self) -> None:
        """Close every connection to another rank, so that all who wait in a collective get an error.

        Neither destroying nor aborting a gloo group does that (torch 2.13.0). Called from another thread.
        """
        self._stopping.set()
        for name in os.listdir("/proc/self/fd"):
            try:
                connection = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue  # not a socket, or closed meanwhile
            with connection, contextlib.suppress(OSError):
                to_rank = connection.family in (socket.AF_INET, socket.AF_INET6)
                if to_rank and connection.getpeername()[1] != self.config.store_port:
                    connection.shutdown(socket.SHUT_RDWR)
        self._broken.set()


def _watch(lifeline_fd: int, ranks: list[_Ranks]) -> None:
    """Break the connections for each byte on the lifeline; end with its other end, which is the controller's."""

    def watch() -> None:
        while os.read(lifeline_fd, 1):
            for each in ranks:
                each.break_connections()
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _serve(config: WorkerConfig, messages: _Messages) -> None:
    ranks: list[_Ranks] = []
    _watch(config.lifeline_fd, ranks)
    run_imports(config.imports)
    ranks.append(_Ranks(config, messages))
    messages.send("ready", None)
    while True:
        try:
            kind, payload = unpack(messages.connection.recv_bytes())
        except EOFError:
            return
        if kind == "batch":
            ranks[0].run_batch(payload)
        else:
            assert kind == "rebuild"
            ranks[0].build(payload)
            messages.send("ready", payload)


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    torch.set_num_threads(1)
    messages = _Messages(Connection(config.connection_fd), mmap.mmap(config.phases_fd, 0), config.index)
    try:
        _serve(config, messages)
    except Exception as error:  # the process boundary: the controller reports it and fails the run
        messages.send("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        sys.stderr.flush()
    os._exit(0)  # a process group whose peers may be gone cannot be destroyed in order
