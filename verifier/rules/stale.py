"""Decisions that DTensor's cache would hand to another call: what the key of the cache leaves out.

DTensor keeps the decision for a call, and takes it again for every call with an equal key. Two calls of one op on the
same tensors whose keys are equal must therefore have equal decisions when DTensor is asked afresh. No op is run on
shards and nothing is cached here; whether a difference does harm is shown by both calls in order, on real ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.placements.partials import is_reducible
from verifier.programs import SecondCall, second_calls
from verifier.records.values import trial_record
from verifier.rules.claims import claim_reader
from verifier.rules.execute import LocalCall
from verifier.rules.results import Rule, WrongRule
from verifier.rules.sample_on_mesh import CALL_ERRORS, SampleOnMesh
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.claims.values import Propagation
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.placements import Combination, placement_text
from verifier.torch_internals.registries import by_register_sharding

__all__ = ["stale_decisions"]

_PAIRS, _PAIRS_OF_OWN = 8, 16
"""At most so many pairs of calls are asked about for each argument that differs, under torch's rules and others."""
_ASKED = 24
"""At most so many combinations of each pair."""
_SHOWN = 2
"""At most so many stale decisions of each pair are reported."""


def stale_decisions(place: SampleOnMesh) -> Iterator[WrongRule]:
    """Yield decisions for the call of ``place`` that are not those of a second call with an equal key."""
    if not isinstance(place.call.op, OpOverload):
        return
    asked = _combinations(place)
    most = _PAIRS if is_torchs(place.call.op) else _PAIRS_OF_OWN
    pairs: Counter[str] = Counter()
    calls: dict[Hashable, tuple[OpCase, _Call | None]] = {}  # each case keeps its tensors, and so their ids, alive
    for again in second_calls(place.case):
        name = again.changed
        if pairs[name] >= most:
            continue
        for case in (again.first, again.second):
            if (arguments := _arguments(case)) not in calls:
                calls[arguments] = case, _Call.of(place, case)
        first, second = (calls[_arguments(case)][1] for case in (again.first, again.second))
        if first is None or second is None or first.key(asked[0]) != second.key(asked[0]):
            continue
        pairs[name] += 1
        yield from islice(_differences(place, again, first, second, asked), _SHOWN)


def _arguments(case: OpCase) -> Hashable:
    """Return what is equal for two cases of an op with the same tensors and other arguments."""
    leaves, structure = pytree.tree_flatten((case.args, dict(case.kwargs)))
    told = [id(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf)) for leaf in leaves]
    return str(structure), tuple(told)


def _differences(
    place: SampleOnMesh, again: SecondCall, first: _Call, second: _Call, asked: Sequence[Combination]
) -> Iterator[WrongRule]:
    """Yield a stale decision for each combination at which the calls, whose keys are equal, differ in it."""
    for combination in asked:
        kept, fresh = first.at(combination), second.at(combination)
        if kept is not None and (kept != fresh or _matters(kept, first, second)):
            yield _stale(place, again, combination, kept, fresh, f"{first.described} for {second.described}")


@dataclass(frozen=True)
class _Call:
    """One call of a pair, or of several: what DTensor decides for it, and its results."""

    reader: ClaimReader
    mesh_shape: tuple[int, ...]
    results: tuple[torch.Tensor, ...]
    decided: dict[Combination, Propagation | None] = field(default_factory=dict)

    @classmethod
    def of(cls, place: SampleOnMesh, case: OpCase) -> _Call | None:
        """Return the call of ``case``; None if it raises, or has another number of tensors than that of ``place``."""
        call = LocalCall(case)
        if len(call.tensors) != len(place.call.tensors):
            return None
        try:
            returned = call(call.tensors).returned
        except CALL_ERRORS:
            return None
        reader = claim_reader(call.op, case.args, case.kwargs, returned)  # type: ignore[arg-type]
        results = tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor))
        return cls(reader, place.mesh.shape, results)

    @property
    def described(self) -> str:
        """What DTensor keeps of the results beside their placements, as text."""
        return ", ".join(
            f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}, strides {list(one.stride())}"
            for one in self.results
        )

    def key(self, combination: Combination) -> Hashable:
        return self.reader.key(combination, self.mesh_shape)

    def at(self, combination: Combination) -> Propagation | None:
        if combination not in self.decided:
            self.decided[combination] = self.reader.at(combination, self.mesh_shape)
        return self.decided[combination]


def _matters(kept: Propagation, first: _Call, second: _Call) -> bool:
    """Return whether results differ in what DTensor keeps of them beside their placements.

    Shapes and strides are what users see. Dtypes are seen at the local tensors; the dtype that is kept matters where
    DTensor decides by it, which is how a pending result is cast.
    """
    shapes = [[(tensor.shape, tensor.stride()) for tensor in call.results] for call in (first, second)]
    dtypes = [[tensor.dtype for tensor in call.results] for call in (first, second)]
    pending = all(
        any(p.is_partial() for placements in placed or () for p in placements or ())
        for placed in (kept.inputs, kept.outputs)
    )
    return shapes[0] != shapes[1] or (pending and dtypes[0] != dtypes[1])


def _combinations(place: SampleOnMesh) -> list[Combination]:
    """Return combinations to ask about: all replicated, one tensor or all tensors placed otherwise, and claims."""
    tensors = place.call.tensors
    found: dict[Combination, None] = {((Replicate(),),) * len(tensors): None}
    for dim in range(max((tensor.ndim for tensor in tensors), default=0)):
        found[tuple((Shard(dim) if tensor.ndim > dim else Replicate(),) for tensor in tensors)] = None
    for number, tensor in enumerate(tensors):
        letters: list[Placement] = [Shard(dim) for dim in range(tensor.ndim)]
        letters += [Partial(kind) for kind in ("sum", "avg", "max") if is_reducible(tensor.dtype, kind)]
        for letter in letters:
            found[tuple((letter if other == number else Replicate(),) for other in range(len(tensors)))] = None
    found |= dict.fromkeys(place.claims)
    return list(found)[:_ASKED]


def _stale(
    place: SampleOnMesh, again: SecondCall, combination: Combination,
    kept: Propagation, fresh: Propagation | None, described: str,
) -> WrongRule:  # fmt: skip
    name = again.changed
    rule = Rule(place.ledger.sample.op, *_texts(kept))
    before, after = _decided(kept), "a refusal" if fresh is None else _decided(fresh)
    difference = f"{before} for {after}" if before != after else described
    why = ", as register_sharding lets only single integers into it" if by_register_sharding(place.call.op) else ""
    trial, *controls = (
        trial_record(Trial(case, place.mesh, combination, (), place.seed)) for case in (again.program, *again.controls)
    )
    return WrongRule(
        rule, str(place.mesh), place.shapes, place.arguments, f"{place.ledger.sample.origin}, and another {name}",
        VerdictKind.STALE_CACHE, f"the key of DTensor's cache leaves out {name}{why}: a call takes {difference}",
        trial, sum(tensor.numel() for tensor in place.call.tensors), place.call.in_args,
        left_out=name, controls=tuple(controls),
    )  # fmt: skip


def _texts(decided: Propagation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    outputs = tuple(placement_text(placements) for placements in decided.outputs or () if placements is not None)
    return tuple(placement_text(placements) for placements in decided.inputs), outputs


def _decided(decided: Propagation) -> str:
    inputs, outputs = _texts(decided)
    return f"{', '.join(inputs)} → {', '.join(outputs)}"
