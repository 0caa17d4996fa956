"""From bad verdicts to findings: group them, minimise one of each group, confirm it, write it down.

Grouping is by structure and never by message: the op, the verdict, the phase, and the placements on which DTensor
really ran the op after it had redistributed the arguments. Many combinations end in one rule, so they make one group.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import Shard

from verifier.cases import (
    Fate,
    MeshSpec,
    Observation,
    OpCase,
    Phase,
    Placements,
    ProcessReport,
    Trial,
    Verdict,
    VerdictKind,
    format_placements,
    split_placements,
)
from verifier.converter import tensor_arguments
from verifier.oracle import Reference, judge, make_reference, parameter_names, written_arguments
from verifier.placements import Alphabet, is_shard_order, sharded_dim
from verifier.shrinking import shrink
from verifier.targets import keep_mesh_dims, targets
from verifier.torch_internals import pytree
from verifier.trials import combination_rows, simpler_placements

__all__ = [
    "Collector",
    "Drawn",
    "Failure",
    "Group",
    "Minimiser",
    "Runner",
    "describe_call",
    "dtype_class",
    "fingerprint",
]

Runner = Callable[[Trial], Observation]
"""Runs one trial on its mesh."""


@dataclass(frozen=True)
class Drawn:
    """How to draw a case again: the ops that its generator was given, and the choices that Hypothesis made."""

    ops: tuple[str, ...]
    choices: bytes


@dataclass(frozen=True)
class Failure:
    """A trial with a bad verdict."""

    trial: Trial
    observation: Observation
    verdict: Verdict
    drawn: Drawn | None = None
    """How Hypothesis drew the case, where it did."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Smaller is simpler: ranks, mesh dims, elements."""
        elements = sum(tensor.numel() for tensor in tensor_arguments(self.trial.case.args, self.trial.case.kwargs))
        return self.trial.mesh.world_size, self.trial.mesh.ndim, elements

    @property
    def costly(self) -> bool:
        """Running it again costs new processes."""
        return self.observation.fate in (Fate.HANG, Fate.DIED)


def dtype_class(case: OpCase) -> str:
    """Return ``float``, ``half``, ``complex``, ``integer`` or ``none``: the class of the first non-integer argument.

    >>> dtype_class(OpCase("op", "call", (torch.zeros(2, dtype=torch.bfloat16),)))
    'half'
    """
    tensors = tensor_arguments(case.args, case.kwargs)
    for tensor in tensors:
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return "half"
        if tensor.dtype.is_floating_point:
            return "float"
        if tensor.dtype.is_complex:
            return "complex"
    return "integer" if tensors else "none"


def first_report(observation: Observation) -> ProcessReport | None:
    """Return the report that says most: of a process that raised, else of the first one."""
    reports = [report for report in observation.reports if report is not None]
    raised = [report for report in reports if report.raised is not None]
    return next(iter(raised or reports), None)


_LOUD = (VerdictKind.CRASH, VerdictKind.HANG, VerdictKind.DIED)
_BEFORE = {Phase.GATHER: Phase.FORWARD, Phase.GATHER_GRADIENT: Phase.BACKWARD, Phase.INPUTS: Phase.FORWARD}


def rule_class(failure: Failure) -> str:
    """Return the op and the rules in use where it failed, by mesh dim: ``aten.embedding.default: S(0),MaskP(sum)``.

    The placements are those on which DTensor ran the op, after it had redistributed the arguments. A mesh dim on which
    everything is replicated is left out.
    """
    trial, verdict = failure.trial, failure.verdict
    report = first_report(failure.observation)
    phase = _BEFORE.get(verdict.phase, verdict.phase)
    executed = [e for e in report.executed if (e.phase, e.backward) == (phase, verdict.backward)] if report else []
    if executed:
        own = [e for e in executed if e.op == trial.case.op]  # a program runs other ops as well
        op, texts = (own or executed)[-1].op, (own or executed)[-1].placements
    else:
        if made := targets(trial.case):
            if not all(is_shard_order(placements, trial.mesh.shape) for placements in (*trial.combination, *made)):
                return f"{trial.case.op}: strided shards in no shard order"
            return f"{trial.case.op}: {_kinds(trial.combination)} -> {_kinds(made)}"
        op, texts = trial.case.op, tuple(format_placements(placements) for placements in trial.combination)
        texts += (cotangent_text(failure),) if verdict.backward is not None else ()
    columns = set(zip(*(split_placements(text) for text in texts), strict=False))
    used = sorted(",".join(column) for column in columns if set(column) != {"R"})
    return f"{op}: {' x '.join(used) or 'R'}"


def _kinds(places: Sequence[Placements]) -> str:
    """Return the kinds of placements that occur, without their dims: ``P(sum),S``; S+S where two cut one tensor dim."""
    kinds = set()
    for placements in places:
        cuts = Counter(dim for dim in map(sharded_dim, placements) if dim is not None)
        kinds |= {"S+S"} if max(cuts.values(), default=0) > 1 else set()
        for placement in placements:
            kind = "S" if isinstance(placement, Shard) else "_S" if sharded_dim(placement) is not None else None
            kinds.add(kind or str(placement))
    return ",".join(sorted(kinds - {"R"})) or "R"


def group_key(failure: Failure) -> str:
    """Return what failures of one group have in common, all of it structure.

    A wrong value is the same defect wherever it is noticed first and however the op was called. Of crashes there are
    many kinds, so the phase, the type of the exception and the function that raised it tell them apart.
    """
    trial = failure.trial
    parts = [*symptom(failure)]
    if is_of_any_op(failure):
        return " | ".join([f"any {_style(trial.case)} op", *parts, f"{trial.mesh.ndim}-d mesh"])
    if failure.verdict.kind not in _LOUD:
        parts.append(dtype_class(trial.case))
    flags = ",".join(sorted(case_flags(trial.case))) or "no flags"
    return " | ".join([trial.case.op, *parts, rule_class(failure), f"{trial.mesh.ndim}-d mesh", flags])


_FOR_ANY_OP = (
    "_collective_utils.py",
    "_dispatch.py",
    "_op_schema.py",
    "_redistribute.py",
    "_sharding_prop.py",
    "single_dim_strategy.py",
)


def is_of_any_op(failure: Failure) -> bool:
    """Return whether an exception came from code of DTensor's that every op goes through: it is no op's own defect."""
    if failure.verdict.kind is not VerdictKind.CRASH:
        return False
    report = first_report(failure.observation)
    error = report.raised if report is not None else None
    return error is not None and error.where.rpartition("(")[2].rstrip(")") in _FOR_ANY_OP


def _style(case: OpCase) -> str:
    if not written_arguments(case):
        return "functional"
    return "out=" if "out" in case.kwargs or case.op.endswith(("out", "grad_input")) else "in-place"


def symptom(failure: Failure) -> tuple[str, ...]:
    """Return how the failure shows, which minimising must not change: the verdict and where it arose."""
    verdict = failure.verdict
    if verdict.kind in _LOUD:
        report = first_report(failure.observation)
        error = report.raised if report is not None else None
        return verdict.kind, verdict.phase, f"{error.type} in {error.where}" if error is not None else ""
    subject = re.sub(r" \d+$", "", verdict.subject.removeprefix("gathered "))
    return verdict.kind, _BEFORE.get(verdict.phase, verdict.phase), subject


def case_flags(case: OpCase) -> set[str]:
    """Return the names of the options that the call sets: keyword numbers and texts, and whatever is True.

    >>> sorted(case_flags(OpCase("op", "torch.nn.functional.embedding", (), {"padding_idx": 3, "sparse": False})))
    ['padding_idx']
    """
    names = parameter_names(case.call)
    flags = {name for name, value in zip(names, case.args, strict=False) if value is True}
    scalars = {name: value for name, value in case.kwargs.items() if isinstance(value, bool | int | float | str)}
    return flags | {name for name, value in scalars.items() if value is not False}


@dataclass
class Group:
    """Failures that look alike, the smallest of them kept."""

    key: str
    smallest: Failure
    occurrences: int = 1
    seen: dict[str, None] = field(default_factory=dict)
    """The combinations in which it occurred, as text (the first dozen)."""

    def add(self, failure: Failure) -> None:
        self.occurrences += 1
        if failure.size < self.smallest.size:
            self.smallest = failure


class Collector:
    """Sorts failures into groups as they come."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}

    def add(self, failure: Failure) -> Group:
        key = group_key(failure)
        if key in self.groups:
            self.groups[key].add(failure)
        else:
            self.groups[key] = Group(key, failure)
        group = self.groups[key]
        if len(group.seen) < 12:
            rows = combination_rows(failure.trial.case, failure.trial.combination)
            whose = f"{failure.trial.case.op} on " if is_of_any_op(failure) else ""
            group.seen[f"{whose}{failure.trial.mesh}: " + ", ".join(f"{n}={p}" for n, p in rows)] = None
        return group


def fingerprint(failure: Failure) -> str:
    """Return twelve hex digits made of the structure of a minimised failure: never of values, shapes or messages."""
    return hashlib.sha256(group_key(failure).encode()).hexdigest()[:12]


def cotangent_text(failure: Failure) -> str:
    """Return the placements of the cotangent in the backward pass that failed; empty for the forward call."""
    if failure.verdict.backward is None:
        return ""
    cotangents = failure.trial.cotangents[failure.verdict.backward]
    return ", ".join(format_placements(placements) for placements in cotangents)


def describe_call(case: OpCase, rows: Sequence[tuple[str, str]]) -> str:
    """Return the call on one line: ``weight=f64[17, 4] S(0), indices=i64[5] R, padding_idx=3``."""
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b"}
    texts = []
    for (name, placements), tensor in zip(rows, tensor_arguments(case.args, case.kwargs), strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        letters = dtype.rstrip("0123456789")
        texts.append(f"{name}={short.get(letters, letters)}{dtype[len(letters) :]}{list(tensor.shape)} {placements}")
    texts += [f"{k}={v!r}" for k, v in case.kwargs.items() if isinstance(v, bool | int | float | str)]
    texts += [repr(v) for v in case.args if isinstance(v, bool | int | float | str)]
    return ", ".join(texts)


# ---------------------------------------------------------------------------------------------------------- minimising
@dataclass
class Minimiser:
    """Makes failures small: fewer ranks, fewer sharded arguments, then the smallest case that Hypothesis finds.

    Parameters
    ----------
    run
        Runs one trial.
    generate
        Returns a generator of cases for a mesh; None where drawing afresh finds nothing smaller than the case itself.
    seed
        Of the campaign.
    until
        ``time.monotonic()`` after which to stop with the best so far.
    """

    run: Runner
    generate: Callable[[MeshSpec], SearchStrategy[OpCase]] | None
    seed: int
    until: float
    restarts: int = 4
    """How many attempts may bring the ranks down, since each costs a restart; counts down."""

    def minimise(self, failure: Failure, is_known: Callable[[Failure], bool]) -> tuple[Failure, bool]:
        """Return the smallest failure of the same kind, and whether there was time to look for one.

        As soon as ``is_known`` holds of what it has become, nothing more is tried.
        """
        best = self._simpler(self._fewer_cotangents(failure))
        if is_known(best):
            return best, True
        if failure.costly:  # Hypothesis would need new processes for each of its attempts
            return best, False
        for mesh, kept in _smaller_meshes(best.trial):
            projected = _project(best.trial, mesh, kept)
            found = self._shrink(projected, best, failure.drawn, 60)
            if found is None and targets(best.trial.case):  # its targets fit this mesh, whatever else would be drawn
                found = self.attempt(projected, best)
            if found is not None:
                best = found
                break
        else:
            found = self._shrink(best.trial, best, failure.drawn, 200) if self.generate is not None else best
        if found is None or found.size > best.size:
            return best, False
        return self._simpler(found), time.monotonic() < self.until

    def attempt(self, trial: Trial, like: Failure) -> Failure | None:
        """Return the failure if ``trial`` fails in the same way as ``like``, else None."""
        if self.restarts <= 0:
            return None
        reference: Reference = make_reference(trial.case)
        observation = self.run(trial)
        self.restarts -= observation.fate in (Fate.HANG, Fate.DIED)
        found = Failure(trial, observation, judge(observation, reference))
        return found if found.verdict.kind.bad and symptom(found) == symptom(like) else None

    def _fewer_cotangents(self, failure: Failure) -> Failure:
        if len(failure.trial.cotangents) < 2:
            return failure
        index = failure.verdict.backward
        kept = () if index is None else (failure.trial.cotangents[index],)
        # the seed of a backward pass counts from the trial's, so that dropping passes keeps its cotangent
        trial = replace(failure.trial, cotangents=kept, seed=failure.trial.seed + (index or 0))
        return self.attempt(trial, failure) or failure

    def _simpler(self, failure: Failure) -> Failure:
        progress = True
        while progress and time.monotonic() < self.until:
            progress = False
            simpler = (_plainer_cases, _simpler_combinations, _simpler_cotangents)
            for trial in (variant for variants in simpler for variant in variants(failure.trial)):
                found = self.attempt(trial, failure)
                if found is not None:
                    failure, progress = found, True
                    break
        return failure

    def _shrink(self, template: Trial, like: Failure, drawn: Drawn | None, examples: int) -> Failure | None:
        """Return the failure that Hypothesis shrinks to under the mesh and combination of ``template``."""
        if self.generate is None:
            return self.attempt(template, like)
        ndims = [tensor.ndim for tensor in tensor_arguments(template.case.args, template.case.kwargs)]

        def fails(case: OpCase) -> bool:
            if time.monotonic() > self.until or case.call != template.case.call or case.op != template.case.op:
                return False
            tensors = tensor_arguments(case.args, case.kwargs)
            if len(tensors) != len(ndims) or not _fits(template, case):
                return False
            return self.attempt(replace(template, case=case), like) is not None

        generator = self.generate(template.mesh)
        case = shrink(generator, fails, None if drawn is None else drawn.choices, examples, self.seed)
        return None if case is None else self.attempt(replace(template, case=case), like)


def _fits(template: Trial, case: OpCase) -> bool:
    """Return whether the template's placements can be used for the tensors of ``case``."""
    for tensor, placements in zip(tensor_arguments(case.args, case.kwargs), template.combination, strict=True):
        if not all(Alphabet.admits(placement, tensor.ndim, tensor.dtype) for placement in placements):
            return False
    if template.cotangents:
        reference = make_reference(case)
        outputs = [reference.outputs[i] for i in reference.differentiable]
        for cotangents in template.cotangents:
            if len(cotangents) != len(outputs):
                return False
            for output, placements in zip(outputs, cotangents, strict=True):
                if not all(Alphabet.admits(placement, output.ndim, output.dtype) for placement in placements):
                    return False
    return True


def _smaller_meshes(trial: Trial) -> list[tuple[MeshSpec, tuple[int, ...]]]:
    """Return simpler meshes to try, simplest first, each with the mesh dims that it keeps."""
    mesh = trial.mesh
    options: list[tuple[MeshSpec, tuple[int, ...]]] = []
    for mesh_dim in range(mesh.ndim):
        extents = {2, mesh.shape[mesh_dim]} - {1}
        options += [(replace(mesh, shape=(extent,)), (mesh_dim,)) for extent in extents]
    if mesh.ndim == 3:
        options += [(replace(mesh, shape=(2, 2)), kept) for kept in ((0, 1), (0, 2), (1, 2))]
    if mesh.ndim == 2:
        options.append((replace(mesh, shape=(2, 2)), (0, 1)))
    options = [option for option in options if option[0].world_size < mesh.world_size or option[0].ndim < mesh.ndim]
    return sorted(options, key=lambda option: (option[0].world_size, option[0].ndim, option[1]))


def _project(trial: Trial, mesh: MeshSpec, kept: tuple[int, ...]) -> Trial:
    combination = tuple(tuple(placements[d] for d in kept) for placements in trial.combination)
    cotangents = tuple(tuple(tuple(p[d] for d in kept) for p in one) for one in trial.cotangents)
    case = keep_mesh_dims(trial.case, kept)
    return replace(trial, case=case, mesh=mesh, combination=combination, cotangents=cotangents)


def _plainer_cases(trial: Trial) -> list[Trial]:
    """Return variants with one option fewer, and one with float64 for every other floating dtype."""
    case = trial.case
    plainer = []
    for name in sorted(case_flags(case) & set(case.kwargs)):
        kwargs = {key: value for key, value in case.kwargs.items() if key != name}
        plainer.append(replace(case, kwargs=kwargs))
    if any(tensor.dtype in _NARROW for tensor in tensor_arguments(case.args, case.kwargs)):
        args, kwargs = pytree.tree_map(_widened, (case.args, dict(case.kwargs)))
        plainer.append(replace(case, args=args, kwargs=kwargs))
    return [replace(trial, case=variant) for variant in plainer]


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def _widened(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype not in _NARROW:
        return leaf
    return leaf.detach().to(torch.float64).requires_grad_(leaf.requires_grad)


def _simpler_combinations(trial: Trial) -> list[Trial]:
    """Return variants in which one argument's placements are simpler, as far as its shape and dtype allow."""
    variants = []
    tensors = tensor_arguments(trial.case.args, trial.case.kwargs)
    for position, (tensor, placements) in enumerate(zip(tensors, trial.combination, strict=True)):
        for changed in simpler_placements(placements):
            if Alphabet.legal(changed) and all(Alphabet.admits(p, tensor.ndim, tensor.dtype) for p in changed):
                combination = (*trial.combination[:position], changed, *trial.combination[position + 1 :])
                variants.append(replace(trial, combination=combination))
    return variants


def _simpler_cotangents(trial: Trial) -> list[Trial]:
    """Return variants in which one cotangent is replicated, or sharded along an earlier tensor dim."""
    variants = []
    for number, one in enumerate(trial.cotangents):
        for position, placements in enumerate(one):
            for changed in simpler_placements(placements):
                cotangent = (*one[:position], changed, *one[position + 1 :])
                cotangents = (*trial.cotangents[:number], cotangent, *trial.cotangents[number + 1 :])
                variants.append(replace(trial, cotangents=cotangents))
    return variants


def confirm(failure: Failure, minimiser: Minimiser) -> tuple[Failure, str]:
    """Run ``failure`` once more on real processes; return it as it then is, and on what it was confirmed."""
    trial = failure.trial
    if trial.mesh.backend == "simulated":
        trial = replace(trial, mesh=replace(trial.mesh, backend="gloo"))
    minimiser.restarts += 1
    again = minimiser.attempt(trial, failure)
    if again is None:
        why = "real processes do not show it" if failure.trial.mesh != trial.mesh else "did not fail a second time"
        return failure, f"unconfirmed: {why}"
    ranks = trial.mesh.world_size
    return again, f"confirmed on {trial.mesh.backend}, {ranks} rank{'s' * (ranks != 1)}"
