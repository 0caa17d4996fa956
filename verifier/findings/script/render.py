"""Writes and runs the stand-alone script of a finding, which needs only torch and contains all values.

The script shows the defect through DTensor's public API. Its exit status is 1 if the defect was seen, 0 if the call ran
and was right, and 2 otherwise.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.ops import argument_names, has_opaque_results, promises_strides, written_arguments
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.findings.script.runtime import REFUSALS
from verifier.findings.script.source import (
    Inlined,
    called_as,
    needs_its_module,
    program_source,
    source_folder,
    stand_in_source,
    torchs_path,
)
from verifier.oracle.comparison import Spot
from verifier.oracle.reference import Reference, make_reference, output_names
from verifier.oracle.tolerance import accepted_error, case_tolerance
from verifier.placements.algebra import split
from verifier.processes.scripts import run_to_end
from verifier.programs import asked_placements
from verifier.records.memory import own_strides
from verifier.records.schema import FAILS, GONE
from verifier.records.trials import span_of
from verifier.torch_internals.placements import Placements, strides_of

__all__ = ["FAILS", "GONE", "NoScriptError", "render_script", "run_script", "without_imports"]

TIME_LIMIT = 90.0


def _number(value: object) -> str:
    """Return a number as an expression; Python has no literals for nan and the infinities."""
    if isinstance(value, complex):
        return f"complex({_number(value.real)}, {_number(value.imag)})"
    return f"float('{value}')" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _values(value: object) -> str:
    """Return nested lists of numbers as an expression."""
    return f"[{', '.join(map(_values, value))}]" if isinstance(value, list) else _number(value)


def _literal(tensor: torch.Tensor) -> str:
    """Return an expression that makes ``tensor`` with its layout."""
    text = f"torch.tensor({_values(tensor.detach().tolist())}, dtype={tensor.dtype})"
    if tensor.numel() == 0 and tensor.ndim:
        text = f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
    if strides := own_strides(tensor):
        values = _values(tensor.detach().as_strided((span_of(tensor.shape, strides),), (1,)).tolist())
        return f"torch.tensor({values}, dtype={tensor.dtype}).as_strided({list(tensor.shape)}, {strides})"
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


def _dictionary(entries: Mapping[str, float]) -> str:
    return f"{{{', '.join(f'{name!r}: {_number(value)}' for name, value in entries.items())}}}"


_OF_THE_CALL = frozenset(
    {
        "torch",
        "PROGRAM",
        "Partial",
        "Replicate",
        "Shard",
        "_StridedShard",
        "call",
        "complex",
        "float",
        "getattr",
        "slice",
    }
)
"""Names that the text of a call may use besides its tensors."""


def _is_taken(name: str) -> bool:
    """Return whether Python allows no assignment to a name."""
    return keyword.iskeyword(name) or name == "__debug__"


def _identifiers(names: Sequence[str], called: str) -> list[str]:
    """Return a parameter for each tensor argument: its name, changed if it is no identifier or is already in use.

    >>> _identifiers(["input", "from", "argument 0", "x[0]", "x_0", "torch"], "torch.add")
    ['input', 'from_', 'argument_0', 'x_0', 'x_0_', 'torch_']
    """
    taken = {*_OF_THE_CALL, called}
    found: list[str] = []
    for name in names:
        text = re.sub(r"[^0-9A-Za-z_]", "_", name.replace("]", ""))
        text = f"_{text}" if not text or text[0].isdigit() else text
        while _is_taken(text) or text in taken:
            text += "_"
        taken.add(text)
        found.append(text)
    return found


def _call_text(case: OpCase, called: str, names: Sequence[str]) -> str:
    """Return the call with tensors by name and everything else as a literal."""
    remaining = iter(names)

    def text(value: object) -> str:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return next(remaining)
        if kind is list:
            return f"[{', '.join(map(text, value))}]"  # type: ignore[call-overload]
        if isinstance(value, tuple):
            return f"({''.join(text(v) + ', ' for v in value)})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {text(item)}' for key, item in value.items())}}}"
        if kind in (float, complex):
            return _number(value)
        if isinstance(value, Placement):
            return _placement_literal(value)
        if isinstance(value, torch.device):
            return f"torch.device('{value}')"
        if value is None or kind in _PLAIN:
            return repr(value)
        raise TypeError(f"a script has no literal for {value!r}, a {kind.__name__}")

    plain = [name for name in case.kwargs if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) and not _is_taken(name)]
    parts = [text(value) for value in case.args]
    named = [(name, text(value)) for name, value in case.kwargs.items()]
    parts += [f"{name}={value}" for name, value in named if name in plain]
    if others := ", ".join(f"{name!r}: {value}" for name, value in named if name not in plain):
        parts.append(f"**{{{others}}}")
    return f"{called}({', '.join(parts)})"


_PLAIN = (bool, int, str, slice, torch.dtype, torch.layout, torch.memory_format)
"""Types whose values have an expression as their repr."""


_SILENT = (VerdictKind.HANG, VerdictKind.DIED, VerdictKind.RANKS_DISAGREE)
"""Verdicts that silent ranks prove. For other verdicts, ranks may be silent because the machine is busy."""


class NoScriptError(Exception):
    """The text of the script is not valid Python, so there is no script."""


@dataclass(frozen=True)
class _Written:
    """A tensor in a script: each field is an expression as text; ``parts`` is a list with a local tensor per rank."""

    name: str
    whole: str
    placements: str
    parts: str

    @classmethod
    def of(
        cls, name: str, tensor: torch.Tensor, placements: Placements, mesh: MeshSpec, seed: int, own: str = ""
    ) -> _Written:
        parts = ", ".join(map(_literal, split(tensor, placements, mesh.shape, seed)))
        return cls(name, _literal(tensor) + own, _placements_literal(placements), f"[{parts}]")


def _arguments(trial: Trial, names: Sequence[str]) -> list[_Written]:
    tensors = tensor_arguments(trial.case.args, trial.case.kwargs)
    return [
        _Written.of(name, tensor, placements, trial.mesh, trial.seed + i, ".requires_grad_()" * tensor.requires_grad)
        for i, (name, tensor, placements) in enumerate(zip(names, tensors, trial.combination, strict=True))
    ]


def _cotangents(trial: Trial, reference: Reference, index: int) -> list[_Written]:
    """Return the cotangents of the trial's backward pass number ``index``."""
    seed = trial.seed + index
    values = zip(reference.cotangents(seed), trial.cotangents[index], strict=True)
    return [_Written.of("", value, where, trial.mesh, seed) for value, where in values]


def _accepted_gradients(trial: Trial, reference: Reference, index: int) -> list[float]:
    gradients = zip(reference.wanted, reference.gradients(trial.seed + index), strict=True)
    return [
        0.0
        if gradient is None
        else accepted_error(trial, reference, gradient, Spot(Phase.BACKWARD, f"{reference.names[number]}.grad", index))
        for number, gradient in gradients
    ]


def render_script(trial: Trial, verdict: Verdict, memory_limit: int | None = None, imports: Sequence[str] = ()) -> str:
    """Return the source of a script that shows ``verdict`` of ``trial``.

    It needs torch, the module of the call if that is not torch's, and ``imports``, which it runs first as ``--import``
    does. If the verdict is about memory, the script's ranks have the memory limit (bytes) of the trial's ranks.

    Raises
    ------
    TypeError
        If an argument of the call is of a type for which there is no literal.
    NoScriptError
        If the source is not valid Python: an error of ours.
    """
    case, mesh = trial.case, trial.mesh
    path = torchs_path(case)
    called = called_as(path)
    names = _identifiers(argument_names(case), called)
    call = _call_text(case, called, names)
    reference = make_reference(case)
    backward = verdict.phase in (Phase.BACKWARD, Phase.GATHER_GRADIENT)
    if verdict.kind in (VerdictKind.DIED, VerdictKind.HANG):  # ranks may not have reported the backward pass
        backward = bool(trial.cotangents)
    index = verdict.backward or 0
    tensors = _arguments(trial, names)
    cotangents = _cotangents(trial, reference, index) if backward else []
    accepted = [
        accepted_error(trial, reference, output, Spot(Phase.FORWARD, name))
        for name, output in zip(output_names(reference), reference.outputs, strict=True)
    ]
    accepted_writes = {
        name: case_tolerance(trial, reference, own, ()) for name, own in zip(names, reference.inputs, strict=True)
    }
    asked = [None if where is None else _placements_literal(where) for where in asked_placements(case)]
    limited = memory_limit is not None and verdict.out_of_memory
    placed = f"{[tensor.placements for tensor in (*tensors, *cotangents)]} {call} {asked}"
    source = _template().render(
        title=_documented(f"{verdict.kind} in {case.op}: {verdict.message}"),
        needs=_documented(_needs(path, imports)),
        version=torch.__version__.partition("+")[0],
        mesh=mesh,
        backend="gloo" if mesh.backend == "simulated" else mesh.backend,
        inlined=Inlined(),
        imports=[str(Path(name).resolve()) if name.endswith(".py") else name for name in imports],
        folders=_folders(imports),
        strided_shards="_StridedShard" in placed,
        memory_limit=memory_limit if limited else None,
        verdict=verdict.kind,
        raised=repr(None if limited else verdict.raised or None),  # with less memory another allocation may fail
        locally_raised=repr(None if reference.raised is None else type(reference.raised).__name__),
        plain=any(refusal in verdict.message for refusal in REFUSALS),
        silent=limited or verdict.kind in _SILENT,  # without memory a rank may not be able to report it
        tensors=tensors,
        written=[names[number] for number in written_arguments(case)],
        cotangents=cotangents,
        source=stand_in_source(case) + program_source(path),
        call=call,
        inference=case.in_inference_mode,
        asked=f"[{', '.join(map(str, asked))}]" if any(asked) else "",
        strides=promises_strides(case),
        opaque=has_opaque_results(case.op),
        accepted=_values(accepted),
        accepted_gradients=_values(_accepted_gradients(trial, reference, index) if backward else []),
        accepted_writes=_dictionary(accepted_writes) if verdict.kind is VerdictKind.MUTATED_INPUT else "",
    )
    try:
        compile(source, f"the script of {case.op}", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise NoScriptError(f"{type(error).__name__}: {error}") from error
    return source


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("script.py.jinja")


def _documented(text: str) -> str:
    """Return a text with escapes, so that it can stand in a docstring."""
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return shown.replace("\\", "\\\\").replace('"""', "'''")


def _needs(call: str, imports: Sequence[str]) -> str:
    needs = ["torch", *([call] if needs_its_module(call) else []), *imports]
    return "torch alone" if len(needs) == 1 else " and ".join(needs)


def _folders(imports: Sequence[str]) -> list[str]:
    """Return the folders that Python's path needs for the modules in ``imports``, wherever the script is run."""
    folders = [source_folder(name) for name in imports if not name.endswith(".py")]
    return [folder for folder in dict.fromkeys(folders) if folder]


def without_imports(source: str) -> str:
    """Return a script that was just rendered as one that imports nothing of the user's."""
    return re.sub(r"^IMPORTS = \[.*\]$", "IMPORTS: list[str] = []", source, count=1, flags=re.MULTILINE)


def run_script(source: str, python: str | None = None) -> tuple[str, str]:
    """Run a script in its own process; return ``fails as described``, ``did not fail`` or what went wrong,
    and the end of its output. Another interpreter than that of this process is given by ``python``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "finding.py"
        path.write_text(source, encoding="utf-8")
        code, output = run_to_end(path, TIME_LIMIT, python)
    if code is None:
        return f"not run to its end within {TIME_LIMIT:.0f} s", ""
    status = {1: FAILS, 0: GONE}.get(code, f"broke with exit status {code}")
    return status, output.strip()[-2000:]  # the script's own message comes last, and is kept
