"""What DTensor claims about a call, and whether the local results bear it out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase
from verifier.core.ops import opaque_results
from verifier.core.verdict import VerdictKind
from verifier.core.wording import plural
from verifier.placements.algebra import sharded_dim
from verifier.placements.partials import is_reducible
from verifier.processes.answers import ANSWERS
from verifier.rules.classify import Expected, Mismatch
from verifier.rules.enumerate import input_combinations
from verifier.rules.execute import Cuts, LocalCall, Results, masked_indices, tensor_groups
from verifier.rules.results import Rule
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.claims.values import ListedRule, Propagation, RuleFailure
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.placements import (
    Combination,
    Placements,
    masked_extent,
    norm_order,
    placement_text,
    unmasked,
)
from verifier.torch_internals.registries import has_own_handler
from verifier.torch_internals.rule_code.constants import asks_for_world
from verifier.torch_internals.rule_code.reach import Watch
from verifier.torch_internals.simulation import in_world_of

__all__ = [
    "ASKED",
    "GROWS",
    "OWN_CODE",
    "Claim",
    "claim_reader",
    "claimed_rules",
    "claims_and_failures",
    "claims_of",
    "judge_claim",
    "listed_claims",
    "possible",
    "read_claim",
    "run_claim",
    "same_others",
    "where_to_ask",
]

OWN_CODE = ("aten.equal.default", "aten._local_scalar_dense.default")
"""Ops for which DTensor runs code of its own though it has no handler for them."""
TRACED = 48
"""At most so many combinations are traced through the decomposition of an op that has no strategy."""
ASKED = 64
"""At most so many combinations of a call are asked about, where a strategy lists no rules, if only claims matter."""
GROWS = "the op's strategy lists more rules each time that it is asked about the same call: level 2 only"
_COMPARED = 12
"""The same beside what a strategy enumerates by itself, where the claims of two calls are compared."""


def claim_reader(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object, watch: Watch | None = None
) -> ClaimReader:
    """Return a reader of what DTensor claims for a call of ``op`` that returns ``result`` on the whole tensors.

    ``watch`` notes which code of the rule is reached.
    """
    reader = ClaimReader(op, args, kwargs, result)
    reader.asks_everywhere = is_torchs(op)
    if not is_torchs(op) and asks_for_world(op):
        reader.around = in_world_of
    if not is_torchs(op) and not reader.lost and reader.grows():
        reader.lost, reader.why_lost = True, GROWS
    if watch is not None:
        reader.watch = watch.on
    return reader


@dataclass(frozen=True)
class Claim:
    """A rule that DTensor applies to a call exactly as it stands, with nothing communicated before.

    Parameters
    ----------
    inputs
        The placements that the call has.
    masked
        The placements on which the op really runs: those of ``inputs``, but for indices that are masked on the way.
    outputs
        The placements of the tensors that come back, then of those that are written to and do not come back.
    by_rank
        What each rank decides; they differ where sizes among the arguments are rewritten. Empty where a handler of the
        user's decides, which says where it places the results when it has run.
    again
        True if DTensor claimed this at one time when it was asked, and not at another.
    """

    rule: Rule
    inputs: Combination
    masked: Combination
    outputs: tuple[Placements, ...]
    by_rank: tuple[Propagation, ...] = field(repr=False)
    again: bool = False

    @property
    def plain(self) -> bool:
        """True if each rank runs the call as it is, on its own tensors."""
        return self.masked == self.inputs and all(one.call is None for one in self.by_rank)


def where_to_ask(
    reader: ClaimReader,
    call: LocalCall,
    combinations: Sequence[Combination],
    mesh_shape: tuple[int, ...],
    most: int | None = None,
    alone: Collection[tuple[str, ...]] = (),
) -> list[Combination]:
    """Return the combinations, on one mesh dim, at which DTensor may claim a rule: those that the op's strategy lists.

    If it lists none, because it decides by the placements that it is shown, these are ``combinations``, the same with
    bools that are pending sums, and what it enumerates by itself, which may lie beyond them. If it enumerates any, the
    first ``most`` of ``combinations`` are enough. Of all these, those ``alone`` whose text is given, if any is.
    """
    found = _where_claims_may_be(reader, call, combinations, mesh_shape, None if alone else most)
    return [one for one in found if tuple(str(p) for (p,) in one) in alone] if alone else found


def _where_claims_may_be(
    reader: ClaimReader,
    call: LocalCall,
    combinations: Sequence[Combination],
    mesh_shape: tuple[int, ...],
    most: int | None,
) -> list[Combination]:
    listed = reader.listed(mesh_shape, [tuple(p for (p,) in c) for c in combinations[:TRACED]])
    if listed is not None:
        return list(dict.fromkeys(tuple((unmasked(p),) for p in rule) for rule in listed))
    own = [tuple((unmasked(p),) for (p,) in rule) for rule in reader.enumerated(mesh_shape)]
    if own:
        combinations = combinations[:most]
    sums = [sums for one in combinations for sums in _summed(call.tensors, one)] if _has_bools(call.tensors) else []
    return list(dict.fromkeys([*combinations, *sums, *(one for one in own if possible(call, one))]))


def _has_bools(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.dtype == torch.bool for tensor in tensors)


def _summed(tensors: Sequence[torch.Tensor], combination: Combination) -> Iterator[Combination]:
    """Yield the combination with P(sum) for a maximum of bools, which is the same value and not the same to a rule.

    Where numbers are a pending sum, yield it with P(sum) for all bools, too.
    """
    bools = [tensor.dtype == torch.bool for tensor in tensors]
    pairs = list(zip(bools, combination, strict=True))
    yield tuple(_SUM if is_bool and placements == (Partial("max"),) else placements for is_bool, placements in pairs)
    if _SUM in combination:
        yield tuple(_SUM if is_bool else placements for is_bool, placements in pairs)


_SUM: Placements = (Partial("sum"),)


def possible(call: LocalCall, combination: Combination) -> bool:
    """Return whether each tensor of a call can be placed so.

    Nothing averages bools, a 0-d tensor has no shards, and parts of a norm are never negative, so that only what an op
    overwrites can be one. A strategy that is wrong may list what is no placement.
    """
    return all(
        isinstance(placement, Placement) and _can_be(tensor.dtype, placement)
        and 0 <= (sharded_dim(placement) or 0) < max(1, tensor.ndim)
        and not (tensor.ndim == 0 and sharded_dim(placement) is not None)
        and (number in call.buffers or norm_order(placement) is None)
        for number, (tensor, (placement,)) in enumerate(zip(call.tensors, combination, strict=True))
    )  # fmt: skip


def _can_be(dtype: torch.dtype, placement: Placement) -> bool:
    return not placement.is_partial() or is_reducible(dtype, placement.reduce_op)  # type: ignore[attr-defined]


def claimed_rules(case: OpCase, extent: int) -> dict[str, tuple[Placement, ...]]:
    """Return the rules that DTensor claims of a call on a mesh dim of ``extent`` ranks, by their text.

    The text has the placements on which the op runs, the value those that the arguments have to have for that. Empty
    for a call that is not one of an operator, that raises, or for which DTensor runs code of its own.
    """
    return _by_text(claims_of(case, extent)[0])


def claims_and_failures(case: OpCase, extent: int) -> frozenset[str]:
    """Return the rules that DTensor claims of a call, with the results, and how it fails instead, as text."""

    def ask() -> frozenset[str]:
        claims, failures = claims_of(case, extent, _COMPARED)
        rules = (f"{', '.join(claim.rule.inputs)} -> {', '.join(claim.rule.outputs)}" for claim in claims)
        return frozenset((*rules, *(f"{failure.kind} raised in {failure.where}" for failure in failures)))

    question = _question(case, extent) if ANSWERS.kept else ""
    return ANSWERS.of(question, ask) if question else ask()


def _question(case: OpCase, extent: int) -> str:
    """Return as text what decides about the claims of a call; empty if that is no text.

    That includes the values of tensors, because the shapes of results may depend on them.
    """
    leaves, structure = pytree.tree_flatten((case.args, dict(case.kwargs)))
    parts = [f"claims of {case.call} on {extent} ranks: {structure}"]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            parts.append(f"{type(leaf).__name__} {leaf!r}")
        elif leaf.layout is not torch.strided or leaf.device.type != "cpu" or leaf.is_conj() or leaf.is_neg():
            return ""
        else:
            flat = leaf.detach().clone(memory_format=torch.contiguous_format).flatten()  # of one element: with stride 1
            values = flat.view(torch.uint8).numpy().tobytes()
            parts.append(f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()} {sha256(values).hexdigest()}")
    return "; ".join(parts)


def _by_text(claims: Sequence[Claim]) -> dict[str, tuple[Placement, ...]]:
    return {", ".join(claim.rule.inputs): tuple(p for (p,) in claim.inputs) for claim in claims}


def claims_of(case: OpCase, extent: int, most: int | None = None) -> tuple[list[Claim], tuple[RuleFailure, ...]]:
    """Return what DTensor claims of a call on a mesh dim of ``extent`` ranks, and how it fails where it does not.

    Nothing for a call that is not one of an operator, that raises, or for which DTensor runs code of its own.

    Parameters
    ----------
    most
        At most so many combinations are asked about beside those that the strategy enumerates by itself.
    """
    call = LocalCall(case)
    if not isinstance(call.op, OpOverload) or has_own_handler(call.op) or case.op in OWN_CODE:
        return [], ()
    try:
        with torch.no_grad():
            reference = call(call.tensors)
    except Exception:  # noqa: BLE001 - an op may raise anything; then there is no result to place
        return [], ()
    mesh = MeshSpec((extent,))
    reader = claim_reader(call.op, case.args, case.kwargs, reference.returned)
    kinds = tuple((tensor.ndim, tensor.dtype) for tensor in call.tensors)
    # a rule may ask for a placement of what is written to, which level 1 gives the one of what is written
    groups = (*tensor_groups(call, case), *((number,) for number in sorted(call.buffers)))
    free = input_combinations(kinds, groups, ASKED)
    claims = []
    for combination in where_to_ask(reader, call, free, mesh.shape, most):
        if possible(call, combination):
            claim = read_claim(reader, call, case.op, combination, mesh, reference)
            if claim is not None:
                claims.append(claim)
    return claims, tuple(reader.failures.values())


def read_claim(
    reader: ClaimReader,
    call: LocalCall,
    op: str,
    combination: Combination,
    mesh: MeshSpec,
    reference: Results,
    in_full: bool = False,
) -> Claim | None:
    """Return what DTensor claims at ``combination``; None if it communicates first, or refuses.

    Parameters
    ----------
    reference
        What the call makes of the whole tensors.
    in_full
        Whether DTensor also decides how it communicates, which takes longer and may fail.
    """
    decided = reader.at(combination, mesh.shape, only_claims=not in_full)
    if decided is None or not _runs_as_it_is(decided.inputs, combination):
        return None
    by_rank = [decided]
    if decided.call is not None:
        for rank in range(1, mesh.world_size):
            other = reader.at(combination, mesh.shape, rank)
            if other is None:
                return None
            by_rank.append(other)
    else:
        by_rank *= mesh.world_size
    return _claim(call, op, combination, by_rank, mesh, reference)


def listed_claims(
    rules: Sequence[ListedRule],
    call: LocalCall,
    op: str,
    mesh: MeshSpec,
    reference: Results,
) -> list[Claim]:
    """Return what DTensor claims of a call if a strategy lists ``rules``, on a mesh of one dim."""
    claims = []
    for inputs, outputs in rules:
        if len(inputs) == len(call.tensors) and possible(call, inputs) and _is_split(call.tensors, inputs, mesh):
            decided = [Propagation(inputs, outputs)] * mesh.world_size
            if (claim := _claim(call, op, inputs, decided, mesh, reference)) is not None:
                claims.append(replace(claim, again=True))
    return claims


def _is_split(tensors: Sequence[torch.Tensor], inputs: Combination, mesh: MeshSpec) -> bool:
    """Return whether each rank has a part of each tensor that is sharded, and no tensor is masked on the way."""
    return all(
        masked_extent(placement) is None
        and ((dim := sharded_dim(placement)) is None or tensor.shape[dim] >= mesh.world_size)
        for tensor, (placement,) in zip(tensors, inputs, strict=True)
    )


def _claim(
    call: LocalCall,
    op: str,
    combination: Combination,
    by_rank: Sequence[Propagation],
    mesh: MeshSpec,
    reference: Results,
) -> Claim | None:
    """Return the claim that a decision of DTensor's comes to; None if it places fewer results than there are."""
    decided, returned = by_rank[0], reference.returned_tensors
    outputs = _of_tensors(call.op, decided, reference.returned, mesh)[:returned]
    if len(outputs) < returned:
        return None
    outputs += [combination[n] for n, index in zip(call.written, reference.written, strict=True) if index >= returned]
    rule = Rule(
        op,
        tuple(placement_text(placements) for placements in decided.inputs),
        tuple(placement_text(placements) for placements in outputs),
    )
    return Claim(rule, combination, decided.inputs, tuple(outputs), tuple(by_rank))


def _of_tensors(op: object, decided: Propagation, returned: object, mesh: MeshSpec) -> list[Placements]:
    """Return the placements of the tensors among the results; a rule may also place a result that was not asked for.

    An opaque result without placements, which comes back as a plain tensor of the rank, counts as replicated.
    """
    placed, leaves = list(decided.outputs or ()), pytree.tree_leaves(returned)
    if len(placed) == len(leaves):
        everywhere: Placements = (Replicate(),) * mesh.ndim
        for place in opaque_results(op):
            placed[place] = placed[place] or everywhere
        placed = [one for one, leaf in zip(placed, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    return [placements for placements in placed if placements is not None]


def _runs_as_it_is(inputs: Combination, combination: Combination) -> bool:
    """Return whether the only thing that DTensor does on the way is to mask indices, which needs no communication."""
    if len(inputs) != len(combination):
        return False
    for wanted, given in zip(inputs, combination, strict=True):
        for to, is_ in zip(wanted, given, strict=True):
            if to != is_ and not (masked_extent(to) is not None and is_ == Replicate()):
                return False
    return True


def run_claim(claim: Claim, call: LocalCall, cuts: Cuts, mesh: MeshSpec) -> list[Results]:
    """Return what each rank gets when it runs what DTensor would. Whatever the op raises comes out."""
    results = []
    for rank in range(mesh.world_size):
        tensors = [cuts.of(number, placements)[rank] for number, placements in enumerate(claim.inputs)]
        mask = None
        for number, placements in enumerate(claim.masked):
            if placements != claim.inputs[number]:
                tensors[number], mask = masked_indices(tensors[number], placements, mesh.shape, mesh.coordinate(rank))
        rewritten = claim.by_rank[rank].call
        made = call(tensors) if rewritten is None else call.rewritten(*rewritten, tensors)
        if mask is not None:
            made = _without_masked(made, claim.outputs, mask)
        results.append(made)
    return results


def _without_masked(made: Results, outputs: Sequence[Placements], mask: torch.Tensor) -> Results:
    """Return the results with 0 where a masked index was looked up, which is what the masked partial counts it as."""
    tensors = []
    for tensor, placements in zip(made.tensors, outputs, strict=False):
        if any(masked_extent(placement) is not None for placement in placements):
            wide = mask.view(*mask.shape, *(1 for _ in range(tensor.ndim - mask.ndim)))
            tensor = torch.where(wide, torch.zeros((), dtype=tensor.dtype), tensor)
        tensors.append(tensor)
    return replace(made, tensors=(*tensors, *made.tensors[len(tensors) :]))


def judge_claim(
    claim: Claim, results: Sequence[Results], expected: Sequence[Expected], others: Sequence[object], mesh: MeshSpec
) -> Mismatch | None:
    """Return how the ranks' results differ from what the claim promises; None if they bear it out."""
    partial = any(placement.is_partial() for placements in claim.inputs for placement in placements)
    for one in expected:
        one.expect_parts(partial)
    for rank, made in enumerate(results):
        if len(made.tensors) != len(expected):
            message = f"rank {rank} made {plural(len(made.tensors), 'tensor')}, expected {len(expected)}"
            return Mismatch(VerdictKind.WRONG_SHAPE, message)
        if not same_others(made.others, others):
            return Mismatch(VerdictKind.WRONG_VALUE, f"rank {rank} returned {made.others}, expected {tuple(others)}")
    if len(claim.outputs) != len(expected):
        message = f"DTensor places {len(claim.outputs)} results, the call has {len(expected)}"
        return Mismatch(VerdictKind.WRONG_SHAPE, message)
    for number, (placements, wanted) in enumerate(zip(claim.outputs, expected, strict=True)):
        tensors = [made.tensors[number] for made in results]
        plain = tuple(Partial(p.reduce_op) if masked_extent(p) is not None else p for p in placements)  # type: ignore[attr-defined]
        bit = wanted.bit(plain[0]) if mesh.ndim == 1 else 0
        if bit and wanted.represented(tensors, bit):
            continue
        found = wanted.mismatch(tensors, plain, mesh)
        if found is not None:
            name = "output" if len(expected) == 1 else f"output {number}"
            return Mismatch(found.kind, f"{name} {found.message}", found.clear)
    return None


def same_others(got: Sequence[object], wanted: Sequence[object]) -> bool:
    """Return whether two results agree in everything that is not a tensor; NaN equals NaN."""
    if len(got) != len(wanted):
        return False
    return all(a == b or (a != a and b != b) for a, b in zip(got, wanted, strict=True))
