"""The stand-alone script of a finding: torch alone, values in full, one exit status.

The script shows the defect through DTensor's public API. Exit status 1: the defect is there; 0: it is not.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.cases import Phase, Placements, Trial, Verdict, VerdictKind
from verifier.comparison import Spot
from verifier.converter import tensor_arguments
from verifier.oracle import accepted_error, case_tolerance
from verifier.placements import split
from verifier.process_limits import names_limit
from verifier.program_source import is_program, needs_its_module, program_source
from verifier.reference import (
    argument_names,
    make_reference,
    output_names,
    promises_strides,
    resolve,
    written_arguments,
)
from verifier.script_template import MEMORY, STRIDED_IMPORT, TEMPLATE
from verifier.targets import asked_placements
from verifier.torch_internals import strides_of

__all__ = ["FAILS", "GONE", "render_script", "run_script"]

FAILS = "fails as described"
GONE = "did not fail"
TIME_LIMIT = 90.0
ENDING_LIMIT = 2.0
"""Seconds that processes get to end once they are asked to."""


def _literal(tensor: torch.Tensor) -> str:
    """Return an expression that makes ``tensor``, layout and all."""
    values = repr(tensor.detach().tolist()).replace("nan", "float('nan')").replace("inf", "float('inf')")
    text = f"torch.tensor({values}, dtype={tensor.dtype})"
    if tensor.numel() == 0 and tensor.ndim:
        text = f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
    if not tensor.is_contiguous() and tensor.ndim >= 2:
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        back = [order.index(dim) for dim in range(tensor.ndim)]
        text += f".permute({order}).contiguous().permute({back})"
    return text


def _placement_literal(placement: Placement) -> str:
    if (strided := strides_of(placement)) is not None:
        return f"_StridedShard({strided[0]}, split_factor={strided[1]})"
    if placement.is_partial():
        return f'Partial("{placement.reduce_op}")'  # type: ignore[attr-defined]
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"


def _placements_literal(placements: Placements) -> str:
    return f"[{', '.join(map(_placement_literal, placements))}]"


def _dictionary(entries: Mapping[str, str]) -> str:
    return "\n".join(f"    {name!r}: {text}," for name, text in entries.items())


def _call_text(trial: Trial, names: list[str]) -> str:
    """Return the call with tensors by name and everything else as a literal."""
    remaining = iter(names)

    def text(value: object) -> str:
        if isinstance(value, torch.Tensor):
            return next(remaining)
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(text(v) + ', ' for v in value)})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if isinstance(value, Placement):
            return _placement_literal(value)
        if isinstance(value, torch.device):
            return f"torch.device('{value}')"
        return repr(value)

    parts = [text(value) for value in trial.case.args]
    parts += [f"{name}={text(value)}" for name, value in trial.case.kwargs.items()]
    target = resolve(trial.case.call)
    called = target.__name__ if is_program(trial.case.call) else trial.case.call
    made = f"{called}({', '.join(parts)})"
    written = [names[number] for number in written_arguments(trial.case)]
    return f"with_written({made}, [{', '.join(written)}])" if written else made


_SILENT = (VerdictKind.HANG, VerdictKind.DIED, VerdictKind.RANKS_DISAGREE)
"""Verdicts that show as ranks which do not answer; elsewhere that may be a machine that has too much to do."""


def render_script(trial: Trial, verdict: Verdict, memory_limit: int | None = None) -> str:
    """Return the source of a script that shows ``verdict`` of ``trial``; it needs torch alone, or what the call is in.

    Its ranks have the limit of memory (bytes) that the trial's had if that is what the verdict is about.
    """
    case, mesh = trial.case, trial.mesh
    tensors = tensor_arguments(case.args, case.kwargs)
    names = [name.replace("[", "_").replace("]", "") for name in argument_names(case)]
    reference = make_reference(case)
    globals_, placements_, locals_ = {}, {}, {}
    for position, (name, tensor, placements) in enumerate(zip(names, tensors, trial.combination, strict=True)):
        suffix = ".requires_grad_()" if tensor.requires_grad else ""
        globals_[name] = _literal(tensor) + suffix
        placements_[name] = _placements_literal(placements)
        pieces = split(tensor, placements, mesh.shape, trial.seed + position)
        locals_[name] = "[" + ", ".join(_literal(piece) for piece in pieces) + "]"
    backward = verdict.phase in (Phase.BACKWARD, Phase.GATHER_GRADIENT)
    if verdict.kind in (VerdictKind.DIED, VerdictKind.HANG):  # ranks may not have said that they were in it
        backward = bool(trial.cotangents)
    accepted = [
        accepted_error(trial, reference, output, Spot(Phase.FORWARD, name))
        for name, output in zip(output_names(reference), reference.outputs, strict=True)
    ]
    accepted_writes = {
        name: case_tolerance(trial, reference, own, ()) for name, own in zip(names, reference.inputs, strict=True)
    }
    accepted_gradients: list[float] = []
    cotangent_text = ""
    if backward:
        index = verdict.backward or 0
        for number, gradient in zip(reference.wanted, reference.gradients(trial.seed + index), strict=True):
            spot = Spot(Phase.BACKWARD, f"{reference.names[number]}.grad", index)
            accepted_gradients.append(0.0 if gradient is None else accepted_error(trial, reference, gradient, spot))
        seed = trial.seed + index
        values = reference.cotangents(seed)
        wheres = trial.cotangents[index]
        parts = [split(v, w, mesh.shape, seed) for v, w in zip(values, wheres, strict=True)]
        whole = ", ".join(_literal(value) for value in values)
        cut = ", ".join("[" + ", ".join(_literal(piece) for piece in pieces) + "]" for pieces in parts)
        cotangent_text = (
            f"\nCOTANGENT_GLOBAL = [{whole}]\n"
            f"COTANGENT_PLACEMENTS = [{', '.join(_placements_literal(where) for where in wheres)}]\n"
            f"COTANGENT_LOCAL = [{cut}]\n\n"
        )
    title = f"{verdict.kind} in {case.op}: {verdict.message}".replace("\\", "\\\\").replace('"""', "'''")
    backend = "gloo" if mesh.backend == "simulated" else mesh.backend
    call_text = _call_text(trial, names)
    asked = [None if where is None else _placements_literal(where) for where in asked_placements(case)]
    limited = memory_limit is not None and names_limit(verdict.message)
    return TEMPLATE.format(
        title=title,
        memory_text=MEMORY.format(limit=memory_limit) if limited else "",
        limit_call="    limit_memory(MEMORY_LIMIT)\n" if limited else "",
        unlimit_call="    limit_memory(None)\n" if limited else "",
        resource_import="import resource\n" if limited else "",
        imports=STRIDED_IMPORT if "_StridedShard" in f"{placements_} {call_text}" else "",
        strided=promises_strides(trial.case),
        asked=f"[{', '.join(map(str, asked))}]",
        version=torch.__version__.partition("+")[0],
        mesh_text=f"mesh {mesh.shape_text}, backend {backend}",
        mesh=mesh.shape,
        device=mesh.device,
        backend=backend,
        globals_text=_dictionary(globals_),
        placements_text=_dictionary(placements_),
        locals_text=_dictionary(locals_),
        source=program_source(case.call),
        needs=f"torch and {case.call}" if needs_its_module(case.call) else "torch alone",
        parameters=", ".join(names),
        call_text=call_text,
        accepted=accepted,
        accepted_gradients=accepted_gradients,
        backward=backward,
        writes=verdict.kind is VerdictKind.MUTATED_INPUT,
        accepted_writes=accepted_writes,
        raises=verdict.kind is VerdictKind.CRASH or verdict.kind in _SILENT,
        cotangent_text=cotangent_text,
        world_size=mesh.world_size,
        silent=limited or verdict.kind in _SILENT,  # without memory a rank may not even say that it has none
    )


def run_script(source: str) -> tuple[str, str]:
    """Run a script in a process of its own; return ``fails as described``, ``did not fail`` or what went wrong,
    and the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "finding.py"
        path.write_text(source)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with subprocess.Popen(
            [sys.executable, str(path)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group with its ranks, which would live on without it
        ) as script:
            try:
                said, errors = script.communicate(timeout=TIME_LIMIT)
            except subprocess.TimeoutExpired:
                return f"not run to its end within {TIME_LIMIT:.0f} s", ""
            finally:  # after a Ctrl-C as well
                _end_group(script)
    output = (errors + said).strip()[-2000:]  # what the script says comes last, and is kept
    if script.returncode == 1 and "the defect is there" in said:
        return FAILS, output
    if script.returncode == 0 and "the defect is gone" in said:
        return GONE, output
    return f"broke with exit status {script.returncode}", output


def _end_group(script: subprocess.Popen[str]) -> None:
    """End a script and its ranks, if they have not ended.

    They are asked to first: what unlinks their semaphores once they are gone ignores that, and goes by itself.
    """
    for asked in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + ENDING_LIMIT
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, asked)
            while time.monotonic() < until:
                script.poll()
                os.killpg(script.pid, 0)
                time.sleep(0.02)
            continue
        return
