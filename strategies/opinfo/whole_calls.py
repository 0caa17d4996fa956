"""Calls of composite ops for which DTensor has no rule. They reach DTensor whole, in inference mode alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from strategies.opinfo.calls.call import Call, quiet
from strategies.opinfo.calls.capture import entries_of, whole_calls
from strategies.opinfo.samples.fill_plans import why_not_testable
from verifier.core.case import OpCase

__all__ = ["WholeCall", "calls_in_inference_mode"]

_SAMPLES, _SEEDS = 8, 4


@dataclass(frozen=True)
class WholeCall:
    """A composite call of one of an OpInfo's samples, with other sizes and values at each draw."""

    op: str
    row: str
    entry: int
    number: int
    dtype: torch.dtype

    def draw(self, size: int, draw: int) -> OpCase | None:
        """Return the plain call at size number ``size``; None if the sample makes another call there."""
        call = _calls(self.row, self.entry, self.dtype, size, draw % _SEEDS).get(self.number)
        if call is None or str(call.op) != self.op:
            return None
        return OpCase(self.op, f"torch.ops.{self.op}", call.args, call.kwargs, "opinfo", exact=False)


@lru_cache(maxsize=64)
def _calls(row: str, place: int, dtype: torch.dtype, size: int, seed: int) -> dict[int, Call]:
    (entry,) = (entry for at, entry in entries_of(row) if at == place)
    return whole_calls(entry, dtype, size=size, seed=seed, most=_SAMPLES)


@lru_cache(maxsize=64)
def calls_in_inference_mode(row: str, dtype: torch.dtype) -> tuple[WholeCall, ...]:
    """Return the composite calls of the OpInfos called ``row`` whose arguments determine their results."""
    with quiet():
        return tuple(
            WholeCall(str(call.op), row, place, number, dtype)
            for place, _ in entries_of(row)
            for number, call in _calls(row, place, dtype, 0, 0).items()
            if not why_not_testable(call)
        )
