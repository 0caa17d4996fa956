"""The family "opinfo": calls of any op with a rule, for the check on meshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.opinfo.calls.call import quiet
from strategies.opinfo.calls.gradients import differentiated
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.composing import COMPOSITIONS, INFERENCE, SECOND_CALL, WRITTEN_COPY, WRITTEN_VIEW, composed
from strategies.opinfo.random_ops import CHECKED, random_case
from strategies.opinfo.samples.informative import is_telling, more_telling
from strategies.opinfo.whole_calls import WholeCall, calls_in_inference_mode
from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.ops import written_arguments
from verifier.core.verdict import Verdict, VerdictKind
from verifier.oracle.reference import make_reference
from verifier.placements.alphabet import Alphabet
from verifier.planning.families import DrawContext
from verifier.programs import is_composed
from verifier.rules.execute import LocalCall
from verifier.rules.samples import Sample, SampleOptions, Target

if TYPE_CHECKING:
    from strategies.opinfo.source import OpInfoSource

__all__ = ["FAMILY", "OpInfoFamily", "determined_cases"]

_DRAWS = 16
"""Sets of values of each call at each size; the first sets have values of different kinds."""
_PROGRAMS = (False, True)
"""Every other call is drawn with a program around it, if there is a program."""
_LEFT_OUT = {"linalg_eig": "eigenvectors may change their sign with the last bit of the matrix: level 1 only"}
"""Bases of ops of which results on ranks say nothing, with the reason."""
_VARIANTS = 1024
"""Programs around each call."""


@dataclass(frozen=True)
class OpInfoFamily:
    """The aten calls that torch's OpInfo samples dispatch; an op is the name of an OpInfo or of an aten overload.

    The calls are the calls of the rule check. All gradients that torch has are computed.
    """

    name: str = "opinfo"
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    broad: bool = True
    shrinks: bool = False

    def load(self) -> None:
        """Load the OpInfos, and the modules that capture their calls."""
        _source().load()

    def select(self, pattern: str) -> tuple[str, ...]:
        """Return the ops that match a glob, in order."""
        try:
            return tuple(target.name for target in _source().select([pattern]))
        except ValueError:
            return ()

    def covers(self, selected: tuple[str, ...], op: str) -> bool:
        """Return whether the overload ``op`` is selected, or an OpInfo that tests it."""
        from strategies.opinfo.calls.op_names import home_rows  # loads OpInfo, as below

        return op in selected or not set(selected).isdisjoint(home_rows(op))

    def left_out(self, context: DrawContext) -> Iterator[tuple[str, str]]:
        """Yield overloads whose arguments do not determine their results, and the reason."""
        for name in context.ops:
            samples = _samples(name, self._dtypes(context)[0])
            if not samples and not calls_in_inference_mode(name, self._dtypes(context)[0]):
                yield name, "no call of it reaches a rule"
            yield from {
                (sample.op, sample.not_testable): None
                for sample in samples
                if sample.not_testable and sample.op not in CHECKED
            }
            yield from {(one.op, _LEFT_OUT[base_of(one.op)]): None for one in samples if base_of(one.op) in _LEFT_OUT}

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of calls of the ops in ``context``; all overloads are equally likely."""
        by_overload: dict[tuple[str, torch.dtype], list[Sample | WholeCall]] = {}
        random: dict[tuple[str, torch.dtype], None] = {}
        for name in context.ops:
            for dtype in self._dtypes(context):
                for sample in _samples(name, dtype):
                    if base_of(sample.op) in _LEFT_OUT:
                        continue
                    if not sample.not_testable:
                        by_overload.setdefault((sample.op, dtype), []).append(sample)
                    elif sample.op in CHECKED:
                        random[sample.op, dtype] = None
                for call in calls_in_inference_mode(name, dtype):
                    by_overload.setdefault((call.op, dtype), []).append(call)
        determined = determined_cases(by_overload, context.mesh)
        if not random:
            return determined
        choices = st.tuples(st.sampled_from(list(random)), st.integers(0, _VARIANTS - 1))
        checked = choices.map(lambda drawn: random_case(*drawn[0], drawn[1]))
        return checked if determined.is_empty else determined | checked

    def alphabet(self, case: OpCase, mesh: MeshSpec) -> Alphabet:
        """Return the usual placements."""
        return Alphabet()

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return a guess if the program suggests one, else an empty text."""
        if WRITTEN_VIEW in trial.case.tags and verdict.kind is VerdictKind.WRONG_VALUE:
            return "is the view one of a redistributed copy, so that the write is lost?"
        if SECOND_CALL in trial.case.tags and is_composed(trial.case):
            others: Any = trial.case.args[1]
            names = ", ".join(name for name, _ in others)
            return f"does DTensor take both calls for one, because the key of its cache leaves out {names}?"
        return ""

    def _dtypes(self, context: DrawContext) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype in context.dtypes if dtype in self.dtypes) or self.dtypes[:1]


FAMILY = OpInfoFamily()


def determined_cases(
    by_overload: Mapping[tuple[str, torch.dtype], Sequence[Sample | WholeCall]], mesh: MeshSpec
) -> SearchStrategy[OpCase]:
    """Return a generator of calls whose arguments determine their results, and of programs around such calls."""
    if not by_overload:
        return st.nothing()
    groups = sorted(by_overload.values(), key=lambda samples: samples[0].op.count("."))
    return (
        st.tuples(
            st.sampled_from(groups).flatmap(st.sampled_from),
            st.integers(0, SampleOptions().sizes - 1),
            st.integers(0, _DRAWS - 1),
            st.sampled_from(_PROGRAMS),
            st.integers(0, _VARIANTS - 1),
        )
        .map(lambda drawn: _drawn(*drawn, mesh))
        .filter(lambda case: case is not None)
        .map(_present)
    )


def _present(case: OpCase | None) -> OpCase:
    assert case is not None
    return case


def _drawn(
    sample: Sample | WholeCall, size: int, draw: int, with_program: bool, variant: int, mesh: MeshSpec
) -> OpCase | None:
    """Return a call, or a program around the call if ``with_program`` and there is a program."""
    with quiet():  # of a user's op without a gradient torch warns
        case = sample.draw(size, draw)
        if case is None or _is_for_level_1(case):
            return None
        if isinstance(sample, WholeCall):  # outside of inference mode autograd decomposes it
            return composed(case, INFERENCE, mesh, variant)
        nan = _has_nan(make_reference(case).outputs)
        if nan and not any(t.is_floating_point() or t.is_complex() for t in tensor_arguments(case.args, case.kwargs)):
            return None  # a Partial of integers outside the domain, of which no other values are drawn
        if variant % 2 or nan:  # infinite results have to agree, too
            case = more_telling(case)
        writes = bool(written_arguments(case))
        kinds = Random(variant).sample(list(COMPOSITIONS), len(COMPOSITIONS)) if with_program else []
        for kind in kinds:
            if (program := composed(case, kind, mesh, variant)) is not None:
                if writes and kind != WRITTEN_COPY:
                    return program
                wanting = differentiated(program)
                if wanting is not program or is_telling(program):  # a fill is informative only by its gradient
                    return wanting
        return case if writes else differentiated(case)  # a leaf that requires a gradient cannot be written to


def _is_for_level_1(case: OpCase) -> bool:
    """Return whether only local calls tell something of ``case``.

    torch's function for fake tensors of a grouped product takes bfloat16 only, which the kernel for CPUs does not ask
    for. And torch resizes an ``out`` that does not fit, which it has deprecated.
    """
    base = base_of(case.op)
    if base == "_grouped_mm":
        return any(tensor.dtype == torch.float32 for tensor in tensor_arguments(case.args, case.kwargs))
    if base != "index":
        return False
    call = LocalCall(case)
    made = call(call.tensors)
    written = zip(call.written, made.written, strict=True)
    return any(made.tensors[at].shape != call.tensors[number].shape for number, at in written)


def _has_nan(outputs: Sequence[torch.Tensor]) -> bool:
    return any(bool(output.isnan().any()) for output in outputs if output.is_floating_point() or output.is_complex())


@lru_cache(maxsize=1)
def _source() -> OpInfoSource:
    from strategies.opinfo.source import SOURCE  # loads OpInfo, which a run of other families does not need

    return SOURCE


@lru_cache(maxsize=8)
def _samples(name: str, dtype: torch.dtype) -> tuple[Sample, ...]:
    """Return the samples of an op, in order."""
    source = _source()
    targets: tuple[Target, ...] = source.select([name])
    options = SampleOptions(dtype)
    return tuple(sample for target in targets for sample in source.samples(target, options))
