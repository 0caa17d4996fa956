"""Lists of results: where all tensors of a list are placed alike, one stands for all, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verifier.core.ops import resolve
from verifier.deriving.learning.cuts import BlocksByCall
from verifier.deriving.learning.evidence import CallEvidence, Outputs

__all__ = ["as_one_result", "returns_list", "with_one_result"]


def returns_list(call: CallEvidence) -> bool:
    """Return whether an op returns a list of tensors, and nothing else."""
    returns = resolve(call.case.call)._schema.returns  # type: ignore[attr-defined]
    return len(returns) == 1 and "List" in str(returns[0].type)


def as_one_result(calls: Sequence[CallEvidence]) -> bool:
    """Return whether one result can stand for all: in calls with as many results each nothing may be lost by that."""
    counted = [call for call in calls if call.rules and not call.alike]
    if not counted or not all(map(returns_list, counted)):
        return False
    usual = [call for call in counted if not call.rare]
    if not all(len(set(_of_list(call))) == 1 for call in usual):
        return False
    differ = len({len(_of_list(call)) for call in usual}) > 1
    return differ or all(_common(call, outputs) for call in usual for outputs in call.holding.values())


def with_one_result(call: CallEvidence, blocks: BlocksByCall) -> tuple[CallEvidence, BlocksByCall]:
    """Return a call with one result that stands for all of its list, and what holds in blocks for that call."""
    of_list = _of_list(call)
    one = replace(
        call,
        results=(*of_list[:1], *call.results[len(of_list) :]),
        rules={inputs: _common(call, outputs) for inputs, outputs in call.rules.items()},
        alike=True,
    )
    return one, {
        id(one): {
            inputs: replace(some, outputs=common)
            for inputs, some in blocks.get(id(call), {}).items()
            if (common := _common(call, some.outputs))
        }
    }


def _of_list(call: CallEvidence) -> tuple[int, ...]:
    """Return the number of dims of each result, without those of gradients."""
    return call.results[: len(call.results) - len(call.gradients)]


def _common(call: CallEvidence, outputs: Outputs) -> Outputs:
    """Return the placements that all results may have, and those of the gradients; empty if there are none."""
    if not outputs:
        return ()
    count = len(outputs) - len(call.gradients)
    shared = frozenset.intersection(*outputs[:count]) if count else frozenset()
    return (shared, *outputs[count:]) if shared else ()
