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
from verifier.reference import argument_names, make_reference, output_names, resolve, written_arguments
from verifier.targets import asked_placements
from verifier.torch_internals import strides_of

__all__ = ["FAILS", "GONE", "render_script", "run_script"]

FAILS = "fails as described"
GONE = "did not fail"
TIME_LIMIT = 90.0
ENDING_LIMIT = 2.0
"""Seconds that processes get to end once they are asked to."""

_TEMPLATE = '''\
"""{title}

Needs {needs}. Exit status 1 if the defect is there, 0 if it is not, 2 if that is undecided.
Seen on torch {version}; {mesh_text}.
"""

from __future__ import annotations

import os
{resource_import}import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
{imports}
MESH = {mesh}
DEVICE = "{device}"
BACKEND = "{backend}"

# The whole tensors, their placements (one per mesh dim), and what each rank holds of them.
GLOBAL = {{
{globals_text}
}}
PLACEMENTS = {{
{placements_text}
}}
LOCAL = {{
{locals_text}
}}

{memory_text}{source}
def call({parameters}):
    return {call_text}


def tensors(result):
    return [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]


def with_written(result, written):
    """The tensors of a result, and the arguments that the op writes to without returning them."""
    found = tensors(result)
    return [*found, *(t for t in written if not any(t is f for f in found))]


def place(name, rank, mesh):
    whole = GLOBAL[name]
    part = LOCAL[name][rank].to(DEVICE)
    result = DTensor.from_local(part, mesh, PLACEMENTS[name], run_check=False, shape=whole.shape, stride=whole.stride())
    return result.requires_grad_(whole.requires_grad)


def cut(whole, dim, parts):
    """The pieces of a tensor, as torch.chunk cuts it, and empty ones up to that number."""
    size = whole.shape[dim]
    width = -(-size // parts)
    starts = [min(index * width, size) for index in range(parts)]
    return [whole.narrow(dim, start, min(width, size - start)) for start in starts]


def promised(whole, placements, rank):
    """What the rank must hold of a tensor that is replicated or sharded; None if it is Partial in any way."""
    coordinate, rest = [], rank
    for extent in reversed(MESH):
        coordinate.insert(0, rest % extent)
        rest //= extent
    for placement, extent, index in zip(placements, MESH, coordinate):
        if type(placement) is Shard:
            whole = cut(whole, placement.dim, extent)[index]
        elif hasattr(placement, "split_factor"):
            pieces = cut(whole, placement.dim, placement.split_factor)
            whole = torch.cat([cut(piece, placement.dim, extent)[index] for piece in pieces], placement.dim)
        elif type(placement) is not Replicate:
            return None
    return whole


def differs(got, expected, absolute):
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return True
    return not torch.allclose(got, expected, rtol=0.0, atol=absolute, equal_nan=True)


def announce(answers, results, rank):
    """Tell what this rank's results are placed as, before a collective in which ranks that disagree may hang."""
    answers.put((rank, "placements", [str(t.placements) if isinstance(t, DTensor) else "" for t in results]))


def held(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(what, got, expected, absolute, rank):
    if not isinstance(got, DTensor):
        return [f"{{what}}: is a plain tensor, expected a DTensor"]
    problems = []
    if got.shape != expected.shape:
        problems.append(f"{{what}}: has shape {{list(got.shape)}}, expected {{list(expected.shape)}}")
    part = promised(expected, got.placements, rank)
    if part is not None and differs(got.to_local().cpu(), part, absolute):
        problems.append(f"{{what}}: rank {{rank}} holds {{got.to_local().tolist()}}, expected {{part.tolist()}}")
    whole = got.full_tensor().cpu()
    if differs(whole, expected, absolute):
        problems.append(f"{{what}}: gathered {{whole.tolist()}}, expected {{expected.tolist()}}")
    return problems


def expected_results():
    wholes = {{n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in GLOBAL.items()}}
    try:
        results = tensors(call(**wholes))
    except Exception as error:
        return None, None, None, error
    gradients = None
    if {backward}:
        flowing = [t for t in results if t.requires_grad]
        wanted = [t for t in wholes.values() if t.requires_grad]
        gradients = torch.autograd.grad(flowing, wanted, COTANGENT_GLOBAL, allow_unused=True)
    return [t.detach() for t in results], gradients, {{name: t.detach() for name, t in wholes.items()}}, None

{cotangent_text}
def body(rank, mesh, answers):
    expected, expected_gradients, left, error = expected_results()
    arguments = {{name: place(name, rank, mesh) for name in GLOBAL}}
    before = {{name: argument.to_local().detach().clone() for name, argument in arguments.items()}}
    try:
        results = tensors(call(**arguments))
    except Exception:
        if error is None:
            raise
        return []  # as the local call does
    if error is not None:
        returned = [held(t).tolist() for t in results]
        return [f"the local call raises {{error!r}}, the sharded one returns {{returned}}"]
    problems = []
    announce(answers, results, rank)
    for i, (got, where) in enumerate(zip(results, {asked})):
        if where is not None and tuple(got.placements) != tuple(where):
            problems.append(f"output {{i}}: placed as {{got.placements}}, expected {{where}}")
    if len(results) != len(expected):
        problems.append(f"returned {{len(results)}} tensors, expected {{len(expected)}}")
    for i, (got, wanted, absolute) in enumerate(zip(results, expected, {accepted})):
        problems += check(f"output {{i}}", got.detach(), wanted, absolute, rank)
    if {backward}:
        flowing = [t for t in results if t.requires_grad]
        cotangents = [
            DTensor.from_local(local[rank].to(DEVICE), mesh, where, run_check=False, shape=w.shape, stride=w.stride())
            for local, where, w in zip(COTANGENT_LOCAL, COTANGENT_PLACEMENTS, COTANGENT_GLOBAL)
        ]
        names = [name for name, argument in arguments.items() if argument.requires_grad]
        gradients = torch.autograd.grad(flowing, [arguments[n] for n in names], cotangents, allow_unused=True)
        announce(answers, gradients, rank)
        for name, got, wanted, absolute in zip(names, gradients, expected_gradients, {accepted_gradients}):
            if (got is None) != (wanted is None):
                problems.append(f"gradient of {{name}}: got {{got}}, expected {{wanted}}")
            elif got is not None and (isinstance(got, DTensor) or wanted.numel()):
                problems += check(f"gradient of {{name}}", got, wanted, absolute, rank)
    for name, argument in arguments.items() if {writes} else ():
        if differs(left[name], GLOBAL[name].detach(), 0.0):  # the local call writes to it
            problems += check(name, argument.detach(), left[name], {accepted_writes}[name], rank)
        elif differs(argument.to_local().detach().cpu(), before[name].cpu(), 0.0):
            problems.append(f"{{name}} was changed: {{before[name].tolist()}} became {{argument.to_local().tolist()}}")
    return problems


def rank_main(rank, port, answers):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size={world_size})
    answers.put((rank, "ready", None))  # starts the thread of the queue, for which there may be no memory later
{limit_call}    try:
        kind, said = "problems", body(rank, init_device_mesh(DEVICE, MESH), answers)
    except Exception as error:
        kind, said = "raised", [f"the sharded call raised {{type(error).__name__}}: {{error}}"]
{unlimit_call}    answers.put((rank, kind, said))
    answers.close()
    answers.join_thread()
    os._exit(0)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, port, answers), daemon=True) for r in range({world_size})]
    for r, process in enumerate(ranks):
        os.environ["PYTHONHASHSEED"] = str(r)  # the order of sets differs from rank to rank, the same in each run
        process.start()
    failed, heard, placed, others = False, 0, {{}}, []
    while heard < {world_size}:
        try:
            rank, kind, said = answers.get(timeout=10 if failed else 60)
        except Exception:
            if not failed and not {silent}:
                print("UNDECIDED: the ranks have not answered in time, or died, and that is not the defect")
                for process in ranks:
                    process.kill()
                sys.exit(2)
            if not failed:
                print("FAILS: the ranks hang or died")
            failed = True
            break
        if kind == "ready":
            continue
        if kind == "placements":
            placed.setdefault(rank, []).append(said)
            turn = len(placed[rank]) - 1
            held = {{str(theirs[turn]) for theirs in placed.values() if len(theirs) > turn}}
            if len(held) > 1:
                failed = True
                print(f"FAILS: ranks hold their results as {{' and as '.join(sorted(held))}}")
            continue
        heard += 1
        if kind == "raised" and not {raises}:
            others += said
            continue
        for problem in said:
            failed = True
            print(f"FAILS on rank {{rank}}: {{problem}}")
    for process in ranks:
        process.kill()
    if others and not failed:
        print(f"UNDECIDED: {{others[0]}}, and that is not the defect")
        sys.exit(2)
    print("the defect is there" if failed else "the defect is gone")
    sys.exit(1 if failed else 0)
'''


_MEMORY = '''\
# So many bytes may a rank map on top of what it has once all have met; allocations beyond that fail.
MEMORY_LIMIT = {limit}


def limit_memory(above):
    """Set that limit; None takes it back."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limit = hard if above is None else mapped + above
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


'''

_STRIDED_IMPORT = "from torch.distributed.tensor.placement_types import _StridedShard\n"


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
    return _TEMPLATE.format(
        title=title,
        memory_text=_MEMORY.format(limit=memory_limit) if limited else "",
        limit_call="    limit_memory(MEMORY_LIMIT)\n" if limited else "",
        unlimit_call="    limit_memory(None)\n" if limited else "",
        resource_import="import resource\n" if limited else "",
        imports=_STRIDED_IMPORT if "_StridedShard" in f"{placements_} {call_text}" else "",
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
