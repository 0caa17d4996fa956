"""Placements: torch's private kinds, and types and constants for all kinds."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard

__all__ = [
    "PLAIN_PLACEMENTS",
    "Combination",
    "Placements",
    "masked_extent",
    "norm_order",
    "on_dim",
    "placement_text",
    "placements_of_spec",
    "special_placement",
    "strided_shard",
    "strides_of",
    "unmasked",
]

Placements = tuple[Placement, ...]
"""One placement per mesh dim."""
Combination = tuple[Placements, ...]
"""One :data:`Placements` per tensor argument, in the order in which a pytree walk of ``(args, kwargs)`` meets them."""
PLAIN_PLACEMENTS = frozenset((Partial, Replicate, Shard))
"""The classes of the placements that DTensor documents. They overload ``isinstance``, which takes ten times as long as
a look-up in this set: code that runs for every tensor asks here first."""


def placement_text(placements: Sequence[Placement]) -> str:
    """Return placements as text; a masked partial is ``MaskP(sum)``, whatever the shape of its table."""
    texts = [
        f"MaskP({p.reduce_op})" if type(p) not in PLAIN_PLACEMENTS and isinstance(p, _MaskPartial) else str(p)
        for p in placements
    ]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def on_dim(placement: Placement, tensor_dim: int) -> Placement:
    """Return the shard ``placement``, strided or not, with another tensor dim."""
    strides = strides_of(placement)
    return Shard(tensor_dim) if strides is None else strided_shard(tensor_dim, strides[1])


def placements_of_spec(spec: object) -> tuple[Placements | None, ...] | None:
    if spec is None:
        return None
    specs = spec if isinstance(spec, list | tuple) else (spec,)
    return tuple(None if one is None else tuple(one.placements) for one in specs)


def masked_extent(placement: Placement) -> int | None:
    """Return the size of the sharded tensor dim into which a masked partial's indices point; None for other kinds.

    It is 0 if a wrong rule names a dim that the tensor does not have.
    """
    if not isinstance(placement, _MaskPartial) or placement.offset_shape is None:
        return None
    ndim = len(placement.offset_shape)
    return int(placement.offset_shape[placement.offset_dim]) if -ndim <= placement.offset_dim < ndim else 0


def unmasked(placement: Placement) -> Placement:
    """Return what a rule asks of a tensor: nothing of one that is masked on the way."""
    return Replicate() if masked_extent(placement) is not None else placement


def strides_of(placement: Placement) -> tuple[int, int] | None:
    """Return ``(tensor dim, split factor)`` of a strided shard; None for any other placement."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement that splits tensor dim ``dim`` into ``split_factor`` pieces and shards each piece."""
    placement: Placement = _StridedShard(dim, split_factor=split_factor)
    return placement


def special_placement(text: str) -> Placement | None:
    """Return the strided shard or norm partial that DTensor prints as ``text``; None for anything else.

    >>> special_placement("_S(0, 2)"), special_placement("_NormP(2)")
    (_StridedShard(dim=0, sf=2), _NormPartial(2))
    """
    if match := re.fullmatch(r"_S\((\d+), (\d+)\)", text):
        return strided_shard(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"_NormP\((-?[\d.]+)\)", text):
        return _NormPartial(float(match[1]) if "." in match[1] else int(match[1]))
    return None


def norm_order(placement: Placement) -> float | None:
    """Return the p of a Partial whose local tensors are p-norms of parts of the vector; None for other placements."""
    return float(placement.norm_type) if isinstance(placement, _NormPartial) else None
