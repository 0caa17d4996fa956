"""Level 1 on meshes of several dims: products of the rules that hold on one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.placements.algebra import sharded_dim, take_local
from verifier.placements.alphabet import Alphabet
from verifier.rules.claims import Claim, judge_claim, possible, read_claim
from verifier.rules.enumerate import input_combinations, product_choices
from verifier.rules.execute import tensor_groups
from verifier.rules.options import DRAWS_FOR_MISSING
from verifier.rules.results import Rule
from verifier.rules.sample_on_mesh import SampleOnMesh
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.placements import Combination, masked_extent, placement_text, strided_shard
from verifier.torch_internals.rule_code.constants import names_strided_shards

__all__ = ["Products"]


_LEAST_DRAWS = 8
"""Draws in which a product has to hold: each of its factors has held in more."""


class Products(SampleOnMesh):
    """A sample at one size on a mesh of several dims."""

    @cached_property
    def _promised(self) -> dict[Combination, Combination]:
        """What the factors of each product promise of the results."""
        return {}

    def read(self) -> Mapping[Combination, Claim]:
        """Return what DTensor claims now, by the placements at which it claims it."""
        claims = {}
        for _, combination in self._combinations:
            claim = read_claim(self.reader, self.call, self.ledger.sample.op, combination, self.mesh, self.reference)
            if claim is not None and self.reducible(claim) and not _is_masked_twice(claim):
                claims[combination] = claim
        return claims

    @cached_property
    def _combinations(self) -> list[tuple[int, Combination]]:
        """The combinations that are tried, with their numbers: products of rules that hold on one mesh dim."""
        ledger = self.ledger
        rules = sorted(ledger.products, key=str)
        if not ledger.options.products:
            return []
        seed = zlib.crc32(f"{ledger.sample.op}/{ledger.sample.origin}".encode())
        combinations: dict[Combination, None] = {}
        for choice in self._chosen(rules, seed) if rules else ():
            combination = _columns([rules[i] for i in choice])
            combinations[combination] = None
            self._promised[combination] = _columns([ledger.products[rules[i]] for i in choice])
        combinations |= dict.fromkeys(self._mixed(rules, seed) if rules else ())
        combinations |= dict.fromkeys(self._enumerated(frozenset(rules), seed))
        combinations |= dict.fromkeys(self._strided())
        return [
            (number, combination)
            for number, combination in enumerate(combinations)
            if all(Alphabet.legal(placements) for placements in combination)
        ]

    def run(self) -> None:
        """Try claims on a mesh of several dims, and note the products of rules that DTensor does not claim."""
        unclaimed = self.try_claims()
        if not self.ledger.options.claims_only and self.handled is None:
            self._note_missing([one for one in unclaimed if self._may_be_missing(*one)])

    def try_claims(self) -> list[tuple[Combination, Combination]]:
        """Try products of rules that hold on one mesh dim, whatever DTensor makes of them; return the unclaimed ones.

        Other combinations that DTensor claims are tried, too.
        """
        ledger = self.ledger
        next(self.draws(), None)  # the first one that came upon no infinity, if there is any
        unclaimed: list[tuple[Combination, Combination]] = []
        for number, combination in self._combinations:
            position = (ledger.number, self.mesh_number, self.size, number)
            claim = read_claim(self.reader, self.call, ledger.sample.op, combination, self.mesh, self.reference)
            if ledger.is_fatal(position):
                self.died(combination, claim)
                continue
            ledger.enter(position)
            if claim is None and combination in self._promised:
                unclaimed.append((combination, self._promised[combination]))
            if claim is None or not self.reducible(claim):
                continue
            if _is_masked_twice(claim):
                ledger.report.untested["a masked partial on two mesh dims: level 2 only"] += 1
                continue
            self.try_claim(claim, None)
            ledger.report.runs += 1
            ledger.report.combinations += 1
        return unclaimed

    def _may_be_missing(self, inputs: Combination, outputs: Combination) -> bool:
        """Return whether DTensor might claim a product: not of unlike Partials, or where a rank has no elements."""
        placed = (*inputs, *outputs)
        if any(masked_extent(p) is not None for placements in placed for p in placements):
            return False
        kinds = [{p.reduce_op for p in placements if p.is_partial()} for placements in placed]  # type: ignore[attr-defined]
        empty = any(
            not take_local(tensor, placements, self.mesh.shape, self.mesh.coordinate(rank), 0).numel()
            for tensor, placements in zip(self.call.tensors, inputs, strict=True)
            if tensor.numel() and any(p.is_shard() for p in placements)
            for rank in range(self.mesh.world_size)
        )
        return not empty and all(len(kind) < 2 or kind == {"sum", "avg"} for kind in kinds)

    def _note_missing(self, unclaimed: Sequence[tuple[Combination, Combination]]) -> None:
        """Note the products that hold in all draws, and at which DTensor communicates though it claims each factor."""
        ledger = self.ledger
        held = {
            inputs: Claim(_rule(ledger.sample.op, inputs, outputs), inputs, inputs, outputs, ())
            for inputs, outputs in unclaimed
        }
        draws = 0
        for draw in range(DRAWS_FOR_MISSING if held else 0):
            if not self.take_drawn(draw) or not (self.finite and self.telling):
                continue
            draws += 1
            for inputs, claim in list(held.items()):
                if not self._bears_out(claim):
                    del held[inputs]
        if draws < _LEAST_DRAWS:
            return
        for inputs, claim in held.items():
            decided = self.reader.at(inputs, self.mesh.shape)
            ledger.missing_products[claim.rule] = inputs, None if decided is None else decided.inputs, draws

    def _bears_out(self, claim: Claim) -> bool:
        ledger = self.ledger
        ledger.report.runs += 1
        try:
            results = [
                self.call([self.cuts.of(n, placements)[rank] for n, placements in enumerate(claim.inputs)])
                for rank in range(self.mesh.world_size)
            ]
        except Exception:  # noqa: BLE001 - an op may raise anything on a rank's part; that refutes the rule
            return False
        return judge_claim(claim, results, self.expected, self.reference.others, self.mesh) is None

    def _chosen(self, rules: Sequence[tuple[Placement, ...]], seed: int) -> list[tuple[int, ...]]:
        """Return which of ``rules`` to take on each mesh dim: every choice if the limit allows.

        Else half are rules taken on every mesh dim, which cut one tensor dim several times: a strategy that works out
        sizes or offsets from one mesh dim alone goes wrong there. The rest is a pairwise cover.
        """
        most, ndim = self.ledger.options.products, self.mesh.ndim
        if len(rules) ** ndim <= most:
            return list(product(range(len(rules)), repeat=ndim))
        sharding = [i for i, rule in enumerate(rules) if any(sharded_dim(placement) is not None for placement in rule)]
        order = torch.randperm(len(sharding), generator=torch.Generator().manual_seed(seed)).tolist()
        repeated = [(sharding[i],) * ndim for i in order[: most // 2]]
        cover = product_choices(len(rules), ndim, most - len(repeated), seed)
        return list(dict.fromkeys([*repeated, *cover]))

    def _mixed(self, rules: Sequence[tuple[Placement, ...]], seed: int) -> Iterator[Combination]:
        """Yield combinations that are a rule on one mesh dim and anything at all on the others.

        DTensor is to communicate there; a strategy that looks at one mesh dim only claims them. One that lists its
        rules for a single mesh dim cannot do so.
        """
        if self.reader.lists_rules:
            return
        kinds = tuple((tensor.ndim, tensor.dtype) for tensor in self.call.tensors)
        anything = input_combinations(kinds, tensor_groups(self.call, self.case), self.ledger.options.cap)
        generator = torch.Generator().manual_seed(seed)
        for number in range(self.ledger.options.products):
            other = anything[int(torch.randint(0, len(anything), (), generator=generator))]
            rule = rules[int(torch.randint(0, len(rules), (), generator=generator))]
            at = number % self.mesh.ndim
            yield tuple(
                tuple(p if mesh_dim == at else q for mesh_dim in range(self.mesh.ndim))
                for p, (q,) in zip(rule, other, strict=True)
            )

    def _enumerated(self, rules: frozenset[tuple[Placement, ...]], seed: int) -> list[Combination]:
        """Return what the strategy enumerates for this mesh and is no product of ``rules``, as many as other products.

        A strategy that looks at the whole mesh may have rules for several mesh dims alone.
        """
        found = [
            one
            for one in self.reader.enumerated(self.mesh.shape)
            if not rules.issuperset(zip(*one, strict=True)) and self._is_possible(one)
        ]
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
        return [found[number] for number in order[: self.ledger.options.products]]

    def _strided(self) -> Iterator[Combination]:
        """Yield combinations with a strided shard, for a strategy of the user's that names this placement.

        One tensor, or all with its shape, is cut by the last mesh dim first, or by one mesh dim as if that were so.
        """
        op = self.call.op
        if not (isinstance(op, OpOverload) and names_strided_shards(op)):
            return
        rest = (Replicate(),) * (self.mesh.ndim - 1)
        for given in self.call.tensors[:1]:
            for dim, extent in enumerate(given.shape):
                factor = self.mesh.shape[-1]
                if extent % self.mesh.world_size:
                    continue
                strided = strided_shard(dim, factor)
                for placements in ((strided, *rest[1:], Shard(dim)), (strided, *rest)):
                    yield tuple(
                        placements if tensor.shape == given.shape else (Replicate(),) * self.mesh.ndim
                        for tensor in self.call.tensors
                    )

    def _is_possible(self, combination: Combination) -> bool:
        columns = [tuple((placements[mesh_dim],) for placements in combination) for mesh_dim in range(self.mesh.ndim)]
        masked = any(masked_extent(p) is not None for placements in combination for p in placements)
        return not masked and all(possible(self.call, column) for column in columns)


def _columns(rules: Sequence[Sequence[Placement]]) -> Combination:
    """Return the placements of each tensor, from those of all tensors on each mesh dim."""
    return tuple(tuple(column) for column in zip(*rules, strict=True))


def _rule(op: str, inputs: Combination, outputs: Combination) -> Rule:
    return Rule(op, tuple(map(placement_text, inputs)), tuple(map(placement_text, outputs)))


def _is_masked_twice(claim: Claim) -> bool:
    return any(sum(masked_extent(p) is not None for p in placements) > 1 for placements in claim.masked)
