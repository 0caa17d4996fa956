"""The oracle: the local reference, the comparison, and the verdict on an observation.

Nothing here knows DTensor's rules. A reference is the same call on the global values in one process; a rank's local
tensor is compared with the piece of the reference that the output's placements promise.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from verifier.cases import (
    Contribution,
    Difference,
    DifferenceKind,
    Fate,
    Observation,
    OpCase,
    Phase,
    ProcessReport,
    Raised,
    Redistribution,
    Trial,
    Verdict,
    VerdictKind,
    parse_placements,
)
from verifier.comparison import compare, tolerance
from verifier.partials import LARGEST_PART
from verifier.placements import Disagreement, combine
from verifier.torch_internals import pytree

__all__ = [
    "Reference",
    "argument_names",
    "case_tolerance",
    "cotangents",
    "expected_value",
    "judge",
    "make_reference",
    "output_names",
    "parameter_names",
    "resolve",
    "with_written",
    "written_arguments",
]


@functools.cache
def resolve(path: str) -> Callable[..., object]:
    """Return the callable at a dotted path, as ``torch.nn.functional.embedding`` or ``torch.ops.aten.mm.default``.

    Raises
    ------
    ValueError
        If there is no such callable.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                target = getattr(target, part)
        except AttributeError as error:
            raise ValueError(f"{path!r}: {error}") from error
        if not callable(target):
            raise ValueError(f"{path!r} is a {type(target).__name__}, not a callable")
        return target
    raise ValueError(f"no module in {path!r} can be imported")


# ----------------------------------------------------------------------------------------------------------- reference
@dataclass
class Reference:
    """What the call gives on the global values, in one process.

    ``inputs`` are the tensor arguments (copies; the case's own are never touched), ``outputs`` the tensors among the
    results and then the arguments that the op writes to without returning them, ``structure`` the pytree of the
    results, ``raised`` the exception instead of results.
    """

    case: OpCase
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    structure: object = None
    raised: Exception | None = None
    _gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)

    @property
    def differentiable(self) -> list[int]:
        """Positions of the outputs through which a gradient can flow."""
        return [i for i, output in enumerate(self.outputs) if output.requires_grad]

    @property
    def wanted(self) -> list[int]:
        """Positions of the inputs whose gradient is wanted."""
        return [i for i, tensor in enumerate(self.inputs) if tensor.requires_grad]

    def gradients(self, seed: int) -> list[torch.Tensor | None]:
        """Return the gradient of each wanted input under :func:`cotangents` of ``seed``; None where there is none."""
        if seed not in self._gradients:
            self._gradients[seed] = list(
                torch.autograd.grad(
                    [self.outputs[i] for i in self.differentiable],
                    [self.inputs[i] for i in self.wanted],
                    cotangents(self, seed),
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        return self._gradients[seed]


def make_reference(case: OpCase) -> Reference:
    """Run the call of ``case`` on copies of its values.

    Raises
    ------
    ValueError
        If ``case.call`` cannot be resolved. What the call itself raises is part of the reference.
    """
    call = resolve(case.call)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    copies: list[object] = []
    inputs: list[torch.Tensor] = []
    seen: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            copies.append(leaf)
            continue
        if id(leaf) not in seen:
            copy = leaf.detach().clone(memory_format=torch.preserve_format)
            seen[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
        copies.append(seen[id(leaf)])
        inputs.append(seen[id(leaf)])
    args, kwargs = pytree.tree_unflatten(copies, spec)
    reference = Reference(case, inputs)
    try:
        result = call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever the op raises is what the sharded call must raise as well
        reference.raised = error
        return reference
    flat, reference.structure = pytree.tree_flatten(result)
    reference.outputs = with_written([leaf for leaf in flat if isinstance(leaf, torch.Tensor)], case, inputs)
    return reference


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def with_written(returned: Sequence[_Tensor], case: OpCase, inputs: Sequence[_Tensor]) -> list[_Tensor]:
    """Return the results, followed by the tensor arguments that the op writes to and does not return."""
    written = [inputs[number] for number in written_arguments(case)]
    return [*returned, *(tensor for tensor in written if not any(tensor is other for other in returned))]


def written_arguments(case: OpCase) -> tuple[int, ...]:
    """Return the numbers, among the tensor arguments, of those that the operator's schema marks as written to.

    >>> a, b = torch.zeros(2), torch.zeros(2)
    >>> written_arguments(OpCase("aten.add.out", "torch.ops.aten.add.out", (a, b), {"out": torch.empty(2)}))
    (2,)
    """
    schema = getattr(resolve(case.call), "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    names = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    named = [(argument.name, value) for argument, value in zip(schema.arguments, case.args, strict=False)]
    numbers: list[int] = []
    count = 0
    for name, value in [*named, *case.kwargs.items()]:
        here = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
        if name in names:
            numbers += range(count, count + here)
        count += here
    return tuple(numbers)


def cotangents(reference: Reference, seed: int) -> list[torch.Tensor]:
    """Return one cotangent for each differentiable output: small integers without 0, of mixed sign."""
    result = []
    for position in reference.differentiable:
        output = reference.outputs[position]
        generator = torch.Generator().manual_seed(hash((seed, position, 77)) & 0x7FFFFFFF)
        magnitude = torch.randint(1, 4, output.shape, generator=generator)
        sign = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        result.append((magnitude * sign).to(output.dtype))
    return result


# ------------------------------------------------------------------------------------------------------------- verdict
def vacuous(reference: Reference) -> str:
    """Return why agreement with ``reference`` would prove nothing, or an empty string."""
    if not reference.outputs:
        return "the call returns no tensor"
    if all(output.numel() == 0 for output in reference.outputs):
        return "every output is empty"
    for output in reference.outputs:
        if output.numel() and not bool((output.detach() == 0).all()):
            break
    else:
        return "every output is 0"
    if all(o.numel() > 1 and bool((o.detach() == o.detach().reshape(-1)[0]).all()) for o in reference.outputs):
        return "every element of the output is the same"
    return ""


_KINDS = {
    DifferenceKind.VALUE: VerdictKind.WRONG_VALUE,
    DifferenceKind.SHAPE: VerdictKind.WRONG_SHAPE,
    DifferenceKind.DTYPE: VerdictKind.WRONG_DTYPE,
    DifferenceKind.STRUCTURE: VerdictKind.WRONG_SHAPE,
    DifferenceKind.PLACEMENT: VerdictKind.WRONG_PLACEMENT,
    DifferenceKind.MUTATED: VerdictKind.MUTATED_INPUT,
}


def judge(observation: Observation, reference: Reference) -> Verdict:
    """Return the verdict on ``observation``, given what the call does locally.

    What cannot be judged because of an error of the verifier's own is TOOL_ERROR: one trial, and not the run, is lost.
    """
    try:
        return _judge(observation, reference)
    except Exception as error:  # noqa: BLE001 - becomes a verdict that fails the run, with its traceback
        text = "".join(traceback.format_exception(error)[-12:])
        return Verdict(VerdictKind.TOOL_ERROR, f"{type(error).__name__}: {error}", detail=text)


def _judge(observation: Observation, reference: Reference) -> Verdict:
    reports = [report for report in observation.reports if report is not None]
    raised = [(report, report.raised) for report in reports if report.raised is not None]
    if observation.fate is Fate.DIED:
        return Verdict(VerdictKind.DIED, observation.detail, _furthest(reports), "process")
    if observation.fate is Fate.HANG:
        return Verdict(VerdictKind.HANG, observation.detail, _furthest(reports), "collective")
    for _, error in raised:
        if error.ours:
            return Verdict(
                VerdictKind.TOOL_ERROR, f"{error.type}: {error.message}", error.phase, detail=error.traceback
            )
    if raised:
        return _judge_raised(observation, reference, raised)
    if observation.fate is not Fate.COMPLETED or len(reports) != len(observation.reports):
        return Verdict(VerdictKind.TOOL_ERROR, f"a {observation.fate} trial without an exception: {observation.detail}")
    if reference.raised is not None:
        error_text = f"{type(reference.raised).__name__}: {_first_line(str(reference.raised))}"
        held = ", ".join(f"{subject} {text}" for subject, text in reports[0].placements)
        return Verdict(
            VerdictKind.SILENT_ERROR, f"returned {held or 'a value'}, expected {error_text}", Phase.FORWARD, "output"
        )
    for subject, texts in _placements_by_subject(reports).items():
        if len(set(texts)) > 1:
            listing = "; ".join(f"rank {r.ranks[0]}: {t}" for r, t in zip(reports, texts, strict=True))
            return Verdict(
                VerdictKind.RANKS_DISAGREE, f"{subject} placements differ: {listing}", Phase.FORWARD, subject
            )
    differences = [difference for report in reports for difference in report.differences]
    if not any(difference.kind is DifferenceKind.SHAPE for difference in differences):
        differences += _combined_differences(observation.trial, reports, reference)
    if differences:
        return _judge_difference(min(differences, key=_order))
    for report in reports:
        if report.unchecked:
            return Verdict(VerdictKind.INCONCLUSIVE, report.unchecked[0])
    if reason := vacuous(reference):
        return Verdict(VerdictKind.INCONCLUSIVE, reason)
    return Verdict(VerdictKind.PASS)


_PHASES = list(Phase)


def _order(difference: Difference) -> tuple[int, int, int, str]:
    return (_PHASES.index(difference.phase), difference.backward or 0, difference.rank, difference.subject)


def _furthest(reports: Sequence[ProcessReport]) -> Phase:
    return max((report.reached for report in reports), key=_PHASES.index, default=Phase.SETUP)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _judge_raised(
    observation: Observation, reference: Reference, raised: Sequence[tuple[ProcessReport, Raised]]
) -> Verdict:
    _, error = min(raised, key=lambda pair: (_PHASES.index(pair[1].phase), pair[0].ranks))
    if reference.raised is not None and error.phase in (Phase.SETUP, Phase.FORWARD):
        return Verdict(VerdictKind.PASS, f"raises as the local call does: {error.type}", error.phase)
    ranks = sorted(rank for r, e in raised if e.phase == error.phase for rank in r.ranks)
    everyone = len(ranks) == observation.trial.mesh.world_size
    who = "every rank" if everyone else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    what = f"{error.type}: {_first_line(error.message)}" if error.message else f"{error.type} in {error.where}"
    message = f"{who} raised {what}, expected no exception"
    if error.refusal and everyone:
        return Verdict(VerdictKind.UNSUPPORTED, f"{error.type}: {_first_line(error.message)}", error.phase)
    if observation.fate is Fate.STUCK:
        message += f" ({observation.detail})"
    return Verdict(VerdictKind.CRASH, message, error.phase, _subject_of(error), error.backward, detail=error.traceback)


def _subject_of(error: Raised) -> str:
    return "gradient" if error.phase in (Phase.BACKWARD, Phase.GATHER_GRADIENT) else "output"


def _placements_by_subject(reports: Sequence[ProcessReport]) -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for report in reports:
        for subject, text in report.placements:
            table.setdefault(subject, []).append(text)
    return table


def _judge_difference(difference: Difference) -> Verdict:
    kind = _KINDS[difference.kind]
    if difference.phase in (Phase.BACKWARD, Phase.GATHER_GRADIENT):
        kind = VerdictKind.WRONG_GRADIENT
    where = f" {list(difference.index)}" if difference.index is not None else ""
    holder = f" on rank {difference.rank}" if difference.rank >= 0 else ""
    what = "" if difference.kind is DifferenceKind.VALUE else f" {difference.kind}"
    message = f"{difference.subject}{where}{holder}:{what} got {difference.got}, expected {difference.expected}"
    return Verdict(kind, message, difference.phase, difference.subject, difference.backward)


def _combined_differences(trial: Trial, reports: Sequence[ProcessReport], reference: Reference) -> list[Difference]:
    """Check what no rank can check alone: that the parts of a Partial reduce to the reference."""
    groups: dict[tuple[Phase, str, int | None], list[Contribution]] = {}
    for report in reports:
        for part in report.contributions:
            groups.setdefault((part.phase, part.subject, part.backward), []).append(part)
    differences = []
    steps = [step for report in reports for step in report.redistributions]
    for (phase, subject, backward), parts in groups.items():
        parts.sort(key=lambda part: part.rank)
        expected = expected_value(reference, phase, subject, backward, trial.seed)
        assert expected is not None, f"no reference for {subject}"
        placements = parse_placements(parts[0].placements)
        try:
            got = combine([part.local for part in parts], placements, trial.mesh.shape, expected.shape)
        except Disagreement as error:
            kind = DifferenceKind.MUTATED if phase is Phase.INPUTS else DifferenceKind.VALUE
            text = f"parts of {parts[0].placements} of one tensor"
            differences.append(Difference(kind, phase, subject, -1, str(error), text, None, backward))
            continue
        found = compare(got, expected.detach(), case_tolerance(trial, reference, expected, steps))
        if found is not None:
            kind, got_text, expected_text, index = found
            kind = DifferenceKind.MUTATED if phase is Phase.INPUTS else kind
            note = f"{got_text} once the ranks' parts are reduced under {parts[0].placements}"
            differences.append(Difference(kind, phase, subject, -1, note, expected_text, index, backward))
    return differences


def case_tolerance(
    trial: Trial, reference: Reference, expected: torch.Tensor, steps: Sequence[Redistribution]
) -> float:
    """Return the largest absolute error that counts as equal to ``expected``: 0 where everything is exact.

    On the way from Replicate to a Partial sum DTensor divides by the number of ranks, which rounds unless that is a
    power of two; ``steps`` says whether it did.
    """
    rounded = any(extent & (extent - 1) for extent in trial.mesh.shape) and any(
        step.collective is None and "P(" in step.target for step in steps
    )
    if reference.case.exact and not rounded:
        return 0.0
    terms = sum(tensor.numel() for tensor in reference.inputs) + sum(o.numel() for o in reference.outputs)
    placed = [*trial.combination, *(placements for one in trial.cotangents for placements in one)]
    partial = any(placement.is_partial() for placements in placed for placement in placements)
    return tolerance(expected, terms, LARGEST_PART if partial else 0.0)


def expected_value(
    reference: Reference, phase: Phase, subject: str, backward: int | None, seed: int
) -> torch.Tensor | None:
    """Return the reference of ``subject``: an output, what the call leaves of an input, or an input's gradient."""
    names = argument_names(reference.case)
    if phase is Phase.INPUTS:
        return reference.inputs[names.index(subject)]
    if backward is None:
        return reference.outputs[output_names(reference).index(subject)]
    gradients = reference.gradients(seed + backward)
    wanted = [f"{names[i]}.grad" for i in reference.wanted]
    return gradients[wanted.index(subject)]


# --------------------------------------------------------------------------------------------------------------- names
def output_names(reference: Reference) -> list[str]:
    """Return a name for each output tensor: ``output``, or ``output 0``, ``output 1`` … where there are several."""
    if len(reference.outputs) == 1:
        return ["output"]
    return [f"output {i}" for i in range(len(reference.outputs))]


def argument_names(case: OpCase) -> list[str]:
    """Return a name for each tensor argument, in pytree order: the parameter's name, with an index inside a list."""
    positional = parameter_names(case.call)
    names = []
    for path, leaf in pytree.tree_flatten_with_path((case.args, dict(case.kwargs)))[0]:
        if not isinstance(leaf, torch.Tensor):
            continue
        steps = [key.idx if isinstance(key, pytree.SequenceKey) else key.key for key in path]  # type: ignore[attr-defined]
        root, first, *rest = steps
        name = str(first) if root == 1 else positional[first] if first < len(positional) else f"argument {first}"
        names.append(name + "".join(f"[{part}]" for part in rest))
    return names


@functools.cache
def parameter_names(call: str) -> list[str]:
    """Return the names of the parameters of the callable at a dotted path; empty if it does not tell."""
    target = resolve(call)
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return [argument.name for argument in schema.arguments]
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # builtins without a signature
        return []
