"""What a worker does: check the samples of one target, one after the other."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from verifier.rules.check import CheckOptions, check_sample
from verifier.rules.results import SampleReport
from verifier.rules.samples import SampleOptions, SampleSource, Target, installed_sources
from verifier.rules.worker_process import InFlight, Position

__all__ = ["WorkItem", "check_target"]


SAMPLES_WITH_PRODUCTS = 2
"""Samples of each overload whose rules are multiplied on meshes of several dims."""


@dataclass(frozen=True)
class WorkItem:
    """One op, and how to check it."""

    target: Target
    samples: SampleOptions
    check: CheckOptions


@cache
def _sources() -> dict[str, SampleSource]:
    return installed_sources()


def check_target(
    item: WorkItem, in_flight: InFlight, skip: frozenset[Position], resume_at: int, /
) -> Iterator[SampleReport]:
    """Yield the report of each sample of the target of ``item``, in order; the first ``resume_at`` are left out."""
    source = _sources()[item.target.source]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen: Counter[str] = Counter()
        for number, sample in enumerate(source.samples(item.target, item.samples)):
            in_flight.leave()
            seen[sample.op] += 1
            if number >= resume_at:
                # DTensor takes long to decide on a mesh of several dims: the products of an op's rules need few samples
                options = item.check if seen[sample.op] <= SAMPLES_WITH_PRODUCTS else replace(item.check, products=0)
                yield check_sample(sample, options, number, in_flight.enter, skip)
