"""Decides which failures are one finding."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch.distributed.tensor import Shard

from verifier.core.arguments import combination_rows, tensor_arguments
from verifier.core.case import OpCase
from verifier.core.observation import DifferenceKind, Executed, Fate, Observation
from verifier.core.ops import is_view, parameter_names, resolve, written_arguments
from verifier.core.placement_text import format_placements
from verifier.core.verdict import LOUD, Phase, VerdictKind
from verifier.findings.failures import Failure, first_error, first_report
from verifier.findings.keys import BY_HASH_SEED, Anywhere, ByMeshDim, Change, GroupKey, RuleClass, Symptom
from verifier.placements.algebra import is_shard_order, sharded_dim
from verifier.programs import facts_of, is_composed, targets
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.placements import Placements
from verifier.torch_internals.registries import has_own_handler

__all__ = [
    "ZEROS_OF_AUTOGRAD",
    "Collector",
    "Group",
    "case_flags",
    "dtype_class",
    "fingerprint",
    "is_of_several_ranks",
    "shows_on_some_ranks",
    "symptom",
    "unlike",
    "unlike_rules",
]


ZEROS_OF_AUTOGRAD = GroupKey("any op", Symptom(VerdictKind.WRONG_GRADIENT, Phase.BACKWARD, "a plain tensor of zeros"))
"""The group of gradients that autograd makes from the sizes of a tensor alone, as plain tensors: of no rule."""


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


_BEFORE = {Phase.GATHER: Phase.FORWARD, Phase.GATHER_GRADIENT: Phase.BACKWARD, Phase.INPUTS: Phase.FORWARD}


# --------------------------------------------------------------------------------------------------------------- rules
def rule_class(failure: Failure) -> RuleClass:
    """Return the op and the rules that it failed under, by mesh dim: ``aten.embedding.default: S(0),MaskP(sum)``.

    The placements are those on which DTensor ran the op, after it had redistributed the arguments.
    """
    found = next(found for applies, found in _RULE_CLASSES if applies(failure))
    return RuleClass(failure.trial.case.op, found) if isinstance(found, Anywhere) else found(failure)


def _runs_own_code(failure: Failure) -> bool:
    """Return whether the forward call failed, and DTensor has its own code without rules for the op."""
    call = resolve(failure.trial.case.call)
    return failure.verdict.backward is None and isinstance(call, OpOverload) and has_own_handler(call)


def _executed(failure: Failure) -> list[Executed]:
    """Return the ops that DTensor ran on redistributed arguments in the failed phase; only the case's op if it ran."""
    verdict, report = failure.verdict, first_report(failure.observation)
    if report is None or verdict.kind is VerdictKind.DIED:  # how far the others came depends on timing
        return []
    phase = _BEFORE.get(verdict.phase, verdict.phase)
    executed = [e for e in report.executed if (e.phase, e.backward) == (phase, verdict.backward)]
    return [e for e in executed if e.op == failure.trial.case.op] or executed


def _at_executed(failure: Failure) -> RuleClass:
    last = _executed(failure)[-1]
    return RuleClass(last.op, ByMeshDim.of(last.placements))


def _at_given(failure: Failure) -> RuleClass:
    backward = failure.verdict.backward
    given = (*failure.trial.combination, *(() if backward is None else failure.trial.cotangents[backward]))
    return RuleClass(failure.trial.case.op, ByMeshDim.of(map(format_placements, given)))


def _redistributed(failure: Failure) -> RuleClass:
    trial, asked = failure.trial, targets(failure.trial.case)
    given = trial.combination
    if not all(is_shard_order(placements, trial.mesh.shape) for placements in (*given, *asked)):
        return RuleClass(trial.case.op, Anywhere.NO_SHARD_ORDER)
    reduced = sorted({str(p) for placements in given for p in placements if p.is_partial()})
    if reduced and len(asked) == 1:  # the shards on other mesh dims do not matter to a reduction
        return RuleClass(trial.case.op, Change(tuple(reduced), _kinds(asked, nested=False)))
    return RuleClass(trial.case.op, Change(_kinds(given), _kinds(asked)))


def _kinds(places: Sequence[Placements], nested: bool = True) -> tuple[str, ...]:
    """Return the kinds of placements that occur, without their tensor dims: ``("P(sum)", "S")``.

    S+S stands for two mesh dims that shard one tensor dim. Unless ``nested``, every shard is an S.
    """
    kinds = set()
    for placements in places:
        cuts = Counter(dim for dim in map(sharded_dim, placements) if dim is not None)
        kinds |= {"S+S"} if nested and max(cuts.values(), default=0) > 1 else set()
        for placement in placements:
            strided = nested and not isinstance(placement, Shard)
            kind = None if sharded_dim(placement) is None else "_S" if strided else "S"
            kinds.add(kind or str(placement))
    return tuple(sorted(kinds - {"R"})) or ("R",)


_RULE_CLASSES: tuple[tuple[Callable[[Failure], object], Anywhere | Callable[[Failure], RuleClass]], ...] = (
    (_runs_own_code, Anywhere.OWN_CODE),
    (lambda failure: failure.verdict.kind is VerdictKind.RANKS_DISAGREE, Anywhere.OWN_RULES),
    (_executed, _at_executed),
    (lambda failure: targets(failure.trial.case), _redistributed),
    (lambda _: True, _at_given),
)
"""A condition on failures, and the rule class under it; the first condition that holds counts."""


# ---------------------------------------------------------------------------------------------------------------- keys
def group_key(failure: Failure) -> str:
    """Return the structure that failures of one group share, as text."""
    return str(structure(failure))


def structure(failure: Failure) -> GroupKey:
    """Return the structure that failures of one group share.

    A wrong value is the same defect in whatever phase it is noticed and however the op was called. Crashes are
    distinguished by the phase, the type of the exception and the function that raised it.
    """
    case, mesh_dims, flat = failure.trial.case, failure.trial.mesh.ndim, failure.trial.mesh.flat
    if failure.by_hash_seed:
        return GroupKey(case.op, BY_HASH_SEED, mesh_dims=mesh_dims, flat=flat)
    if is_plain_zeros(failure):
        return ZEROS_OF_AUTOGRAD
    if is_of_any_op(failure):
        return GroupKey(f"any {_style(case)} op", symptom(failure), mesh_dims=mesh_dims, flat=flat)
    return GroupKey(
        case.op,
        symptom(failure),
        (rule_class(failure),),
        mesh_dims,
        dtype=None if failure.verdict.kind in LOUD else dtype_class(case),
        # a program has its own defect if none of its calls fails alone
        program=case.call.rpartition(".")[2] if is_composed(case) else None,
        flags=case_flags(case) | facts_of(case),
        flat=flat,
    )


_FOR_ANY_OP = (
    "_collective_utils.py",
    "_dispatch.py",
    "_op_schema.py",
    "_redistribute.py",
    "_sharding_prop.py",
    "single_dim_strategy.py",
)
_FOR_VIEWS = "_view_ops.py"


def is_of_any_op(failure: Failure) -> bool:
    """Return whether DTensor's code for all ops raised the exception, so that the op is not to blame.

    The rules for views count as such code if the op is no view: autograd expands and reshapes in many backward passes.
    """
    if failure.verdict.kind is not VerdictKind.CRASH:
        return False
    error = first_error(failure.observation)
    file = "" if error is None else error.file
    return file in _FOR_ANY_OP or (file == _FOR_VIEWS and not is_view(failure.trial.case))


def is_plain_zeros(failure: Failure) -> bool:
    """Return whether nothing is wrong but that a gradient of zeros is no DTensor, which no rule has made."""
    found = [one.kind for report in failure.observation.reports if report is not None for one in report.differences]
    return failure.verdict.kind is VerdictKind.WRONG_GRADIENT and set(found) == {DifferenceKind.PLAIN_ZEROS}


def is_of_several_ranks(failure: Failure) -> bool:
    """Return whether ranks behaved differently.

    They disagree, hang or die; or some raised and others did not; or some ran an op on other placements.
    """
    return shows_on_some_ranks(failure) or bool(unlike_rules(failure.observation))


def shows_on_some_ranks(failure: Failure) -> bool:
    """Return whether the verdict itself says that ranks behaved differently."""
    if failure.verdict.kind in (VerdictKind.RANKS_DISAGREE, VerdictKind.HANG, VerdictKind.DIED):
        return True
    raised = [report is not None and report.raised is not None for report in failure.observation.reports]
    return failure.verdict.kind is VerdictKind.CRASH and any(raised) and not all(raised)


def unlike_rules(observation: Observation) -> str:
    """Return the placements on which ranks ran the first op for which they chose different rules; empty if none.

    Only completed trials count. In any other, how far ranks came depends on timing.
    """
    reports = [report for report in observation.reports if report is not None]
    if observation.fate is not Fate.COMPLETED or any(report.raised is not None for report in reports):
        return ""
    for at_once in zip_longest(*(report.executed for report in reports)):
        if len(set(at_once)) > 1:
            ranks: dict[str, list[int]] = {}
            for report, one in zip(reports, at_once, strict=True):
                ran = f"{one.op} on ({', '.join(one.placements)})" if one else "nothing more after redistributing"
                ranks.setdefault(ran, []).extend(report.ranks)
            return "; ".join(f"rank{'s' * (len(by) > 1)} {', '.join(map(str, by))}: {ran}" for ran, by in ranks.items())
    return ""


def _style(case: OpCase) -> str:
    """Return ``functional``, ``in-place`` or ``out=``: how the op writes to its arguments."""
    if not written_arguments(case):
        return "functional"
    schema = resolve(case.call)._schema  # type: ignore[attr-defined]
    written = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return "out=" if any(one.kwarg_only for one in written) else "in-place"


def symptom(failure: Failure) -> Symptom:
    """Return the symptom of the failure, which minimising must not change: the verdict and where it arose.

    Which error ranks that choose differently show depends on timing, so it is not part of the symptom.
    """
    verdict = failure.verdict
    if failure.by_hash_seed and is_of_several_ranks(failure):
        return BY_HASH_SEED
    if verdict.kind is VerdictKind.DIED:  # how far the others came, and what they raised, depends on timing
        return Symptom(verdict.kind)
    if verdict.kind in LOUD:
        error = first_error(failure.observation)
        return Symptom(verdict.kind, verdict.phase, f"{error.type} in {error.where}" if error is not None else "")
    if is_plain_zeros(failure):
        return ZEROS_OF_AUTOGRAD.symptom
    return Symptom(verdict.kind, _BEFORE.get(verdict.phase, verdict.phase), re.sub(r" \d+$", "", verdict.subject))


def case_flags(case: OpCase) -> frozenset[str]:
    """Return the names of the options that the call sets: keywords that are numbers or texts, and all that are True.

    >>> sorted(case_flags(OpCase("op", "torch.nn.functional.embedding", (), {"padding_idx": 3, "sparse": False})))
    ['padding_idx']
    """
    if is_composed(case):  # a program passes by name what the op takes by position
        return frozenset(name for name, value in case.kwargs.items() if value is True)
    names = parameter_names(case.call)
    flags = frozenset(name for name, value in zip(names, case.args, strict=False) if value is True)
    scalars = {name: value for name, value in case.kwargs.items() if isinstance(value, bool | int | float | str)}
    return flags | {name for name, value in scalars.items() if value is not False}


_MOST_SEEN = 12
_MOST_SEEN_OF_OWN_CODE = 48
"""All failures of an op that runs by code of its own are one group. A remedy may mend that code for some calls only."""


def _told_apart(failure: Failure) -> str:
    """Return the class of a call that ran by code of DTensor's own, as text: its tags, and the first placements."""
    return f"{failure.trial.mesh} {sorted(failure.trial.case.tags)} {failure.trial.combination[:1]}"


@dataclass
class Group:
    """Failures with one key."""

    key: str
    smallest: Failure
    occurrences: int = 1
    seen: dict[str, None] = field(default_factory=dict)
    """The first twelve combinations in which the failure occurred, as text."""
    unexplained: dict[str, Failure] = field(default_factory=dict)
    """Failures for which no cause has been looked for yet: the first of each of up to twelve combinations, or of more
    classes of call if the op runs by code of DTensor's own."""

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
        most = _MOST_SEEN_OF_OWN_CODE if (own_code := _runs_own_code(failure)) else _MOST_SEEN
        if len(group.seen) < _MOST_SEEN or len(group.unexplained) < most:
            rows = combination_rows(failure.trial.case, failure.trial.combination)
            whose = f"{failure.trial.case.op} on " if is_of_any_op(failure) else ""
            where = f"{whose}{failure.trial.mesh}: " + ", ".join(f"{n}={p}" for n, p in rows)
            if len(group.seen) < _MOST_SEEN:
                group.seen[where] = None
            if len(group.unexplained) < most:
                group.unexplained.setdefault(_told_apart(failure) if own_code else where, failure)
        return group


def fingerprint(failure: Failure) -> str:
    """Return twelve hex digits: a hash of a minimised failure's structure, without values, shapes or messages."""
    return structure(failure).fingerprint


def unlike(name: str) -> str:
    """Return the fingerprint of a finding that looks like the known cause ``name``, whose remedy does not mend it.

    The baseline may know that one as a cause, too; see :func:`verifier.findings.attribution.unmended`.
    """
    return hashlib.sha256(f"{name} is not mended".encode()).hexdigest()[:12]
