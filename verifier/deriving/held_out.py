"""Holds derived rules against calls that they were not derived from."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase
from verifier.core.ops import resolve
from verifier.deriving.evidence import CallEvidence, Inputs, described, slot_names
from verifier.deriving.generalise import DerivedRule, placements_of
from verifier.placements.alphabet import Alphabet
from verifier.placements.partials import largest_part
from verifier.rules.classify import Expected
from verifier.rules.execute import Cuts, LocalCall
from verifier.rules.options import CheckOptions
from verifier.rules.sample_on_mesh import CALL_ERRORS
from verifier.rules.samples import Sample, Values

__all__ = ["crossed", "refuting"]

_DRAWS = 2
"""Draws at each size and mesh."""


_MOST_CROSSED = 16
"""So many calls get another value of an argument."""


@dataclass(frozen=True)
class _Crossed:
    """A sample with the value that another one has for an argument."""

    sample: Sample
    name: str
    place: int
    value: object

    not_testable = claims_only = ""
    rare = True

    @property
    def op(self) -> str:
        return self.sample.op

    @property
    def origin(self) -> str:
        return f"{self.sample.origin}, {self.name}={self.value} of another call"

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        case = self.sample.draw(size, draw, values)
        if case is None:
            return None
        # what is exact with one value rounds with another: 0.2 times a sum is not the sum of products
        if self.name in case.kwargs or self.place >= len(case.args):
            return replace(case, kwargs={**case.kwargs, self.name: self.value}, exact=False)
        args = (*case.args[: self.place], self.value, *case.args[self.place + 1 :])
        return replace(case, args=args, exact=False)


def crossed(calls: Sequence[CallEvidence], samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with arguments of others, one at a time: they tell apart what goes together by chance.

    In ``x[1:3]`` and ``x[:]`` both bounds are given or none is, so that a rule may name the wrong one. Factors also get
    the opposite sign: a maximum of parts times a positive number is that of the whole.
    """
    usual = [call for call in calls if not call.rare]
    by_origin = {sample.origin: sample for sample in samples}
    found: list[Sample] = []
    for place, argument in enumerate(resolve(usual[0].case.call)._schema.arguments if usual else ()):  # type: ignore[attr-defined]
        name = argument.name
        values = {repr(call.values[name]): call.values[name] for call in usual if name in call.values}
        opposite = [-value for value in values.values() if isinstance(value, float) and value]
        values |= {repr(value): value for value in opposite}
        here = [
            _Crossed(by_origin[call.origin], name, place, value)
            for call in usual
            for text, value in values.items()
            if text != repr(call.values.get(name)) and call.origin in by_origin
        ]
        found += here[:: math.ceil(len(here) / _MOST_CROSSED) or 1]
    return found


def refuting(rules: Sequence[DerivedRule], samples: Iterable[Sample], options: CheckOptions) -> Iterator[CallEvidence]:
    """Yield the calls that refute one of ``rules``, with what they refute; they count as rare."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for sample in samples:
            if not (sample.not_testable or sample.claims_only):
                call = _refuting(rules, sample, options)
                if call is not None:
                    yield call


def _refuting(rules: Sequence[DerivedRule], sample: Sample, options: CheckOptions) -> CallEvidence | None:
    first: CallEvidence | None = None
    refuted: dict[Inputs, tuple[frozenset[Placement], ...]] = {}
    in_blocks: set[Inputs] = set()
    for size, draw in itertools.product(range(options.sizes), range(_DRAWS)):
        case = sample.draw(size, draw)
        if case is None:
            continue
        try:
            local = LocalCall(case)
            whole = local(local.tensors)
        except CALL_ERRORS:
            continue
        call = described(sample, case, local.tensors, [tuple(t.shape) for t in whole.tensors], whole)
        first = first or call
        listed = [(rule, *placed) for rule in rules for placed in placements_of(rule, call)]
        for mesh in options.flat:
            for rule, inputs, outputs in listed:
                if not rule.is_cut_in_blocks(call, inputs, mesh.world_size):
                    continue
                if inputs in refuted or _leaves_out(call, inputs, mesh, options) or not _is_legal(call, inputs):
                    continue
                if not _holds(case, local, whole.tensors, mesh, inputs, outputs, options.seed + draw):
                    refuted[inputs] = ()
                    if rule.cut is not None:
                        in_blocks.add(inputs)
    if first is None or not refuted:
        return None
    plain = {inputs: outputs for inputs, outputs in refuted.items() if inputs not in in_blocks}
    return CallEvidence(
        first.origin, first.slots, first.shapes, first.results, first.values, plain, first.case, first.dtypes,
        first.lengths, rare=True, absent=first.absent,
        refuted_in_blocks=frozenset(in_blocks),
    )  # fmt: skip


def _leaves_out(call: CallEvidence, inputs: Inputs, mesh: MeshSpec, options: CheckOptions) -> bool:
    """Return whether a rank has no elements of a sharded dim, and the rules are not for that."""
    shards = ((p, shape) for p, shape in zip(inputs, call.shapes, strict=True) if p.is_shard())
    return not options.empty_shards and any(shape[p.dim] < mesh.world_size for p, shape in shards)  # type: ignore[attr-defined]


def _is_legal(call: CallEvidence, inputs: Inputs) -> bool:
    """Return whether the tensors of a call can be so placed: integers have no average."""
    return all(
        placement in Alphabet().placements(len(shape), dtype)
        for placement, shape, dtype in zip(inputs, call.shapes, call.dtypes, strict=True)
    )


def _holds(
    case: OpCase, local: LocalCall, whole: Sequence[torch.Tensor], mesh: MeshSpec,
    inputs: Sequence[Placement], outputs: Sequence[Placement], seed: int,
) -> bool:  # fmt: skip
    """Return whether the results of the ranks are placed as a rule says, which may be about their gradients, too."""
    names = slot_names(case)
    slots = list(dict.fromkeys(names))
    cuts = Cuts(local.tensors, mesh.shape, seed)
    tensors = [cuts.of(n, (inputs[slots.index(name)],)) for n, name in enumerate(names)]
    terms = sum(t.numel() for t in local.tensors) + sum(t.numel() for t in whole)
    try:
        made = [local(one) for one in zip(*tensors, strict=True)]
    except Exception:  # noqa: BLE001 - an op may raise anything on a rank's part; that refutes the rule
        return False
    for number, (result, placement) in enumerate(zip(whole, outputs, strict=False)):
        expected = Expected(result, mesh.world_size, case.exact, terms, largest_part(result.dtype))
        expected.expect_parts(any(p.is_partial() for p in inputs))
        bit = expected.bit(placement)
        if any(number >= len(one.tensors) for one in made):
            return False
        if not bit or not expected.represented([one.tensors[number] for one in made], bit):
            return False
    return True
