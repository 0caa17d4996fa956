"""Generators of chains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.chains.building import Building, UnfitError
from strategies.chains.composites import COMPOSITES
from strategies.chains.consumers import CONSUMERS
from strategies.chains.producers import PRODUCERS
from verifier.core.case import MeshSpec, OpCase
from verifier.planning.families import DrawContext

__all__ = ["OPS", "chain_cases", "composite_case", "produced_case"]

_CHAINS = tuple(f"chain.{name}" for name in PRODUCERS)
_COMPOSITES = tuple(f"composite.{name}" for name in COMPOSITES)
OPS = (*_CHAINS, *_COMPOSITES)
"""The names of the family's ops."""
_ATTEMPTS = 8
"""How many seeds are tried for a choice of functions before another choice is drawn."""
_SEEDS = st.integers(0, 2**20 - 1)


def chain_cases(context: DrawContext) -> SearchStrategy[OpCase]:
    """Return a generator of cases of the ops in ``context``.

    A chain is a producer and one consumer, or two: the second takes the result of the first, or the producer's again.
    Two in three cases are chains, if both kinds are asked for.

    Raises
    ------
    ValueError
        If ``context`` names no op or no dtype.
    """
    context.check(OPS)
    chains = [op for op in context.ops if op in _CHAINS]
    composites = [op for op in context.ops if op in _COMPOSITES]
    dtypes = st.sampled_from(context.dtypes)
    kinds: list[SearchStrategy[OpCase | None]] = []
    if chains:
        consumers = st.sampled_from(list(CONSUMERS))
        more = st.none() | consumers
        made = st.builds(
            produced_case,
            st.just(context.mesh),
            dtypes,
            st.sampled_from(chains),
            consumers,
            more,
            st.booleans(),
            _SEEDS,
        )
        kinds += [made, made]
    if composites:
        kinds.append(st.builds(composite_case, st.just(context.mesh), dtypes, st.sampled_from(composites), _SEEDS))
    return st.one_of(kinds).filter(lambda case: case is not None).map(_present)


def _present(case: OpCase | None) -> OpCase:
    assert case is not None
    return case


def produced_case(
    mesh: MeshSpec, dtype: torch.dtype, op: str, consumer: str, second: str | None, again: bool, seed: int
) -> OpCase | None:
    """Return a chain of the producer ``op`` and one or two consumers; None if none fits.

    Parameters
    ----------
    again
        Whether the second consumer takes the producer's result as well, instead of the first one's.
    """

    def build(b: Building) -> None:
        result = PRODUCERS[op.removeprefix("chain.")](b)
        last = CONSUMERS[consumer](b, result)
        if second is not None:
            CONSUMERS[second](b, result if again else last)

    return _built(mesh, dtype, op, build, seed)


def composite_case(mesh: MeshSpec, dtype: torch.dtype, op: str, seed: int) -> OpCase | None:
    """Return a call of the composite function ``op``; None if no call of it fits."""
    return _built(mesh, dtype, op, lambda b: COMPOSITES[op.removeprefix("composite.")](b), seed)


def _built(
    mesh: MeshSpec, dtype: torch.dtype, op: str, build: Callable[[Building], object], seed: int
) -> OpCase | None:
    for attempt in range(_ATTEMPTS):
        building = Building(mesh, dtype, seed * _ATTEMPTS + attempt)
        try:
            build(building)
            return building.case(op)
        except UnfitError:
            continue
    return None
