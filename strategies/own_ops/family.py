"""The family "own": calls of ops of the user's own, for the check on meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from hypothesis.strategies import SearchStrategy

from strategies.opinfo.calls.gradients import requiring
from strategies.opinfo.family import determined_cases
from strategies.own_ops.names import own_ops_named
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.errors import SamplesError
from verifier.core.verdict import Verdict
from verifier.placements.alphabet import Alphabet
from verifier.planning.families import DrawContext
from verifier.planning.own_samples import overload_named
from verifier.rules.samples import Sample, SampleOptions
from verifier.torch_internals.ops import has_gradient_formula

__all__ = ["FAMILY", "OwnFamily"]


@dataclass(frozen=True)
class OwnFamily:
    """Ops that the user's imports define, or of which they declare samples. The calls are those of the rule check."""

    name: str = "own"
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    broad: bool = True
    shrinks: bool = False

    def select(self, pattern: str) -> tuple[str, ...]:
        """Return the user's ops that match a glob, in order; only those of which calls can be made."""
        from strategies.own_ops.source import SOURCE  # loads OpInfo, which a run of other families does not need

        if not own_ops_named(pattern):
            return ()
        try:
            return tuple(target.name for target in SOURCE.select([pattern]))
        except SamplesError:
            raise
        except ValueError:
            return ()

    def covers(self, selected: tuple[str, ...], op: str) -> bool:
        """Return whether the overload ``op`` is selected."""
        return op in selected

    def left_out(self, context: DrawContext) -> Iterator[tuple[str, str]]:
        """Yield the ops whose arguments do not determine their results, or whose gradients are not tried, and why."""
        for name in context.ops:
            for sample in _samples(name, self._dtypes(context)[0]):
                if sample.not_testable:
                    yield name, sample.not_testable
            if not has_gradient_formula(overload_named(name)):
                yield name, _NO_FORMULA

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of calls of the ops in ``context``; all overloads are equally likely."""
        by_overload: dict[tuple[str, torch.dtype], list[Sample]] = {}
        for name in context.ops:
            for dtype in self._dtypes(context):
                found = [sample for sample in _samples(name, dtype) if not sample.not_testable]
                if found:
                    by_overload[name, dtype] = found
        return determined_cases(by_overload, context.mesh).map(_without_lost_gradients)

    def alphabet(self, case: OpCase, mesh: MeshSpec) -> Alphabet:
        """Return the usual placements."""
        return Alphabet()

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return no guess."""
        return ""

    def _dtypes(self, context: DrawContext) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype in context.dtypes if dtype in self.dtypes) or self.dtypes[:1]


FAMILY = OwnFamily()

_NO_FORMULA = (
    "gradients: it has no gradient formula, so that they are lost on DTensors under any strategy; give it one "
    "(torch.library.register_autograd)"
)


def _without_lost_gradients(case: OpCase) -> OpCase:
    """Return the call without gradients if only the kernel of the op knows them, into which DTensor does not look."""
    return case if has_gradient_formula(overload_named(case.op)) else requiring(case, ())


@lru_cache(maxsize=8)
def _samples(name: str, dtype: torch.dtype) -> tuple[Sample, ...]:
    """Return the samples of an op, in order."""
    from strategies.own_ops.source import own_samples  # loads OpInfo

    return tuple(own_samples(name, SampleOptions(dtype)))
