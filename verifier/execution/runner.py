"""Level 2: one process's part of a trial.

Runs the call through DTensor's dispatch and compares what each rank holds with what the placements promise. The same
code serves a real rank and a process that simulates all of them: both hold a dictionary from rank to local tensor.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verifier.core.arguments import tensor_arguments
from verifier.core.case import OpCase, Trial
from verifier.core.observation import (
    Contribution,
    Difference,
    DifferenceKind,
    Executed,
    ProcessReport,
    Raised,
    Redistribution,
)
from verifier.core.ops import has_opaque_results, is_users, promises_strides, resolve, with_written, writes_out
from verifier.core.verdict import Phase
from verifier.core.wording import plural
from verifier.execution.converter import DTensorConverter
from verifier.execution.faults import inject
from verifier.execution.trial_log import TrialLog
from verifier.oracle.comparison import Spot, check_full, check_shards, have_same_strides, is_comparable
from verifier.oracle.plain_call import other_kernel
from verifier.oracle.reference import Reference, output_names
from verifier.oracle.tolerance import case_tolerance, unexplained
from verifier.programs import asked_placements, needs_fresh_caches
from verifier.torch_internals.caches import cache_misses, clear_caches
from verifier.torch_internals.dtensors import local_shards, per_rank, replicated, told_dtype
from verifier.torch_internals.groups import collectives_issued
from verifier.torch_internals.names import pytree
from verifier.torch_internals.placements import Placements, placement_text
from verifier.torch_internals.recording import RedistributionRecorder
from verifier.torch_internals.simulation import paused_simulation
from verifier.torch_internals.watching import count_collectives, ended_rules

__all__ = ["Exchange", "TrialRunner"]

_OF_THE_CALL = (Phase.FORWARD, Phase.BACKWARD)
"""Phases whose redistributions the call asks for. In others the verifier gathers results."""


@dataclass(frozen=True)
class Exchange:
    """How the processes of a mesh agree, between two phases, on whether to go on.

    Parameters
    ----------
    announce
        Tells the controller at once that this process raised, and what it saw until then, since others may be waiting
        for it.
    agree
        ``agree(failed, digest)`` returns whether all ranks can go on: none failed, and all gave the same digest.
    enter
        Notes for the controller which phase this process is in.
    """

    announce: Callable[[ProcessReport], None]
    agree: Callable[[bool, int], bool]
    enter: Callable[[Phase], None]


class _Stopped(Exception):  # noqa: N818 - control flow, not an error
    """This trial ends here on every rank."""


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes that ``tensor`` is in, as they are and not a copy."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class _Overwritten(Exception):  # noqa: N818 - an event
    """A trial has changed what the next ones begin with."""


class TrialRunner:
    """Runs trials on one mesh, in one process of it.

    Parameters
    ----------
    mesh
        The mesh; this process is one of its ranks, or simulates them all.
    ranks
        The ranks that this process speaks for.
    exchange
        How it agrees with the other processes.
    memory_limit
        The limit of memory that this process is under, in bytes, for messages.
    """

    def __init__(
        self, mesh: DeviceMesh, ranks: tuple[int, ...], exchange: Exchange, memory_limit: int | None = None
    ) -> None:
        self.mesh = mesh
        self.ranks = ranks
        self.exchange = exchange
        self.memory_limit = memory_limit
        self.recorder = RedistributionRecorder()
        self._case: OpCase | None = None
        self._converter: DTensorConverter | None = None
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def converter(self, case: OpCase) -> DTensorConverter:
        """Return what places the tensors of ``case``: one for all its trials, as long as no other case comes."""
        if self._converter is None or self._case is not case:
            self._case, self._converter = case, DTensorConverter(self.mesh, case.args, case.kwargs)
            self._values = [(held, held.clone()) for held in map(_held, tensor_arguments(case.args, case.kwargs))]
        return self._converter

    def _overwritten(self, case: OpCase) -> bool:
        """Return whether the trial has written to the values of its case, from which later ones take their pieces.

        By their bytes: what DTensor writes to a local tensor does not count as a version of it.
        """
        return case is self._case and not all(torch.equal(held, kept) for held, kept in self._values)

    def run(self, trial: Trial, reference: Reference) -> ProcessReport:
        """Return what this process saw of ``trial``. Whatever the call raises is in the report."""
        log = TrialLog(self.memory_limit)
        if writes_out(trial.case) or needs_fresh_caches(trial.case):
            clear_caches()  # keys leave arguments out, such as `out`, so that the rule of another trial would run
        misses = cache_misses()
        started = time.perf_counter()
        steps = _Steps(self, trial, reference, log)
        with self.recorder.recording():
            try:
                steps.run()
                log.reached = Phase.DONE
            except _Stopped:
                pass
            except Exception as error:  # noqa: BLE001 - the process boundary: becomes TOOL_ERROR with its traceback
                log.fail(error, ours=True)
                self.exchange.announce(log.report(self.ranks))
        if log.differences:
            steps.note_kernel()
        log.seconds["total"] += time.perf_counter() - started
        if self._overwritten(trial.case):
            self._case = self._converter = None
            log.fail(
                _Overwritten(f"{trial.case.op} wrote to values of its case, which later trials have, too"), ours=True
            )
        if self.recorder.left_state() or log.reached is not Phase.DONE:
            clear_caches()  # the next trial must not see what this one left pending
        return log.report(self.ranks, cache_misses() - misses, collectives_issued())


class _Steps:
    """The phases of one trial."""

    def __init__(self, runner: TrialRunner, trial: Trial, reference: Reference, log: TrialLog) -> None:
        self.runner = runner
        self.mesh = runner.mesh
        self.trial = trial
        self.reference = reference
        self.log = log

    def run(self) -> None:
        trial, reference, log = self.trial, self.reference, self.log
        self.inject_fault()
        with log.timed("setup"):
            converter = self.runner.converter(trial.case)
            leaves = converter.place_leaves(trial.combination, trial.seed)
            args, kwargs = converter.rebuild(leaves)
            inputs = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
            with paused_simulation():
                before = [{r: v.to("cpu", copy=True) for r, v in local_shards(t).locals.items()} for t in inputs]

        result: list[object] = []
        with self.dtensor(Phase.FORWARD), torch.inference_mode() if trial.case.in_inference_mode else nullcontext():
            self.inject_fault()
            result.append(resolve(trial.case.call)(*args, **kwargs))
        outputs = self.outputs(result, inputs)
        if reference.raised is not None:
            self.note_kernel()
            self.agree()
            return
        names = output_names(reference)
        if log.raised is None:
            self.check_asked(names, outputs)
            for name, output, expected in zip(names, outputs, reference.outputs, strict=True):
                self.check(Spot(Phase.FORWARD, name), output, expected)
        self.agree()

        try:
            for name, output, expected in zip(names, outputs, reference.outputs, strict=True):
                self.gather(Spot(Phase.GATHER, name), output, expected)
            if reference.differentiable and reference.wanted:
                for log.backward in range(len(trial.cotangents)):
                    self.backward(log.backward, inputs, outputs)
                log.backward = None
        except _Stopped:
            # What the forward call wrote to, it wrote to, whatever raised since. A GPU may not answer any more.
            if self.mesh.device_type != "cuda":
                with log.timed("compare"), paused_simulation():
                    self.check_inputs(inputs, before)
            raise
        log.reached = Phase.INPUTS
        self.inject_fault()
        with log.timed("compare"), paused_simulation():
            self.check_inputs(inputs, before)

    # --------------------------------------------------------------------------------------------------------- phases
    @contextmanager
    def dtensor(self, phase: Phase) -> Iterator[None]:
        """Run DTensor's code: time it, record its redistributions, turn what it raises into data."""
        log, recorder = self.log, self.runner.recorder
        log.reached = phase
        self.runner.exchange.enter(phase)
        recorder.clear()
        recorder.measures = phase in _OF_THE_CALL and 0 in self.runner.ranks
        started = time.perf_counter()
        try:
            if self.trial.trace:
                with ended_rules(), count_collectives() as counts:
                    yield
                for name, count in counts.items():
                    log.collectives[phase, name] += count
            else:
                with ended_rules():
                    yield
            if self.mesh.device_type == "cuda":
                torch.cuda.synchronize()  # a kernel that fails says so here, and not in the phases after this one
        except Exception as error:  # noqa: BLE001 - becomes a verdict
            log.fail(error)
        finally:
            log.seconds[phase] += time.perf_counter() - started
            log.redistributions += [
                Redistribution(
                    *(phase, s.source, s.target, s.mesh_dim, s.collective, s.bytes, s.path, s.tensor, s.explicit),
                    *(s.begins, s.mesh, s.by, s.repeats, s.undoes, s.issued, s.peak, s.seconds),
                )
                for s in recorder.steps
            ]
            log.executed += [Executed(phase, log.backward, op, texts) for op, texts in recorder.executed]
        if log.raised is not None:
            self.note_kernel()
            self.runner.exchange.announce(log.report(self.runner.ranks))

    def note_kernel(self) -> None:
        """Note what the call on plain tensors does otherwise than the reference, if the mesh is not one of CPUs."""
        log, kind = self.log, self.mesh.device_type
        if kind == "cpu" or log.other_kernel:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # after an illegal access every call fails, which says nothing of its kernel
            return
        with log.timed("compare"):
            log.other_kernel = other_kernel(self.trial, self.reference, torch.device(kind))

    def inject_fault(self) -> None:
        inject(self.trial.fault, self.runner.ranks, self.log.reached, self.runner.exchange.agree)

    def agree(self) -> None:
        """Go on only if every rank can, and if all hold the same placements: else the next collective would hang."""
        with self.log.timed("exchange"):
            text = ";".join(f"{subject}={placements}" for subject, placements in self.log.placements)
            # a local tensor of another shape than its placements promise makes the next collective hang or abort
            misshapen = any(d.kind is not DifferenceKind.VALUE for d in self.log.differences)
            failed = misshapen or self.log.raised is not None
            go_on = self.runner.exchange.agree(failed, zlib.crc32(text.encode()) & 0x3FFFFFFF)
        if not go_on:
            raise _Stopped

    def outputs(self, result: list[object], inputs: list[DTensor]) -> list[DTensor]:
        """Return the output DTensors, in pytree order; anything else that came back counts as raised.

        Arguments that the op writes to and does not return come last.
        """
        if not result:
            return []
        flat, structure = pytree.tree_flatten(result[0])
        if has_opaque_results(self.trial.case.op):
            flat = [
                replicated(leaf, self.mesh) if type(leaf) is torch.Tensor and not leaf.ndim else leaf for leaf in flat
            ]
        returned = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        tensors = with_written(returned, self.trial.case, list[torch.Tensor](inputs))
        for i, tensor in enumerate(tensors):
            name = "output" if len(tensors) == 1 else f"output {i}"
            text = placement_text(tensor.placements) if isinstance(tensor, DTensor) else type(tensor).__name__
            self.log.placements.append((name, text))
        if self.reference.raised is None and structure != self.reference.structure:
            self.log.raised = Raised(
                Phase.FORWARD, "Structure", f"returned {structure}, not {self.reference.structure}"
            )
        elif not all(isinstance(tensor, DTensor) for tensor in tensors):
            self.log.raised = Raised(Phase.FORWARD, "Structure", "returned a plain tensor, not a DTensor")
        elif self.reference.raised is None and len(tensors) != len(self.reference.outputs):
            got, wanted = plural(len(tensors), "tensor"), len(self.reference.outputs)
            self.log.raised = Raised(Phase.FORWARD, "Structure", f"returned {got}, not {wanted}")
        return [tensor for tensor in tensors if isinstance(tensor, DTensor)]

    def check_asked(self, names: list[str], outputs: list[DTensor]) -> None:
        """Check that an output whose placements the call names has these, and not others that hold the same value."""
        asked = asked_placements(self.trial.case)
        for name, output, wanted in zip(names, outputs, asked, strict=False):
            got = placement_text(output.placements)
            if wanted is not None and got != placement_text(wanted):
                spot = Spot(Phase.FORWARD, name)
                found = spot.difference(DifferenceKind.PLACEMENT, got, placement_text(wanted), self.runner.ranks[0])
                self.log.differences.append(found)

    def check(self, spot: Spot, got: DTensor, expected: torch.Tensor) -> None:
        """Compare what each rank holds of ``got`` with what the placements promise of ``expected``."""
        with self.log.timed("compare"), paused_simulation():
            if tuple(got.shape) != tuple(expected.shape):
                found = spot.difference(DifferenceKind.SHAPE, list(got.shape), list(expected.shape))
                self.log.differences.append(found)
                return
            told = told_dtype(got) if spot.phase is Phase.FORWARD and is_users(self.trial.case.op) else expected.dtype
            if told != expected.dtype:
                self.log.differences.append(spot.difference(DifferenceKind.DTYPE, told, expected.dtype))
                return
            strided = spot.phase is Phase.FORWARD and promises_strides(self.trial.case)
            if strided and not have_same_strides(got, expected):
                found = spot.difference(DifferenceKind.STRIDES, list(got.stride()), list(expected.stride()))
                self.log.differences.append(found)
                return
            shards = local_shards(got)
            if shards.placements is None:
                self.log.unchecked.append(f"{spot.subject}: {shards.reason}")
                return
            if not is_comparable(expected) and all(v.layout is expected.layout for v in shards.locals.values()):
                self.log.unchecked.append(f"{spot.subject}: tensors of layout {expected.layout} are not compared")
                return
            placements = shards.placements

            def differing(absolute: float) -> list[Difference]:
                found, parts = check_shards(
                    shards.locals, placements, expected.detach(), absolute, self.trial.mesh, spot
                )
                contributions[:] = parts
                return found

            contributions: list[Contribution] = []
            self.compare(differing, spot, expected, ())
            self.log.contributions += contributions

    def compare(
        self,
        differing: Callable[[float], list[Difference]],
        spot: Spot,
        expected: torch.Tensor,
        reduced: Placements,
    ) -> None:
        """Note what differs; where rounding explains it, that it proves nothing."""
        steps = self.log.redistributions
        differences, doubts = unexplained(differing, self.trial, self.reference, expected, steps, spot, reduced)
        self.log.differences += differences
        self.log.unchecked += doubts

    def gather(self, spot: Spot, got: DTensor, expected: torch.Tensor) -> None:
        """Let DTensor gather ``got`` on every rank and compare the whole with ``expected``."""
        if not is_comparable(expected):
            return
        full: list[torch.Tensor] = []
        with self.dtensor(spot.phase), torch.no_grad():
            self.inject_fault()
            full.append(got.full_tensor())
        if not full:
            # No exchange follows a gather that succeeds: it would cost each trial more than the rare rank that raises
            # alone does. The others come to their next one, or wait for this rank until the controller breaks it off.
            self.agree()
        with self.log.timed("compare"), paused_simulation():
            held = per_rank(full[0])
            self.compare(
                lambda absolute: check_full(held, expected.detach(), absolute, spot), spot, expected, got.placements
            )

    def backward(self, index: int, inputs: list[DTensor], outputs: list[DTensor]) -> None:
        reference, seed = self.reference, self.trial.seed + index
        with self.log.timed("setup"):
            with paused_simulation():
                values = reference.cotangents(seed)
                expected_gradients = reference.gradients(seed)
            flowing = [
                self.runner.converter(self.trial.case).place(value, placements, seed)
                for value, placements in zip(values, self.trial.cotangents[index], strict=True)
            ]
        gradients: list[torch.Tensor | None] = []
        with self.dtensor(Phase.BACKWARD):
            self.inject_fault()
            gradients.extend(
                torch.autograd.grad(
                    [outputs[i] for i in reference.differentiable],
                    [inputs[i] for i in reference.wanted],
                    flowing,
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        names = reference.names
        subjects = [f"{names[i]}.grad" for i in reference.wanted]
        for subject, gradient in zip(subjects, gradients, strict=False):
            text = placement_text(gradient.placements) if isinstance(gradient, DTensor) else type(gradient).__name__
            self.log.placements.append((f"{subject} {index}", text))
        wanted_gradients = map(_in_layout_of, gradients, expected_gradients)
        pairs = list(zip(subjects, gradients, wanted_gradients, strict=True)) if self.log.raised is None else []
        for subject, gradient, expected in pairs:
            spot = Spot(Phase.BACKWARD, subject, index)
            if expected is not None and isinstance(gradient, DTensor):
                self.check(spot, gradient, expected)
            elif expected is not None and gradient is not None and not expected.numel():
                self.log.unchecked.append(f"{subject}: an empty gradient came as a plain tensor")
            elif _is_zero(expected) and _is_zero(gradient):
                self.log.differences.append(
                    spot.difference(DifferenceKind.PLAIN_ZEROS, "a plain tensor of zeros", "a DTensor")
                )
            elif expected is not None or gradient is not None:
                wanted = "no gradient" if expected is None else "a gradient" if gradient is None else "a DTensor"
                plain = gradient is not None and not isinstance(gradient, DTensor)
                got = "no gradient" if gradient is None else "a plain tensor" if plain else "a gradient"
                self.log.differences.append(spot.difference(DifferenceKind.STRUCTURE, got, wanted))
        self.agree()
        for subject, gradient, expected in pairs:
            if expected is not None and isinstance(gradient, DTensor):
                self.gather(Spot(Phase.GATHER_GRADIENT, subject, index), gradient, expected)

    def check_inputs(self, inputs: list[DTensor], before: list[dict[int, torch.Tensor]]) -> None:
        """Check that each input is what it was, or what the local call made of it."""
        reference = self.reference
        for name, tensor, old, own, untouched in zip(
            reference.names, inputs, before, reference.inputs, reference.untouched, strict=True
        ):
            if any(own is output for output in reference.outputs):
                continue  # what the op writes to has been checked as a result
            spot = Spot(Phase.INPUTS, name)
            shards = local_shards(tensor)
            if untouched:
                wrong = [d for r, v in shards.locals.items() for d in check_full({r: v}, old[r], 0.0, spot)]
            elif shards.placements is None:
                wrong = []
                self.log.unchecked.append(f"{name}: {shards.reason}")
            else:
                absolute = case_tolerance(self.trial, self.reference, own, self.log.redistributions)
                wrong, parts = check_shards(
                    shards.locals, shards.placements, own.detach(), absolute, self.trial.mesh, spot
                )
                self.log.contributions += parts
            self.log.differences += [replace(difference, kind=DifferenceKind.MUTATED) for difference in wrong]


def _in_layout_of(gradient: torch.Tensor | None, expected: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``expected``, as a dense tensor if it is sparse and ``gradient`` is not: DTensor has no sparse layout."""
    if expected is None or expected.layout is torch.strided or not isinstance(gradient, DTensor):
        return expected
    return expected.to_dense() if gradient.to_local().layout is torch.strided else expected


def _is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.layout is torch.strided and not tensor.count_nonzero()
