"""Counts the overloads with a rule that the source can test: ``python -m strategies.opinfo.coverage``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strategies.opinfo.calls.by_op import registered_of
from strategies.opinfo.handmade import NO_CALLS
from strategies.opinfo.source import SCANNED, OpInfoSource
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.ops import registered_overloads

__all__ = ["Coverage", "coverage"]


@dataclass(frozen=True)
class Coverage:
    """The overloads with a rule of their own, as ``aten.add.Tensor``, sorted.

    ``tested`` have a sample that can be drawn. ``not_testable`` have only samples whose arguments do not determine the
    results, with the reason. ``missing`` have no samples.
    """

    tested: tuple[str, ...]
    not_testable: dict[str, str]
    missing: tuple[str, ...]


def coverage(patterns: Sequence[str] = ()) -> Coverage:
    """Return the coverage at one size and with few samples; all ops take about 8 s.

    One of few samples shows most overloads to be tested, and more are drawn only of ops of which it does not.
    """
    registered = {str(op) for op in registered_overloads()}
    tested: set[str] = set()
    reasons: dict[str, str] = {}
    targets = OpInfoSource().select(patterns)
    for source, most in ((OpInfoSource(most=SCANNED), 1), (OpInfoSource(), 4)):
        options, left = SampleOptions(sizes=1, max_samples=most, rare=False), []
        for target in targets:
            seen = {target.overload} if target.overload else {str(op) for op in registered_of().get(target.name, ())}
            for sample in source.samples(target, options):
                seen.add(sample.op)
                if sample.not_testable:
                    reasons[sample.op] = sample.not_testable
                elif sample.op in registered and sample.op not in tested and sample.draw(0, 0) is not None:
                    tested.add(sample.op)
            if (seen & registered) - tested:
                left.append(target)
        targets = tuple(left)
    not_testable = {op: reason for op, reason in sorted(reasons.items()) if op in registered - tested}
    missing = registered - tested - not_testable.keys()
    return Coverage(tuple(sorted(tested)), not_testable, tuple(sorted(missing)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = coverage()
    print(f"{len(found.tested)} tested, {len(found.not_testable)} not testable, {len(found.missing)} missing")
    for name, reason in found.not_testable.items():
        print(f"  {name}: {reason}")
    for name in found.missing:
        print(f"  {name}: no sample: {NO_CALLS.get(name, 'reason not known')}")
