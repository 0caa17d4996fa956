"""Tells placements that hold only where each rank has elements of what is sharded from those that hold everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec
from verifier.deriving.learning.evidence import Blocks, CallEvidence, Inputs, Outputs, Place
from verifier.deriving.learning.held_out import Asked, HeldOut, emptying_meshes
from verifier.placements.bounds import leaves_a_rank_empty
from verifier.rules.options import CheckOptions

__all__ = ["told_apart"]

_MOST_WAYS = 8
"""So many placements of all results are asked for, of each placement of the slots."""


def told_apart(call: CallEvidence, sample: HeldOut, options: CheckOptions) -> tuple[CallEvidence, dict[Inputs, Blocks]]:
    """Return a call with what also holds where a rank has no elements, and what holds only where each rank has some.

    The latter has blocks of one element: where each rank has some, shards begin at multiples of one.
    """
    draws = [(size, each) for size, draw, each in sample.calls() if not draw]
    asked = [
        Asked(size, 0, mesh, inputs, placed, False)
        for inputs, outputs in call.holding.items()
        for size, each in draws
        for mesh in emptying_meshes(each, inputs)
        for placed in _ways(outputs)
    ]
    refuted = {(one.inputs, one.outputs): one for one in (sample.refuted(asked) if asked else ())}
    rules, blocks = dict(call.rules), {}
    shapes = dict(draws)
    for inputs in dict.fromkeys(one.inputs for one in asked):
        kept = [placed for placed in _ways(call.rules[inputs]) if (inputs, placed) not in refuted]
        rules[inputs] = tuple(map(frozenset, zip(*kept, strict=True)))
        failed = [_place(shapes[one.size], inputs, one.mesh) for one in refuted.values() if one.inputs == inputs]
        if not kept and (found := _in_ones(call.rules[inputs], inputs, [*shapes.values()], failed, options)):
            blocks[inputs] = found
    return replace(call, rules=rules), blocks


def _ways(outputs: Outputs) -> Iterator[Inputs]:
    likely = [sorted(some, key=_rank) for some in outputs]
    return itertools.islice(itertools.product(*likely), _MOST_WAYS)


def _rank(placement: Placement) -> tuple[bool, bool, str]:
    return not placement.is_replicate(), not isinstance(placement, Shard), str(placement)


def _place(call: CallEvidence, inputs: Inputs, mesh: MeshSpec) -> Place:
    extents = tuple(shape[p.dim] if isinstance(p, Shard) else 0 for p, shape in zip(inputs, call.shapes, strict=True))
    return extents, mesh.world_size


def _in_ones(
    outputs: Outputs, inputs: Inputs, calls: Sequence[CallEvidence], failed: Sequence[Place], options: CheckOptions
) -> Blocks | None:
    """Return the rule of the first slot that is empty on a rank wherever the rule fails; None if there is none."""
    tried = {_place(call, inputs, mesh): None for call in calls for mesh in options.flat}
    held = tuple(
        (extents, ranks)
        for extents, ranks in tried
        if not any(extent and leaves_a_rank_empty(extent, ranks) for extent in extents)
    )
    for slot, placement in enumerate(inputs):
        if isinstance(placement, Shard) and all(leaves_a_rank_empty(extents[slot], ranks) for extents, ranks in failed):
            return Blocks(outputs, slot, 1, held, tuple(dict.fromkeys(failed)))
    return None
