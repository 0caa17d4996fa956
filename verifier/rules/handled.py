"""Ops for which DTensor has a handler, which runs in the op's place: level 1 runs it on ranks that are threads."""

from __future__ import annotations

from collections import Counter

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verifier.core.case import MeshSpec
from verifier.rules.execute import Cuts, LocalCall, Results
from verifier.torch_internals.dtensors import describe_dtensor, make_dtensor
from verifier.torch_internals.placements import Combination, Placements
from verifier.torch_internals.simulation import ThreadedRanks

__all__ = ["FOR_BACKWARD", "HandledCalls", "has_hung"]

_LIMIT = 10.0
"""Seconds for one call. A handler may wait for a message that no rank sends."""

FOR_BACKWARD = (
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    "aten.embedding_bag.default",
    "aten.embedding_bag.padding_idx",
)
"""Ops whose results after the first are for their backward alone, so that a handler may return others."""

_MOST_HANGS = 2
_hangs: Counter[object] = Counter()
"""How often ranks have waited in vain for each other in this process, by op."""


def has_hung(op: object) -> bool:
    """Return whether the handler of ``op`` has not come back so often in this process that it is not called again."""
    return _hangs[op] >= _MOST_HANGS


class HandledCalls:
    """Makes calls with DTensors, so that DTensor's handler for the op runs, on the ranks of ``mesh`` as threads."""

    def __init__(self, mesh: MeshSpec) -> None:
        self._ranks = ThreadedRanks(mesh.shape, _LIMIT)

    def run(
        self, call: LocalCall, cuts: Cuts, combination: Combination
    ) -> tuple[list[Results], tuple[Placements | None, ...]]:
        """Return what each rank holds after the call, and how DTensor places each tensor; None for a plain tensor.

        Whatever a rank raises comes out.
        """
        locals_ = [cuts.of(number, placements) for number, placements in enumerate(combination)]

        def on_rank(rank: int, mesh: DeviceMesh) -> tuple[Results, tuple[Placements | None, ...]]:
            given = [
                make_dtensor(local[rank], describe_dtensor(whole, mesh, placements))
                for local, whole, placements in zip(locals_, call.tensors, combination, strict=True)
            ]
            with torch.no_grad():
                made = call(given)
                placed = tuple(one.placements if isinstance(one, DTensor) else None for one in made.tensors)
                tensors = tuple(one.to_local() if isinstance(one, DTensor) else one for one in made.tensors)
            return Results(tensors, made.others, made.returned, made.written), placed

        try:
            answers = self._ranks.run(on_rank)
        except TimeoutError:
            _hangs[call.op] += 1
            raise
        results = [answer[0] for answer in answers]  # type: ignore[index]
        return results, answers[0][1]  # type: ignore[index]

    def close(self) -> None:
        self._ranks.close()
