"""Facts that distinguish the findings of these kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import inf
from typing import Any

import torch

from strategies.sharded_tensor.programs import BAG, EMBEDDING, TRAINED
from verifier.core.case import OpCase
from verifier.programs import tell_apart_by

__all__ = ["hazards"]


def hazards(weight: torch.Tensor, ids: torch.Tensor, kwargs: Mapping[str, Any]) -> set[str]:
    """Return the tags of a call that follow from its values and hint at defects."""
    rows, padding_idx, offsets = weight.shape[0], kwargs.get("padding_idx"), kwargs.get("offsets")
    padding = None if padding_idx is None or not -rows <= padding_idx < rows else padding_idx % rows
    bags: list[list[int]] = []
    if offsets is not None:
        edges = [*offsets, *([] if kwargs.get("include_last_offset") else [len(ids)])]
        bags = [ids[start:stop].tolist() for start, stop in pairwise(edges)]
    elif ids.ndim > 1:
        bags = ids.flatten(end_dim=-2).tolist()
    largest = {torch.bfloat16: 256, torch.float16: 2048}.get(weight.dtype, rows)
    found = {
        "all-padding bag": any(bag and set(bag) == {padding} for bag in bags),
        "empty bag": any(not bag for bag in bags),
        "more bags than ids": offsets is not None and len(bags) > len(ids),
        "ids that the dtype rounds": "per_sample_weights" in kwargs and bool((ids > largest).any()),
    }
    return {tag for tag, holds in found.items() if holds}


def _facts(case: OpCase) -> Iterator[str]:
    """Yield facts besides the names of options that distinguish defects of these kernels.

    Only possible causes are yielded: why the local op refuses a call; more bags than ids, which lose their offsets;
    sample weights if their dtype or gradient matters; empty bags under mean or max. Unequal batches always kill ranks,
    so they exclude the other facts.
    """
    if "unequal_batches" in case.op:
        return
    weight, ids, *_ = case.args
    assert isinstance(weight, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    rows, mode, samples = weight.shape[0], case.kwargs.get("mode"), case.kwargs.get("per_sample_weights")
    if mode is not None:
        yield f"mode={mode}"
    if case.kwargs.get("norm_type") == inf:
        yield "norm_type=inf"
    pools = mode in ("mean", "max")
    if samples is not None and pools:
        yield "per_sample_weights"
        return
    padding_idx = case.kwargs.get("padding_idx")
    if isinstance(padding_idx, int):
        if not -rows <= padding_idx < rows:
            return
        if padding_idx < 0:
            yield "padding_idx<0"
    found = hazards(weight, ids, case.kwargs)
    if "more bags than ids" in found:
        yield "more bags than ids"
        return
    offsets = case.kwargs.get("offsets") is not None
    if offsets:
        yield "offsets"
    learnt = isinstance(samples, torch.Tensor) and samples.requires_grad and offsets
    if learnt or "ids that the dtype rounds" in found:
        yield "per_sample_weights"
    yield from found if pools else found - {"all-padding bag", "empty bag"}


for _call in (EMBEDDING, BAG, TRAINED):
    tell_apart_by(_call, _facts)
