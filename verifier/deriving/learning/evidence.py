"""Which placements hold for each call of an op, whatever DTensor claims of it."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import OpCase
from verifier.core.ops import argument_names, resolve
from verifier.deriving.learning.gradients import gradient_rules
from verifier.placements.alphabet import Alphabet
from verifier.rules.classify import Expected
from verifier.rules.execute import LocalCall, Results
from verifier.rules.explore import Exploration
from verifier.rules.ledger import Candidate, Ledger
from verifier.rules.options import DRAWS_FOR_MISSING, SIZES_FOR_MISSING, CheckOptions, Position
from verifier.rules.results import SampleReport
from verifier.rules.sample_on_mesh import CALL_ERRORS
from verifier.rules.samples import Sample, is_rare

__all__ = [
    "Blocks",
    "CallEvidence",
    "Inputs",
    "Outputs",
    "Place",
    "by_slot",
    "described",
    "evidence_of",
    "gather",
    "groups_of_results",
    "kept_where_written",
    "leaves_open",
    "slot_names",
    "with_gradients_beside",
]

Inputs = tuple[Placement, ...]
"""The placement of each tensor parameter of a call on one mesh dim; the tensors of a list have the same one."""
Outputs = tuple[frozenset[Placement], ...]
"""The placements that each result may have."""


Place = tuple[tuple[int, ...], int]
"""Extents of the sharded dim of each slot, 0 for a slot that is not sharded, and the number of ranks."""


@dataclass(frozen=True)
class Blocks:
    """A rule that holds where the shards of a slot begin at multiples of a block.

    Parameters
    ----------
    outputs
        The placements that each result may have.
    slot
        The number of the slot.
    block
        How many elements a block has.
    held, failed
        Where it was seen to hold and to fail: the extent of the sharded dim of each slot, and the number of ranks.
    """

    outputs: Outputs
    slot: int
    block: int
    held: tuple[Place, ...]
    failed: tuple[Place, ...]


@dataclass(frozen=True)
class CallEvidence:
    """One call of an op, and which rules hold for it on one mesh dim.

    Parameters
    ----------
    origin
        Where the call comes from.
    slots
        The parameters that are tensors or lists of them, in order.
    shapes
        The shape of each slot at its first size; of a list that of the first tensor.
    results
        The number of dims of each result, then of each gradient. A list that is only written to is one result.
    absent
        The places among what the op returns at which it returns None, or a number.
    values
        The other arguments, by name.
    rules
        By the placements of the slots those of the results; empty where a draw refutes all. Placements that were not
        tried, or in too few draws, are missing.
    case
        The call at its first size.
    dtypes
        Of each slot.
    lengths
        How many tensors each slot has; 1 if it is no list.
    gradients
        The slots whose gradients follow the results.
    rare
        Whether the call is of a class that is seldom used, so that it refutes rules, and need not be explained.
    draws, sizes
        The fewest draws and sizes in which a rule held.
    refuted_in_blocks
        The placements that were refuted where shards begin at multiples of the block that a rule names, each with the
        place: without extents where it is the call as it is.
    alike
        Whether the first of ``results`` stands for all tensors of the list that the op returns.
    differentiable, differentiated
        The slots that have gradients; and those of the results and of these gradients, by the placement of cotangents
        of results that are not sharded, and by the placements of all slots. ``rules`` may be of the results alone.
    """

    origin: str
    slots: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]
    values: Mapping[str, object]
    rules: Mapping[Inputs, Outputs]
    case: OpCase
    dtypes: tuple[torch.dtype, ...] = ()
    lengths: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()
    rare: bool = False
    draws: int = 0
    sizes: int = 0
    absent: tuple[int, ...] = ()
    refuted_in_blocks: Mapping[Inputs, Place] = field(default_factory=dict)
    alike: bool = False
    differentiable: tuple[str, ...] = ()
    differentiated: Mapping[Placement, Mapping[Inputs, Outputs]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """What the call was made from; other spellings of a call, and rare classes of it, are made from the same."""
        return ",".join(self.origin.split(",")[:2])

    @property
    def ndims(self) -> tuple[int, ...]:
        """The number of dims of each slot."""
        return tuple(map(len, self.shapes))

    @property
    def holding(self) -> dict[Inputs, Outputs]:
        """The rules that hold."""
        return {inputs: outputs for inputs, outputs in self.rules.items() if outputs}


def gather(samples: Iterable[Sample], options: CheckOptions, gradients: bool = False) -> Iterator[CallEvidence]:
    """Yield what holds for each sample; those that cannot be tested are left out."""
    for sample in samples:
        if not (sample.not_testable or sample.claims_only):
            made = evidence_of(sample, options, gradients)
            if made is not None:
                yield made


def evidence_of(
    sample: Sample,
    options: CheckOptions,
    gradients: bool = False,
    enter: Callable[[Position], None] = lambda position: None,
    skip: frozenset[Position] = frozenset(),
) -> CallEvidence | None:
    """Return what holds for a sample; None if no call of it can be made.

    With ``gradients`` the results of a call are followed by the gradients of its slots, and rules whose local gradients
    represent no gradient do not hold.

    Parameters
    ----------
    options
        With ``blank`` set, so that DTensor is asked nothing.
    enter
        Told of each combination before it is run.
    skip
        Combinations that have ended the process before, so that they do not hold.
    """
    assert options.blank
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        how = replace(options, sizes=_sizes(sample, options))
        made = _of_sample(sample, how, enter, skip)
        if made is not None and gradients:
            enter(_DIFFERENTIATING)
            made = None if _DIFFERENTIATING in skip else _with_gradients(made, sample, how)
        return made


_DIFFERENTIATING: Position = (1, 0, 0, 0)


def _sizes(sample: Sample, options: CheckOptions) -> int:
    """Return at how many sizes a sample is to be tried: fewer sizes mean more draws at each."""
    return 1 if is_rare(sample) else sum(_runs_at(sample, size) for size in range(options.sizes)) or 1


def _runs_at(sample: Sample, size: int) -> bool:
    """Return whether there is a call of a size that the op takes: a square matrix has no extents that differ."""
    case = sample.draw(size, 0)
    if case is None or sample.claims_only:
        return case is not None
    try:
        call = LocalCall(case)
        call(call.tensors)
    except CALL_ERRORS:
        return False
    return True


def _of_sample(
    sample: Sample, options: CheckOptions, enter: Callable[[Position], None], skip: frozenset[Position]
) -> CallEvidence | None:
    ledger = Ledger(sample, options, 0, enter, skip, SampleReport(sample.op, sample.origin))
    first: Exploration | None = None
    for mesh_number, mesh in enumerate(options.flat):
        for size in range(options.sizes):
            case = sample.draw(size, 0)
            if case is None:
                continue
            try:
                place = Exploration(ledger, case, mesh, mesh_number, size)
            except CALL_ERRORS:
                continue
            with closing(place):
                place.run()
            first = first or place
    made = None if first is None else _evidence(ledger, first)
    return made if made is None or made.results else replace(made, rules={})  # an empty list says nothing of rules


def _with_gradients(call: CallEvidence, sample: Sample, options: CheckOptions) -> CallEvidence:
    """Return a call whose results are followed by the gradients of its slots.

    Rules whose local gradients represent no gradient do not hold.
    """
    call = with_gradients_beside(call, sample, options, (Replicate(),))
    known = call.differentiated[Replicate()]
    return replace(
        call,
        gradients=call.differentiable,
        results=(*call.results, *(call.ndims[call.slots.index(name)] for name in call.differentiable)),
        rules={inputs: known.get(inputs, ()) for inputs in call.rules},
    )


def with_gradients_beside(
    call: CallEvidence, sample: Sample, options: CheckOptions, cotangents: Sequence[Placement]
) -> CallEvidence:
    """Return a call with the placements of the gradients of its slots beside its rules, which stay those of results."""
    names = slot_names(call.case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {one: gradient_rules(sample, options, call.slots, names, call.holding, one) for one in cotangents}
    places = found[cotangents[0]][0]
    rules = {one: of_one for one, (_, of_one) in found.items()}
    return replace(call, differentiable=tuple(call.slots[place] for place in places), differentiated=rules)


def _evidence(ledger: Ledger, place: Exploration) -> CallEvidence:
    case = place.case
    names = slot_names(case)
    firsts = [group[0] for group in groups_of_results(names, place.call, place.reference)]
    rules: dict[Inputs, Outputs] = {}
    draws, sizes = [], []
    drawn = len({shape for candidate in ledger.candidates.values() for shape in candidate.shapes})
    for combination, candidate in ledger.candidates.items():
        placed = by_slot(names, [p for (p,) in combination])
        if placed is None:
            continue
        masks = _as_many(candidate.masks, len(place.expected))
        masks = kept_where_written(place.call, place.reference, place.expected, [p for (p,) in combination], masks)
        if not masks:
            rules[placed] = ()
        elif _is_borne_out(candidate, ledger.options, drawn):
            rules[placed] = tuple(
                frozenset(letter for bit, letter in enumerate(place.expected[first].letters) if masks[first] >> bit & 1)
                for first in firsts
            )
            draws.append(candidate.draws)
            sizes.append(len(candidate.shapes))
    call = described(ledger.sample.origin, case, place.call, place.reference)
    fewest, smallest = min(draws, default=0), min(sizes, default=0)
    return replace(call, rules=rules, rare=is_rare(ledger.sample), draws=fewest, sizes=smallest)


def described(origin: str, case: OpCase, local: LocalCall, whole: Results) -> CallEvidence:
    """Return a call of which nothing is known to hold; ``whole`` is what it leaves behind on whole tensors."""
    returned = whole.returned if isinstance(whole.returned, tuple) else ()
    names = slot_names(case)
    slots = tuple(dict.fromkeys(names))
    first = [local.tensors[names.index(slot)] for slot in slots]
    return CallEvidence(
        origin=origin,
        slots=slots,
        shapes=tuple(tuple(tensor.shape) for tensor in first),
        results=tuple(whole.tensors[group[0]].dim() for group in groups_of_results(names, local, whole)),
        values=_values(case),
        rules={},
        case=case,
        dtypes=tuple(tensor.dtype for tensor in first),
        lengths=tuple(names.count(slot) for slot in slots),
        absent=tuple(place for place, one in enumerate(returned) if not isinstance(one, torch.Tensor | list | tuple)),
    )


def groups_of_results(names: Sequence[str], local: LocalCall, whole: Results) -> list[tuple[int, ...]]:
    """Return the numbers of the results that have one placement in a rule.

    That is each result that comes back, and each list that is only written to. ``names`` has the parameter of each
    tensor.
    """
    written: dict[str, tuple[int, ...]] = {}
    for number, index in zip(local.written, whole.written, strict=True):
        if index >= whole.returned_tensors:
            written[names[number]] = (*written.get(names[number], ()), index)
    return [*((index,) for index in range(whole.returned_tensors)), *written.values()]


def _is_borne_out(candidate: Candidate, options: CheckOptions, shapes: int) -> bool:
    """Return whether a rule that no draw has refuted was tried often enough to be believed.

    ``shapes`` is how many shapes the call has: that of a scalar is the same at each size.
    """
    sizes = min(SIZES_FOR_MISSING, options.sizes, shapes)
    if options.emptied is not None:  # it is left out where a rank would have no elements, such as at small sizes
        sizes = max(1, sizes - 1)
    return (
        candidate.draws >= DRAWS_FOR_MISSING
        and candidate.world_sizes == {mesh.world_size for mesh in options.flat}
        and len(candidate.shapes) >= sizes
    )


def leaves_open(call: CallEvidence, most: float = math.inf) -> bool:
    """Return whether some placements of the slots, of at most so many, were not tried, or in too few draws."""
    letters = [Alphabet().placements(len(shape), dtype) for shape, dtype in zip(call.shapes, call.dtypes, strict=True)]
    return len(call.rules) < math.prod(map(len, letters)) <= most


def slot_names(case: OpCase) -> list[str]:
    """Return the parameter of each tensor of a call; those of a list have the same one."""
    return [name.partition("[")[0] for name in argument_names(case)]


def by_slot(names: Sequence[str], placements: Sequence[Placement]) -> Inputs | None:
    """Return the placement of each slot; None if the tensors of a list have different ones."""
    placed: dict[str, Placement] = {}
    for name, placement in zip(names, placements, strict=True):
        if placed.setdefault(name, placement) != placement:
            return None
    return tuple(placed.values())


def kept_where_written(
    local: LocalCall, whole: Results, expected: Sequence[Expected], placed: Sequence[Placement], masks: Sequence[int]
) -> list[int]:
    """Return which placements of each result hold, as bits; empty if some result has none.

    What is written to keeps the placement of the argument. ``placed`` are the placements of the tensors.
    """
    kept = list(masks)
    if kept:
        for number, index in zip(local.written, whole.written, strict=True):
            kept[index] &= expected[index].bit(placed[number])
    return kept if kept and all(kept) else []


def _as_many(masks: Sequence[int], count: int) -> list[int]:
    """Return what may hold for so many results; of a list with another number of them what holds for all."""
    if len(masks) == count or not masks:
        return list(masks)
    return [functools.reduce(operator.and_, masks)] * count


def _values(case: OpCase) -> dict[str, object]:
    schema = resolve(case.call)._schema  # type: ignore[attr-defined]
    given = {argument.name: value for argument, value in zip(schema.arguments, case.args, strict=False)}
    given |= case.kwargs
    values = {}
    for argument in schema.arguments:
        if "Tensor" in str(argument.type):
            continue
        value = given.get(argument.name, argument.default_value if argument.has_default_value() else None)
        values[argument.name] = list(value) if isinstance(value, list | tuple) else value
    return values
