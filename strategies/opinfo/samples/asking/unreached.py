"""Calls that reach code of a rule of the user's which no other call reaches.

A rule may be wrong where several conditions hold at the same time, and classes of input change one thing each. The
search goes from call to call: one that meets the first of several conditions reaches the code that asks for the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from types import CodeType

from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.argument_spellings import Variation
from strategies.opinfo.samples.asking.arguments import other_values
from strategies.opinfo.samples.asking.claimed import claimed, run_rule
from strategies.opinfo.samples.asking.extents import other_extents
from strategies.opinfo.samples.asking.lists import other_lists
from strategies.opinfo.samples.asking.tensors import other_tensors
from strategies.opinfo.samples.sample import OpInfoSample
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.rule_code.constants import codes_of_rule
from verifier.torch_internals.rule_code.reach import Block, Watch

__all__ = ["reaching_samples"]

_MOST_TRIES = 300
"""A rule may have code that no call reaches, such as that for a mesh of three ranks."""
_MOST_PARENTS = 12
_MOST_IN_VAIN = 4
"""Code is given up that so many calls reach without a claim that the calls before did not have."""


def reaching_samples(
    samples: Sequence[OpInfoSample],
    changes: Callable[[Call], Iterable[Variation]],
    accepts: Callable[[Call], bool],
) -> Iterator[OpInfoSample]:
    """Yield changes of ``samples``, of one op, that reach code of its rule which none of them reaches.

    Changes are left out at which the rule claims nothing else, as where the code returns no rules.
    Each of the ``changes`` of a call is tried beside those on which rules branch, if the op accepts the changed call.
    """
    if not samples or is_torchs(samples[0].first.op):
        return
    codes = codes_of_rule(samples[0].first.op)
    known: dict[frozenset[Block], OpInfoSample] = {}
    for sample in sorted(samples, key=lambda sample: not _tells(sample.first)):
        known.setdefault(_reached(codes, sample), sample)
    left = set(Watch(codes).blocks).difference(*(reached for reached, sample in known.items() if _tells(sample.first)))
    tries = _MOST_TRIES
    tried: set[str] = {sample.signature for sample in samples}
    asked: set[frozenset[Block]] = set()
    in_vain: Counter[Block] = Counter()
    while left and tries:
        parents = [one for one in known.items() if one[0] not in asked and _leads_to(one[0], left)][-_MOST_PARENTS:]
        if not parents:
            return
        asked.update(reached for reached, _ in parents)
        for sample, other in _changed([sample for _, sample in parents], changes):
            if not left or not tries:
                break
            if other.signature in tried:
                continue
            tried.add(other.signature)
            tries -= 1
            if not accepts(other.first):
                continue
            reached = _reached(codes, other)
            if _tells(other.first) and not left.isdisjoint(reached):
                if claimed(other.first) - claimed(sample.first):
                    left -= reached
                    yield other
                else:
                    in_vain.update(left & reached)
                    left -= {block for block in reached if in_vain[block] >= _MOST_IN_VAIN}
            known.setdefault(reached, other)


def _changed(
    samples: Sequence[OpInfoSample], changes: Callable[[Call], Iterable[Variation]]
) -> Iterator[tuple[OpInfoSample, OpInfoSample]]:
    """Yield the samples, from each in turn, and beside it the sample with one more change."""
    offered = ([(sample, change) for change in _changes(sample.first, changes)] for sample in samples)
    for sample, change in (pair for round_ in zip_longest(*offered) for pair in round_ if pair is not None):
        if (other := sample.varied(change, rare=True)) is not None:
            yield sample, other


def _changes(call: Call, changes: Callable[[Call], Iterable[Variation]]) -> Iterator[Variation]:
    values = (one.variation for one in other_values(call))
    return chain(values, other_extents(call), other_tensors(call), other_lists(call), changes(call))


def _reached(codes: Sequence[CodeType], sample: OpInfoSample) -> frozenset[Block]:
    watch = Watch(codes)
    run_rule(sample.first, watch)
    return frozenset(watch.reached)


def _tells(call: Call) -> bool:
    """Return whether a call may refute a rule: a dim of one element is on one rank, whether it is sharded or not."""
    return all(extent > 1 for tensor in call.tensors for extent in tensor.shape)


def _leads_to(reached: frozenset[Block], left: set[Block]) -> bool:
    """Return whether a block that is left may come right after one of those reached."""
    after = {(block.number, offset) for block in reached for offset in block.after}
    return any((block.number, block.offset) in after for block in left)
