"""Holds derived rules against calls that they were not derived from."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.distributed.tensor import Partial, Shard

from verifier.core.case import MeshSpec, OpCase
from verifier.deriving.learning.cuts import InBlocks, refuted_in_blocks
from verifier.deriving.learning.evidence import CallEvidence, Inputs, Place, described, groups_of_results, slot_names
from verifier.deriving.learning.generalise import DerivedRule, placements_of
from verifier.placements.alphabet import Alphabet
from verifier.placements.bounds import leaves_a_rank_empty
from verifier.placements.partials import largest_part
from verifier.rules.classify import Expected
from verifier.rules.execute import Cuts, LocalCall, Results
from verifier.rules.options import CheckOptions, Position
from verifier.rules.sample_on_mesh import CALL_ERRORS
from verifier.rules.samples import Sample

__all__ = [
    "Asked",
    "HeldOut",
    "Here",
    "Untried",
    "emptying_meshes",
    "refuting",
    "refuting_in_blocks",
]

_DRAWS = 2
"""Draws at each size and mesh."""
_MOST_RANKS = 16
"""Of meshes with more ranks than elements."""


@dataclass(frozen=True)
class Asked:
    """Placements of slots and results that have to hold for a call: a size, a draw, and a mesh.

    ``in_blocks`` if the rule that lists them holds only where shards begin at multiples of a block.
    """

    size: int
    draw: int
    mesh: MeshSpec
    inputs: Inputs
    outputs: Inputs
    in_blocks: bool


class HeldOut(Protocol):
    """A sample that refutes rules, in this process or in another one."""

    def calls(self) -> Sequence[tuple[int, int, CallEvidence]]:
        """Return its calls, each with the numbers of its size and draw; nothing is known to hold for them."""

    def refuted(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        """Return what does not hold; of the same placements of slots and results the first."""

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> Mapping[Inputs, Place]:
        """Return what does not hold for a call at extents that are multiples of blocks, each with the place."""


@dataclass(frozen=True)
class Untried:
    """A sample that refutes rules for placements of which nothing is known.

    Parameters
    ----------
    known
        Placements of its slots of which it is known whether they hold.
    """

    sample: HeldOut
    known: frozenset[Inputs]

    def calls(self) -> Sequence[tuple[int, int, CallEvidence]]:
        return self.sample.calls()

    def refuted(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        unknown = [one for one in asked if one.inputs not in self.known]
        return self.sample.refuted(unknown) if unknown else ()

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> Mapping[Inputs, Place]:
        return self.sample.refuted_in_blocks(call, asked)


@dataclass(frozen=True)
class Here:
    """A sample that is run in this process.

    Parameters
    ----------
    enter
        Told before each call.
    skip
        Calls that have ended the process before: what they were to bear out does not hold.
    """

    sample: Sample
    options: CheckOptions
    enter: Callable[[Position], None] = lambda position: None
    skip: frozenset[Position] = frozenset()

    def calls(self) -> list[tuple[int, int, CallEvidence]]:
        draws = itertools.product(range(self.options.sizes), range(_DRAWS))
        with _quietly():
            return [
                (size, draw, described(self.sample.origin, case, local, whole))
                for (size, draw), case, local, whole in self._run_each(0, draws)
            ]

    def refuted(self, asked: Sequence[Asked]) -> list[Asked]:
        by_draw: dict[tuple[int, int], list[tuple[int, Asked]]] = {}
        for number, one in enumerate(asked):
            by_draw.setdefault((one.size, one.draw), []).append((number, one))
        found: dict[tuple[Inputs, Inputs], Asked] = {}
        with _quietly():
            for drawn, case, local, whole in self._run_each(1, by_draw):
                for number, one in by_draw[drawn]:
                    position = (2, 0, 0, number)
                    self.enter(position)
                    key = one.inputs, one.outputs
                    if key not in found and (position in self.skip or not self._holds(case, local, whole, one)):
                        found[key] = one
        return list(found.values())

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> dict[Inputs, Place]:
        position = (3, 1, 0, 0)
        if position in self.skip:
            return {}
        with _quietly():
            return refuted_in_blocks(call, self.sample, asked, self.options.seed, lambda: self.enter(position))

    def _run_each(
        self, stage: int, draws: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], OpCase, LocalCall, Results]]:
        """Run the sample at each size and draw, and leave out what has ended the process before, or cannot be run."""
        for size, draw in draws:
            position = (stage, size, draw, 0)
            self.enter(position)
            case = self.sample.draw(size, draw) if position not in self.skip else None
            if case is None:
                continue
            try:
                local = LocalCall(case)
                if self.skip or self.sample.claims_only:
                    local.raise_as_on_meta(local.tensors)
                whole = local(local.tensors)
            except CALL_ERRORS:
                continue
            yield (size, draw), case, local, whole

    def _holds(self, case: OpCase, local: LocalCall, whole: Results, asked: Asked) -> bool:
        careful = bool(self.skip or self.sample.claims_only)
        return _holds(case, local, whole, asked, self.options.seed + asked.draw, careful)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def refuting(rules: Sequence[DerivedRule], samples: Iterable[HeldOut], options: CheckOptions) -> Iterator[CallEvidence]:
    """Yield the calls that refute one of ``rules``, with what they refute; they count as rare."""
    for sample in samples:
        calls = sample.calls()
        asked = [one for size, draw, call in calls for one in _asked(rules, size, draw, call, options)]
        refuted = sample.refuted(asked) if asked else ()
        of_size = {size: call for size, _, call in reversed(calls)}
        for size in dict.fromkeys(one.size for one in refuted):  # what another extent refutes may hold for this one
            here = [one for one in refuted if one.size == size]
            yield replace(
                of_size[size],
                rules={one.inputs: () for one in here if not one.in_blocks},
                refuted_in_blocks={one.inputs: ((), one.mesh.world_size) for one in here if one.in_blocks},
                rare=True,
            )


def refuting_in_blocks(
    rules: Sequence[DerivedRule], samples: Iterable[tuple[CallEvidence, HeldOut]]
) -> Iterator[CallEvidence]:
    """Yield the calls that refute one of ``rules``, which ask for blocks, at extents that are multiples of these.

    Each sample goes with its call at the first size, of which nothing need be known.
    """
    for call, sample in samples:
        asked = [
            InBlocks(inputs, outputs, rule.cut.slot, block)
            for rule in rules
            if rule.cut is not None and (block := rule.cut.value(call)) > 1
            for inputs, outputs in placements_of(rule, call)
        ]
        if refuted := sample.refuted_in_blocks(call, asked) if asked else {}:
            yield replace(call, refuted_in_blocks=refuted, rare=True)


def _asked(
    rules: Sequence[DerivedRule], size: int, draw: int, call: CallEvidence, options: CheckOptions
) -> Iterator[Asked]:
    """Yield what ``rules`` list for a call on each mesh, where the call and its tensors can be so placed."""
    listed = [(rule, *placed) for rule in rules for placed in placements_of(rule, call)]
    for rule, inputs, outputs in listed:
        aimed = emptying_meshes(call, inputs) if options.emptied is None and rule.cut is None and not draw else ()
        for mesh in (*options.flat, *aimed):
            cut = rule.is_cut_in_blocks(call, inputs, mesh.world_size)
            if cut and not _leaves_out(call, inputs, mesh, options) and _is_legal(call, inputs):
                yield Asked(size, draw, mesh, inputs, outputs, rule.cut is not None)


def _leaves_out(call: CallEvidence, inputs: Inputs, mesh: MeshSpec, options: CheckOptions) -> bool:
    """Return whether a rank has no elements of a sharded dim, and the rules are not for that."""
    shards = ((p, shape) for p, shape in zip(inputs, call.shapes, strict=True) if p.is_shard())
    return any(options.leaves_out(shape[p.dim], mesh.world_size) for p, shape in shards)  # type: ignore[attr-defined]


def emptying_meshes(call: CallEvidence, inputs: Inputs) -> list[MeshSpec]:
    """Return numbers of ranks that leave one without elements of what is sharded: no more than elements, and more."""
    shards = ((p, shape) for p, shape in zip(inputs, call.shapes, strict=True) if isinstance(p, Shard))
    least = min((extent for p, shape in shards if (extent := shape[p.dim])), default=0)
    fewer = next((ranks for ranks in range(2, least) if leaves_a_rank_empty(least, ranks)), None)
    more = least + 1 if 0 < least < _MOST_RANKS else None
    return [MeshSpec((ranks,)) for ranks in (fewer, more) if ranks is not None]


def _is_legal(call: CallEvidence, inputs: Inputs) -> bool:
    """Return whether the tensors of a call can be so placed: integers have no average.

    Where a rule lists a sum of bools, DTensor makes one of a bool that each rank has.
    """
    return all(
        placement in Alphabet().placements(len(shape), dtype) or (dtype is torch.bool and placement == Partial())
        for placement, shape, dtype in zip(inputs, call.shapes, call.dtypes, strict=True)
    )


def _holds(case: OpCase, local: LocalCall, whole: Results, asked: Asked, seed: int, careful: bool) -> bool:
    """Return whether the results of the ranks are placed as a rule says, which may be about their gradients, too."""
    mesh, inputs = asked.mesh, asked.inputs
    names = slot_names(case)
    slots = list(dict.fromkeys(names))
    cuts = Cuts(local.tensors, mesh.shape, seed)
    try:
        tensors = [cuts.of(n, (inputs[slots.index(name)],)) for n, name in enumerate(names)]
    except ValueError:  # of a list, another tensor than the first may have a dtype that cannot be so placed
        return True
    terms = sum(t.numel() for t in local.tensors) + sum(t.numel() for t in whole.tensors)
    try:
        for one in zip(*tensors, strict=True) if careful else ():
            local.raise_as_on_meta(one)
        made = [local(one) for one in zip(*tensors, strict=True)]
    except Exception:  # noqa: BLE001 - an op may raise anything on a rank's part; that refutes the rule
        return False
    groups = groups_of_results(names, local, whole)
    placed = [(n, p) for group, p in zip(groups, asked.outputs, strict=False) for n in group]
    for number, placement in placed:
        result = whole.tensors[number]
        expected = Expected(result, mesh.world_size, case.exact, terms, largest_part(result.dtype))
        expected.expect_parts(any(p.is_partial() for p in inputs))
        bit = expected.bit(placement)
        if any(number >= len(one.tensors) for one in made):
            return False
        if not bit or not expected.represented([one.tensors[number] for one in made], bit):
            return False
    return True
