"""Whether a strategy looks at the placements of its arguments, beyond what their redistribution would cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec
from torch.distributed.tensor._ops import utils

__all__ = ["WatchedSpec", "rules_unread"]

_PLACED = frozenset({"placements", "shard_order", "use_strided_shard_as_shard_order", "_hash", "__dict__"})
"""The attributes of a spec that tell how its tensor is placed; all else that tells it reads one of them."""

_readings: list[int] = []
"""How often placements were read, for each strategy that is running."""


class WatchedSpec(DTensorSpec):
    """A spec that notes when a strategy reads its placements."""

    def __getattribute__(self, name: str) -> Any:
        if _readings and name in _PLACED and not _changes_no_rule(sys._getframe(1)):
            _readings[-1] += 1
        return super().__getattribute__(name)


def _changes_no_rule(frame: FrameType | None) -> bool:
    """Return whether torch's own functions read the placements in ``frame``, and make the same rules of others.

    One weighs what a redistribution to each rule would cost. One expands rules for one mesh dim, and leaves some out
    where placements do not fit if the op is in place or has ``out=``, or the strategy allows uneven shards.
    """
    if frame is not None and frame.f_code is utils.expand_to_full_mesh_op_strategy.__code__:
        names = frame.f_locals
        return not (names["inplace_op"] or names.get("allow_uneven_sharding") or names["op_schema"].is_out_variant_op())
    weighing = utils.generate_redistribute_costs.__code__
    while frame is not None:
        if frame.f_code is weighing:
            return True
        frame = frame.f_back
    return False


def rules_unread(strategy: Callable[[OpSchema], object], schema: OpSchema) -> list[OpSpec] | None:
    """Return the rules that a strategy enumerates for a call, if it looks at no placements for that; else None.

    Whatever the strategy raises comes out.

    Parameters
    ----------
    schema
        The call, with a strategy of one :class:`WatchedSpec` for each tensor.
    """
    _readings.append(0)
    try:
        decided = strategy(schema)
    finally:
        read = _readings.pop()
    return None if read else list(getattr(decided, "strategies", []))
