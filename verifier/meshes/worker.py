"""The program that each process of a pool runs: ``python -m verifier.meshes.worker``.

It reads batches of trials from a pipe, runs its part of each and writes reports. A second pipe, on which nothing is ever
sent, ends it when the controller is gone, even while it waits inside a collective.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed as dist

from verifier.cases import OpCase, Phase, Raised, Trial
from verifier.codec import pack, unpack
from verifier.imports import run_imports
from verifier.oracle import Reference, make_reference
from verifier.runtime import Exchange, TrialRunner
from verifier.torch_internals import mesh_of_world, simulated_mode, start_simulated_world

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

    def announce(self, raised: Raised) -> None:
        self.send("raised", raised)

    def enter(self, phase: str) -> None:
        self.phases[self.index] = PHASE_CODES.index(phase)


def _end_with_controller(lifeline_fd: int) -> None:
    def wait() -> None:
        while os.read(lifeline_fd, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _start_ranks(config: WorkerConfig) -> None:
    if config.simulated:
        start_simulated_world(config.world_size)
        return
    if config.device == "cuda":
        torch.cuda.set_device(config.index % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", config.store_port, config.world_size, is_master=False)
    dist.init_process_group(
        config.backend, store=store, rank=config.index, world_size=config.world_size, timeout=timedelta(minutes=10)
    )


def _exchange(config: WorkerConfig, messages: _Messages) -> Exchange:
    if config.simulated:
        return Exchange(messages.announce, lambda failed, _digest: not failed, messages.enter)
    control = dist.new_group(backend="gloo")  # apart from the mesh's own groups, so that its collectives never pair up

    def agree(failed: bool, digest: int) -> bool:
        messages.enter("exchange")
        flags = torch.tensor([int(failed), digest, -digest])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=control)
        anyone_failed, highest, minus_lowest = flags.tolist()
        return not anyone_failed and highest == -minus_lowest

    return Exchange(messages.announce, agree, messages.enter)


def _batches(messages: _Messages) -> Iterator[list[Trial]]:
    while True:
        try:
            kind, payload = unpack(messages.connection.recv_bytes())
        except EOFError:
            return
        if kind == "stop":
            return
        assert kind == "batch"
        yield payload


def _serve(config: WorkerConfig, messages: _Messages) -> None:
    run_imports(config.imports)
    _start_ranks(config)
    exchange = _exchange(config, messages)
    ranks = tuple(range(config.world_size)) if config.simulated else (config.index,)
    runners: dict[tuple[int, ...], TrialRunner] = {}
    messages.send("ready", None)
    for batch in _batches(messages):
        case: OpCase | None = None
        reference: Reference | None = None
        for number, trial in batch:
            messages.trial = number
            if trial.case is not case:
                case, reference = trial.case, make_reference(trial.case)
            assert reference is not None
            shape = trial.mesh.shape
            if shape not in runners:
                runners[shape] = TrialRunner(mesh_of_world(config.device, shape), ranks, exchange)
            messages.enter(Phase.SETUP)
            with simulated_mode(config.world_size) if config.simulated else contextlib.nullcontext():
                report = runners[shape].run(trial, reference)
            messages.enter("idle")
            messages.send("report", report)


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    _end_with_controller(config.lifeline_fd)
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


if __name__ == "__main__":
    main()
