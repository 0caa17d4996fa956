"""What a worker does: check the samples of one target, one after the other."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import tee

from verifier.processes.answers import ANSWERS
from verifier.rules.campaign.worker_process import InFlight, Position
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import (
    Sample,
    SampleOptions,
    SampleSource,
    Target,
    installed_sources,
    is_called_again,
    is_rare,
)
from verifier.torch_internals.ops import load_compiler

__all__ = [
    "WorkItem",
    "check_target",
    "number_of_parts",
    "preparation",
    "prepare",
    "prepare_for_imports",
    "samples_of",
]

FEW, PARTS_OF_FEW = 24, 8
"""So few ops are shared out among the workers, each in so many parts; of more ops each worker has some to itself."""


@dataclass(frozen=True)
class WorkItem:
    """One op, or every so many-th of its samples, and how to check it.

    Parameters
    ----------
    answers
        The folder in which processes share what DTensor claims of calls that are drawn; empty if they do not.
    part, parts
        Of ``parts`` workers that share the op this one checks the samples whose number leaves ``part`` as remainder.
    """

    target: Target
    samples: SampleOptions
    check: CheckOptions
    part: int = 0
    parts: int = 1
    answers: str = ""


def number_of_parts(targets: int) -> int:
    """Return in how many parts each of so many targets is shared out."""
    return PARTS_OF_FEW if targets <= FEW else 1


def prepare() -> None:
    """Load what every worker needs, so that it is ready when it says so."""
    for source in _sources().values():
        source.prepare()


def prepare_for_imports() -> None:
    """Load torch's compiler, too: calls for rules of the user's are drawn with fake tensors."""
    prepare()
    load_compiler()


def preparation(imports: Sequence[str]) -> Callable[[], None]:
    """Return what a worker with these imports does before it is ready."""
    return prepare_for_imports if imports else prepare


@cache
def _sources() -> dict[str, SampleSource]:
    return installed_sources()


def samples_of(target: Target, options: SampleOptions) -> Iterator[Sample]:
    """Return the samples of an op, from the source of the target."""
    return iter(_sources()[target.source].samples(target, options))


@lru_cache(maxsize=1)
def _shared(target: Target, options: SampleOptions) -> Iterator[Sample]:
    """Return the samples of an op that this worker may check several parts of, one after the other.

    Each is made when it is first asked for. A copy of the iterator begins at the first sample.
    """
    (start,) = tee(samples_of(target, options), 1)
    return start


def check_target(
    item: WorkItem, in_flight: InFlight, skip: frozenset[Position], resume_at: int, /
) -> Iterator[SampleReport]:
    """Yield the report of each sample of the target of ``item``, in order; the first ``resume_at`` are left out."""
    ANSWERS.share(item.answers)
    made = copy(_shared(item.target, item.samples)) if item.parts > 1 else samples_of(item.target, item.samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if item.answers:
            with ANSWERS.first(repr((item.target, item.samples)), in_flight.leave) as survived:
                made = iter([*made]) if survived else made  # else what comes before the crash is checked before it
        seen: Counter[str] = Counter()
        from_one: Counter[tuple[str, str]] = Counter()
        done = 0
        for number, sample in enumerate(made):
            in_flight.leave()
            seen[sample.op] += 1
            source = sample.op, sample.origin.partition(",")[0]  # samples of another one have other kinds of arguments
            from_one[source] += 1
            if number % item.parts != item.part:
                continue
            done += 1
            if done > resume_at:
                options = item.check
                if seen[sample.op] > options.samples_with_products:
                    options = replace(options, products=0)
                if from_one[source] > options.samples_called_again and not is_called_again(sample):
                    options = replace(options, samples_called_again=0)
                if is_rare(sample):
                    options = replace(options, claims_only=True, products=0)
                yield check_sample(sample, options, number, in_flight.enter, skip)
