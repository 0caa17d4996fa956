"""The program that each process of a pool runs.

It loads torch and the user's files first and gets its rank afterwards. Then it reads
batches of trials from a pipe, runs its rank's share of each and writes reports. A byte on a second pipe, the breaker,
makes it drop all connections to other ranks, which ends whatever it waits for. A third pipe, the lifeline, closes when
the controller is gone; that kills the process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import mmap
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.logs import keeping_lines, log_again, log_through
from verifier.core.observation import ProcessReport, Raised
from verifier.core.ops import resolve
from verifier.core.verdict import Phase
from verifier.execution.imports import ImportFailedError, run_imports
from verifier.execution.packing import unpack
from verifier.execution.registrations import Registered, changes, registered_rules
from verifier.execution.runner import Exchange, TrialRunner
from verifier.meshes.agreement import Agreement, AllReduces, Datagrams
from verifier.meshes.messages import pack_message, pack_report
from verifier.meshes.tasks import Task
from verifier.oracle.reference import Reference, make_reference
from verifier.processes.child import begin
from verifier.processes.limits import limit_memory
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.groups import (
    collectives_issued,
    leave_world,
    mesh_of_world,
    release_groups,
    stage_through_host,
)
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.recording import forget_calls
from verifier.torch_internals.refusals import is_cut_off, is_refusal
from verifier.torch_internals.simulation import simulated_mode, start_simulated_world

__all__ = ["PHASE_CODES", "REMEMBERED_TRIALS", "Seat", "WorkerConfig"]

PHASE_CODES: tuple[str, ...] = ("idle", *Phase, "exchange")
"""The meaning of the byte that each process keeps in shared memory."""

REMEMBERED_TRIALS = 1000
"""After so many a rank forgets what DTensor has worked out of them, else it would grow as long as it lives."""

_log = logging.getLogger(__name__)


class WorkerConfig(msgspec.Struct, frozen=True):
    """The configuration on a worker's command line, as JSON; it does not include the rank."""

    imports: list[str]
    memory_limit: int | None
    log_level: int


@dataclass(frozen=True)
class Seat:
    """The seat of a process in a world: its rank, and how it meets the other ranks.

    ``number`` is the rank's number on its machine, which decides what GPU it gets; ``epoch`` counts the worlds.
    ``meeting`` is a secret name of this world if all ranks are on one machine; otherwise it is empty.
    """

    index: int
    world_size: int
    backend: str
    device: str
    number: int
    store_host: str
    store_port: int
    epoch: int
    meeting: str = ""

    @property
    def simulated(self) -> bool:
        return self.backend == "simulated"


@dataclass
class _Messages:
    """Reports to the controller, and the phase byte that it reads when a trial hangs."""

    connection: Connection
    phase: mmap.mmap
    trial: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def send(self, kind: str, payload: object) -> None:
        self._send_packed(pack_message(kind, self.trial, payload))

    def _send_packed(self, message: bytes) -> None:
        with self._lock:  # any thread may log
            self.connection.send_bytes(message)

    def report(self, report: ProcessReport, kind: str = "report") -> None:
        """Send a report; if it cannot be packed, send one that says so, so that only one trial is lost."""
        try:
            message = pack_report(kind, self.trial, report)
        except Exception as error:  # noqa: BLE001 - becomes TOOL_ERROR with its traceback
            failed = _failed(report.ranks, report.reached, error, "what this process has to report cannot be sent: ")
            message = pack_report(kind, self.trial, failed)
        self._send_packed(message)

    def announce(self, report: ProcessReport) -> None:
        self.report(report, "raised")

    def log(self, level: int, logger: str, text: str) -> None:
        self.send("log", (level, logger, text))

    def enter(self, phase: str) -> None:
        self.phase[0] = PHASE_CODES.index(phase)


class _Breaker:
    """Drops all connections to other ranks when a byte comes, until this process's main thread is back in its loop.

    Destroying or aborting a gloo group does not interrupt a thread in its collectives (torch 2.13.0).
    """

    def __init__(self, descriptor: int, controller: int) -> None:
        self.broken = threading.Event()
        self._controller = controller  # a TCP connection if the controller is on another machine
        self.spared_port: int | None = None
        self.agreement: Agreement | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, args=(descriptor,), name="breaker", daemon=True).start()

    def _watch(self, descriptor: int) -> None:
        while os.read(descriptor, 1):
            self.broken.set()
            while self._drop():  # again and again: the main thread may be about to connect
                time.sleep(0.02)

    def _drop(self) -> bool:
        with self._lock:
            if not self.broken.is_set():
                return False
            if self.agreement is not None:
                self.agreement.break_off()
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor != self._controller:
                    with contextlib.suppress(OSError):  # not a socket, or closed meanwhile
                        self._shut(descriptor)
            return True

    def _shut(self, descriptor: int) -> None:
        copy = os.dup(descriptor)  # what has been shut down may be closed, and its number used again, at any moment
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            raise
        with connection:
            remote = connection.family in (socket.AF_INET, socket.AF_INET6)
            if remote and connection.getpeername()[1] != self.spared_port:
                connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Leave connections alone again; the main thread calls this once for each byte."""
        assert self.broken.wait(timeout=60), "no byte came"
        with self._lock:
            self.broken.clear()


class _Ranks:
    """This process's rank in the world, or all ranks if they are simulated; can be built again after a fault."""

    def __init__(self, messages: _Messages, breaker: _Breaker, memory_limit: int | None) -> None:
        self.messages = messages
        self.memory_limit = memory_limit
        self.breaker = breaker
        self.ranks: tuple[int, ...] = ()
        self._seat: Seat | None = None
        self._runners: dict[MeshSpec, TrialRunner] = {}
        self._meshes: dict[tuple[MeshSpec, tuple[str, ...]], DeviceMesh] = {}
        self._staging: list[torch.library.Library] = []

    def build(self, seat: Seat) -> None:
        """Take ``seat`` and make the process groups, after leaving the earlier ones."""
        self._runners.clear()
        for mesh in self._meshes.values():
            release_groups(mesh)
        self._meshes.clear()
        clear_caches()  # they hold meshes of the old groups
        started, earlier, self._seat = time.perf_counter(), self._seat, seat
        if seat.simulated:
            self.ranks = tuple(range(seat.world_size))
            if earlier is None:
                start_simulated_world(seat.world_size)
            self._exchange = Exchange(self.messages.announce, lambda failed, _digest: not failed, self.messages.enter)
            return
        self.ranks = (seat.index,)
        leave_world()
        if self.breaker.agreement is not None:
            self.breaker.agreement.close()
            self.breaker.agreement = None
        # open before any rank is through the rendezvous, and may send
        agreement = Datagrams(seat.meeting, seat.index, seat.world_size) if seat.meeting else None
        if seat.device == "cuda":
            self._prepare_gpu(seat)
        # NCCL's threads use the store, too, and end the process if it is gone; gloo's have none
        self.breaker.spared_port = seat.store_port if seat.backend == "nccl" else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            seat.store_host, seat.store_port, seat.world_size, is_master=False, wait_for_workers=False
        )
        dist.init_process_group(
            seat.backend,
            store=PrefixStore(f"epoch {seat.epoch}", store),
            rank=seat.index,
            world_size=seat.world_size,
            timeout=timedelta(minutes=10),
        )
        self._agreement: Agreement = agreement or AllReduces()
        self.breaker.agreement = self._agreement
        self._exchange = Exchange(self.messages.announce, self._agree, self.messages.enter)
        _log.info("is rank %d of %d since %.3f s", seat.index, seat.world_size, time.perf_counter() - started)

    def _prepare_gpu(self, seat: Seat) -> None:
        torch.cuda.set_device(seat.number % torch.cuda.device_count())
        torch.cuda.init()  # type: ignore[no-untyped-call]  # DeviceMesh would choose a GPU of its own if there was no context yet
        # rounding that the reference, on the CPU, does not have
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if seat.backend == "gloo" and not self._staging:
            self._staging = stage_through_host()

    def _agree(self, failed: bool, digest: int) -> bool:
        self.messages.enter("exchange")
        return self._agreement.agree(failed, digest)

    def _runner(self, spec: MeshSpec) -> TrialRunner:
        """Return the runner of trials on a mesh; the ranks meet in a new mesh."""
        if spec not in self._runners:
            mesh = self._mesh(spec)
            self._runners[spec] = TrialRunner(mesh, self.ranks, self._exchange, self.memory_limit)
        return self._runners[spec]

    def _mesh(self, spec: MeshSpec, dim_names: tuple[str, ...] = ()) -> DeviceMesh:
        """Return a mesh of all ranks; the ranks meet in a new mesh."""
        assert self._seat is not None
        if (spec, dim_names) not in self._meshes:
            staged = self._seat.device == "cuda" and self._seat.backend == "gloo"
            backend = "gloo" if staged else None
            names = dim_names or spec.names
            self._meshes[spec, dim_names] = mesh_of_world(self._seat.device, spec.shape, backend, names, spec.flat)
        return self._meshes[spec, dim_names]

    def run_batch(self, batch: list[tuple[int, Trial | Task]]) -> None:
        """Run trials and tasks and report each, until the last one or until the connections are broken."""
        assert self._seat is not None
        case: OpCase | None = None
        reference: Reference | Raised | None = None
        for number, trial in batch:
            if self.breaker.broken.is_set():
                return
            self.messages.trial = number
            self.messages.enter(Phase.SETUP)
            if isinstance(trial, Task):
                self._run_task(trial)
                continue
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("trial %d: %s on mesh %s, %s", number, trial.case.op, trial.mesh, trial.combination)
            try:
                if trial.case is not case:
                    case, reference = trial.case, _reference_of(trial.case)
                assert reference is not None
                runner = self._runner(trial.mesh)
            except Exception as error:  # noqa: BLE001 - becomes TOOL_ERROR with its traceback
                report = _failed(self.ranks, Phase.SETUP, error)
                self.messages.announce(report)
            else:
                if isinstance(reference, Raised):
                    self.messages.enter("idle")
                    self.messages.report(ProcessReport(self.ranks, Phase.FORWARD, reference))
                    continue
                # a rank that raised may have drawn less than the others, in this trial or one long ago
                torch.default_generator.manual_seed(trial.seed)
                if self._seat.device == "cuda":
                    torch.cuda.manual_seed(trial.seed)
                simulated = self._seat.simulated
                with simulated_mode(self._seat.world_size) if simulated else contextlib.nullcontext():
                    report = runner.run(trial, reference)
            self.messages.enter("idle")
            self.messages.report(report)
            if report.raised is not None and self._seat.device == "cuda":
                self._end_if_unusable()

    def _run_task(self, task: Task) -> None:
        """Call the function of ``task`` and report what it returned or raised."""
        try:
            mesh = self._mesh(task.mesh, task.dim_names)
            self.messages.enter(Phase.FORWARD)
            report = ProcessReport(self.ranks, Phase.DONE, returned=resolve(task.call)(mesh, *task.args))
        except Exception as error:  # noqa: BLE001 - the process boundary: becomes data with its traceback
            text = "".join(traceback.format_exception(error)[-12:])
            raised = Raised(
                Phase.FORWARD, type(error).__name__, str(error), traceback=text, refusal=is_refusal(error),
                cut_off=is_cut_off(error),
            )  # fmt: skip
            report = ProcessReport(self.ranks, Phase.FORWARD, raised)
            self.messages.announce(report)
        self.messages.enter("idle")
        self.messages.report(report)

    @staticmethod
    def _end_if_unusable() -> None:
        """End this process if a kernel has failed, because every later CUDA call of the process fails, too."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            sys.stderr.write(f"CUDA cannot be used any more: {error}\n")
            sys.stderr.flush()
            os._exit(1)


def _reference_of(case: OpCase) -> Reference | Raised:
    """Return the reference of ``case``, or why there is none: an op that communicates by itself has no local results.

    A program that is no op, such as a chain, may make groups and communicate without a mesh as well.
    """
    before = collectives_issued()
    reference = make_reference(case)
    if collectives_issued() == before or not _is_op(case.op):
        return reference
    why = f"{case.op} communicates by itself, so that no call of one process says what is right"
    return Raised(Phase.FORWARD, "NotImplementedError", why, refusal=True)


def _is_op(name: str) -> bool:
    try:
        return isinstance(resolve(f"torch.ops.{name}"), OpOverload)
    except ValueError:
        return False


def _failed(ranks: tuple[int, ...], phase: Phase, error: Exception, what: str = "") -> ProcessReport:
    """Return the report of a process that cannot report the outcome of a trial because of ``error``."""
    text = "".join(traceback.format_exception(error)[-12:])
    return ProcessReport(ranks, phase, Raised(phase, type(error).__name__, f"{what}{error}", traceback=text, ours=True))


def _serve(config: WorkerConfig, breaker_fd: int, messages: _Messages) -> None:
    breaker = _Breaker(breaker_fd, messages.connection.fileno())
    torchs = _torchs_rules()
    if config.imports and [*config.imports] != _preloaded:
        run_imports(config.imports)
    log_again(_kept)
    ranks = _Ranks(messages, breaker, config.memory_limit)
    gc.freeze()  # otherwise each full collection walks all objects that torch has loaded, for 0.1 s
    gc.enable()  # the process was started with it off, for the time of loading
    messages.send("loaded", ({op: rule.text for op, rule in torchs.items()}, changes(torchs, registered_rules())))
    limited = config.memory_limit is None
    tried = 0
    while True:
        try:
            kind, payload = unpack(messages.connection.recv_bytes())
        except EOFError:
            return
        if kind in ("batch", "fresh batch"):
            if kind == "fresh batch":
                forget_calls()
                tried = 0
            ranks.run_batch(payload)
            tried += len(payload)
            if tried >= REMEMBERED_TRIALS:
                _log.info("forgets %d redistributions after %d trials", forget_calls(), tried)
                tried = 0
        elif kind == "import":
            try:
                run_imports(payload)
            except ImportFailedError as error:  # the controller says for which rule it was, and ends this process
                messages.send("refused", str(error))
                continue
            messages.send("imported", changes(torchs, registered_rules()))
        elif kind == "pause":
            breaker.mend()
            messages.enter("idle")
            messages.send("paused", payload)
        else:
            assert kind == "build"
            try:
                ranks.build(payload)
            except Exception as error:  # noqa: BLE001 - a rank may have died meanwhile, and the controller tries again
                messages.send("unbuilt", (payload.epoch, f"{type(error).__name__}: {error}"))
                continue
            if not limited:
                assert config.memory_limit is not None
                _start_threads_of_autograd()
                limit_memory(config.memory_limit)
                limited = True
            messages.send("built", payload.epoch)


def _start_threads_of_autograd() -> None:
    """Let autograd start its threads now, which it does once, so that none of their memory counts as a trial's.

    Where a torch for CUDA finds no device, the first fake tensor lets autograd count eight. A backward pass after it
    would start a thread for each, and their stacks and heaps would map more than 512 MiB.
    """
    torch.autograd.backward(torch.ones((), requires_grad=True))


_preloaded: list[str] = []
_kept: list[logging.LogRecord] = []


@cache
def _torchs_rules() -> Mapping[str, Registered]:
    """Return the rules that DTensor has of its own; called before the user's files are imported."""
    return registered_rules()


def preload(*imports: str) -> None:
    """Do, in a fork server, what all ranks do that it forks."""
    importlib.import_module("torch.distributed.tensor.debug")  # loads torch's compiler, as each first collective does

    _torchs_rules()
    with keeping_lines(_kept):
        run_imports(imports)
    _preloaded[:] = imports


def main() -> None:
    connection, phase, (breaker_fd,), (given,) = begin()
    config = msgspec.json.decode(given, type=WorkerConfig)
    torch.set_num_threads(1)
    messages = _Messages(connection, phase)
    log_through(messages.log, config.log_level)
    try:
        _serve(config, breaker_fd, messages)
    except Exception as error:  # noqa: BLE001 - the process boundary: the controller reports it and fails the run
        messages.send("failed", f"{type(error).__name__}: {error}")
        _end(1, traceback.format_exc())
    except SystemExit as asked:  # of what was tried, or of a file of the user's
        said = asked.code is not None and not isinstance(asked.code, int)
        _end(1 if said else asked.code or 0, f"{asked.code}\n" if said else "")  # type: ignore[arg-type]
    _end(0)


def _end(status: int, last_words: str = "") -> NoReturn:
    """End this process without Python's own shutdown.

    A process group whose peers may be gone cannot be destroyed in order. If Python shuts down beside such a group, a
    thread of gloo may release a tensor, which aborts (https://github.com/pytorch/pytorch/issues/190489).
    """
    sys.stderr.write(last_words)
    sys.stderr.flush()
    os._exit(status)
