"""Runs the calls of a derivation in a worker: what ends the process does not hold, and the derivation goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from verifier.core.case import OpCase
from verifier.core.errors import ReportedError
from verifier.deriving.learning.changes import Change, Crossed, Swap
from verifier.deriving.learning.cuts import InBlocks, blocks_of
from verifier.deriving.learning.evidence import (
    Blocks,
    CallEvidence,
    Inputs,
    Place,
    evidence_of,
    leaves_open,
    with_gradients_beside,
)
from verifier.deriving.learning.held_out import Asked, Here
from verifier.planning.own_samples import overload_named
from verifier.rules.campaign.work import preparation, samples_of
from verifier.rules.campaign.workers import Failed, InFlight, Part, Position, WorkerSet
from verifier.rules.options import CheckOptions
from verifier.rules.samples import Sample, SampleOptions, Target, Values
from verifier.torch_internals.ops import has_gradient_formula

__all__ = ["Gathered", "GivenCall", "Listed", "SamplePool", "Samples", "Workshop"]

_STALL_LIMIT = 120.0
_BLOCKS: Position = (3, 0, 0, 0)
_DIFFERENTIATING: Position = (4, 0, 0, 0)
_MOST_SIZES = 5
"""At so many sizes calls are tried that leave placements open at fewer."""
Gathered = tuple[CallEvidence, dict[Inputs, Blocks]]
"""What holds for a call, and what holds where shards begin at multiples of a block."""


@dataclass(frozen=True)
class SamplePool:
    """The samples of an op, as sources draw them."""

    op: str
    targets: tuple[Target, ...]
    options: SampleOptions


@dataclass(frozen=True)
class Listed:
    """A sample of a pool, by its number, perhaps with another value of an argument, or tensors swapped."""

    number: int
    origin: str
    why_not: str = ""
    """Why it cannot be tested."""
    change: Change | Swap | None = None


@dataclass(frozen=True)
class _Work:
    """What a worker does with a sample of a pool, or with all of them.

    Parameters
    ----------
    what
        A method of :class:`_Tasks`.
    given
        Its further arguments.
    """

    what: str
    pool: SamplePool
    check: CheckOptions
    sample: Listed | None = None
    given: tuple[object, ...] = ()


class Workshop:
    """A worker for derivations, started when it is first needed.

    Parameters
    ----------
    imports
        Modules and files that it runs first.
    jobs
        1, or 0 to run everything in this process, without protection.

    Attributes
    ----------
    seconds
        CPU seconds that calls have taken in the worker.
    """

    def __init__(self, imports: Sequence[str] = (), jobs: int = 1) -> None:
        self._workers = WorkerSet(jobs, imports, stall_limit=_STALL_LIMIT, prepare=preparation(imports))
        self.seconds = 0.0

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.close()

    @property
    def deaths(self) -> int:
        """How many workers have died."""
        return self._workers.deaths

    def run(self, work: _Work) -> Any:
        """Return what a method of :class:`_Tasks` returns; None if it killed too many workers.

        Raises
        ------
        ReportedError
            If it raises.
        """
        result = None
        for outcome in self._workers.run([work], _do):
            if isinstance(outcome, Part):
                result, seconds = outcome.result
                self.seconds += seconds
            elif isinstance(outcome, Failed):
                raise ReportedError(f"deriving {work.pool.op}: {outcome.traceback}")
        return result


@dataclass
class Samples:
    """The samples of an op, and what a worker finds out about them."""

    shop: Workshop
    pool: SamplePool
    check: CheckOptions
    _calls: dict[str, list[tuple[int, int, CallEvidence]]] = field(default_factory=dict)

    def listed(self) -> list[Listed]:
        """Return all samples of the pool."""
        return self.shop.run(_Work("listed", self.pool, self.check)) or []

    def gathered(self, sample: Listed, gradients: bool, blocks: bool) -> Gathered | None:
        """Return what holds for a sample; None if no call of it can be made.

        Parameters
        ----------
        gradients
            Whether the results are followed by gradients, see :func:`verifier.deriving.learning.evidence.evidence_of`.
        blocks
            Whether to look for rules that hold where shards begin at multiples of a block.
        """
        found: Gathered | None = self.shop.run(_Work("gathered", self.pool, self.check, sample, (gradients, blocks)))
        return found

    def held_out(self, sample: Listed) -> _Away:
        """Return a sample that refutes rules, in the worker."""
        return _Away(self, sample)

    def calls(self, sample: Listed) -> list[tuple[int, int, CallEvidence]]:
        """Return the calls of a sample, each with the numbers of its size and draw."""
        key = repr(sample)
        if key not in self._calls:
            self._calls[key] = self.shop.run(_Work("calls", self.pool, self.check, sample)) or []
        return self._calls[key]

    def refuted(self, sample: Listed, asked: Sequence[Asked]) -> list[Asked]:
        """Return what does not hold for a sample; everything, if asking killed too many workers."""
        found = self.shop.run(_Work("refuted", self.pool, self.check, sample, (tuple(asked),)))
        return list(asked) if found is None else found

    def refuted_in_blocks(
        self, sample: Listed, call: CallEvidence, asked: Sequence[InBlocks]
    ) -> Mapping[Inputs, Place]:
        """Return what does not hold for a call of a sample at other extents; nothing, if asking killed workers."""
        return self.shop.run(_Work("refuted_in_blocks", self.pool, self.check, sample, (call, tuple(asked)))) or {}


@dataclass(frozen=True)
class _Away:
    """A sample that refutes rules, in a worker; see :class:`verifier.deriving.learning.held_out.HeldOut`."""

    samples: Samples
    sample: Listed

    def calls(self) -> Sequence[tuple[int, int, CallEvidence]]:
        return self.samples.calls(self.sample)

    def refuted(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        return self.samples.refuted(self.sample, asked)

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> Mapping[Inputs, Place]:
        return self.samples.refuted_in_blocks(self.sample, call, asked)


@dataclass(frozen=True)
class GivenCall:
    """A call with its values, which refutes rules in the worker of a shop, as a sample does."""

    shop: Workshop
    call: CallEvidence
    check: CheckOptions

    def calls(self) -> Sequence[tuple[int, int, CallEvidence]]:
        return [(0, 0, self.call)]

    def refuted(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        pool = SamplePool(self.call.case.op, (), SampleOptions())
        found = self.shop.run(_Work("refuted_of", pool, self.check, None, (self.call.case, tuple(asked))))
        return list(asked) if found is None else found

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> Mapping[Inputs, Place]:
        return {}


# ------------------------------------------------------------------------------------------------------ in the worker
@dataclass(frozen=True)
class _OneCase:
    """A sample that is the same call at each draw."""

    case: OpCase
    origin: str = ""
    not_testable: str = ""
    claims_only: str = ""

    @property
    def op(self) -> str:
        return self.case.op

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase:
        return self.case


@lru_cache(maxsize=4)
def _samples(pool: SamplePool) -> list[Sample]:
    options = replace(pool.options, sizes=_MOST_SIZES)
    return [sample for target in pool.targets for sample in samples_of(target, options) if sample.op == pool.op]


def _with_more(call: CallEvidence, more: CallEvidence) -> CallEvidence:
    """Return a call with what holds for it by other draws, and nothing is known of by its own."""
    counts = (call.draws or more.draws, call.sizes or more.sizes)
    return replace(call, rules={**more.holding, **call.rules}, draws=counts[0], sizes=counts[1])


@dataclass(frozen=True)
class _Tasks:
    """What a worker does, apart from the calls in ``skip``, each of which has ended a worker."""

    work: _Work
    enter: Callable[[Position], None]
    skip: frozenset[Position]

    @property
    def sample(self) -> Sample:
        listed = self.work.sample
        assert listed is not None
        sample = _samples(self.work.pool)[listed.number]
        return sample if listed.change is None else Crossed(sample, listed.change)

    def listed(self) -> list[Listed]:
        return [Listed(n, sample.origin, sample.not_testable) for n, sample in enumerate(_samples(self.work.pool))]

    def gathered(self, gradients: bool, blocks: bool) -> Gathered | None:
        check, sample = self.work.check, self.sample
        call = evidence_of(sample, check, gradients, self.enter, self.skip)
        if call is not None and not gradients and leaves_open(call):  # extents that leave a rank empty at most sizes
            whole = evidence_of(sample, replace(check, emptied=None), gradients, self.enter, self.skip)
            call = call if whole is None else _with_more(call, whole)
            if not call.rare and leaves_open(call, check.cap):
                more = evidence_of(sample, replace(check, sizes=_MOST_SIZES), gradients, self.enter, self.skip)
                call = call if more is None else _with_more(call, more)
        if call is None or call.rare or not blocks or _BLOCKS in self.skip:
            return None if call is None else (call, {})
        self.enter(_DIFFERENTIATING)
        if _DIFFERENTIATING not in self.skip and has_gradient_formula(overload_named(call.case.op)):
            call = with_gradients_beside(call, sample, check, (Replicate(), Partial()))
        with torch.no_grad():
            return call, blocks_of(call, sample, check.seed, lambda: self.enter(_BLOCKS))

    def calls(self) -> list[tuple[int, int, CallEvidence]]:
        return Here(self.sample, self.work.check, self.enter, self.skip).calls()

    def refuted(self, asked: Sequence[Asked]) -> list[Asked]:
        return Here(self.sample, self.work.check, self.enter, self.skip).refuted(asked)

    def refuted_of(self, case: OpCase, asked: Sequence[Asked]) -> list[Asked]:
        return Here(_OneCase(case), self.work.check, self.enter, self.skip).refuted(asked)

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> Mapping[Inputs, Place]:
        return Here(self.sample, self.work.check, self.enter, self.skip).refuted_in_blocks(call, asked)


def _do(
    work: _Work, in_flight: InFlight, skip: frozenset[Position], resume_at: int, /
) -> Iterator[tuple[object, float]]:
    """Yield what a method of :class:`_Tasks` returns, and how many CPU seconds it has taken."""
    if resume_at:
        return
    started = time.process_time()
    result = getattr(_Tasks(work, in_flight.enter, skip), work.what)(*work.given)
    yield result, time.process_time() - started
