"""Level 1 on one mesh dim: every combination of input placements, against every output placement at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import OpCase
from verifier.rules.claims import Claim, possible, same_others
from verifier.rules.enumerate import combinations_in_all, input_combinations
from verifier.rules.execute import Results, tensor_groups
from verifier.rules.ledger import Candidate
from verifier.rules.options import DECISIVE_FOR_MISSING, Position
from verifier.rules.results import Rule
from verifier.rules.sample_on_mesh import SampleOnMesh
from verifier.rules.samples import Values
from verifier.torch_internals.placements import Combination, Placements, placement_text
from verifier.torch_internals.registries import has_handler_of_user

__all__ = ["Exploration"]


_MOST_HANDLED = 12
"""At so many combinations a handler is run of whose op no rules are known: on threads each run takes milliseconds."""
_WIDE_DRAWS = 4
_SPECIAL_KINDS = 6
"""Draws of special values, of which each has another kind."""
_MOST_TIMES = 3
"""So many times as many draws are made where too few say anything, if DTensor is asked nothing."""
_SPECIAL_ROUNDS = 3
"""So often each kind is drawn where only special values tell anything."""

_FIRST_UNJUDGED = 1 << 20
"""Number of the first combination that is tried on one mesh alone; other meshes number theirs from 0."""


@dataclass(slots=True)
class _Try:
    """One combination at one size: ``columns`` are numbers of arguments as they are cut, ``partial`` those of Partials.

    ``masks`` has for each result the placements that all draws so far allow; ``told`` counts the draws that say
    something. ``empty`` is true if it was tried where the results are empty, of which another draw would say no more.
    """

    combination: Combination
    columns: tuple[int, ...]
    partial: tuple[int, ...]
    position: Position
    claim: Claim | None
    masks: list[int]
    told: int = 0
    empty: bool = False


class Exploration(SampleOnMesh):
    """A sample at one size on a mesh of one dim."""

    def take(self, case: OpCase, draw: int) -> None:
        """Make ``case`` the call that is run from now on."""
        super().take(case, draw)
        self._cut: dict[int, list[torch.Tensor]] = {}
        self._one_sided: dict[int, bool] = {}

    def read(self) -> Mapping[Combination, Claim]:
        """Return what DTensor claims now, by the placements at which it claims it."""
        self.claims = {}
        self.read_claims(input_combinations(*self._arguments, self.ledger.options.cap))
        return self.claims

    @property
    def _arguments(self) -> tuple[tuple[tuple[int, torch.dtype], ...], tuple[tuple[int, ...], ...]]:
        """The kinds of the tensors, and which of them are placed alike."""
        kinds = tuple((tensor.ndim, tensor.dtype) for tensor in self.call.tensors)
        return kinds, tensor_groups(self.call, self.case, self.ledger.options.blank)

    def run(self) -> None:
        """Run every combination, on one mesh dim."""
        ledger, options, report = self.ledger, self.ledger.options, self.ledger.report
        ledger.first_shapes = ledger.first_shapes or self.shapes
        kinds, groups = self._arguments
        free = input_combinations(kinds, groups, options.cap)
        if not options.blank:
            self.read_claims(free)
        if not self.claims and not options.blank and has_handler_of_user(self.call.op):  # type: ignore[arg-type]
            self._claim_for_handler(input_combinations(kinds, groups, _MOST_HANDLED))
        if not self.claims and not options.blank:
            report.untested[self.no_claims] += 1
            return
        if not options.tried:
            ledger.held.update(claim.rule for claim in self.claims.values())
            return
        # a handler is for what DTensor claims, of which nothing is asked if blank
        only_claims = options.claims_only or (self.handled is not None and not options.blank)
        tries = self._tries(list(dict.fromkeys(self.claims if only_claims else [*free, *self.claims])))
        if options.blank:  # what another size or mesh has refuted needs no more draws
            refuted = {one for one, candidate in ledger.candidates.items() if not candidate.masks}
            refuted |= {one.combination for one in tries if ledger.alike_only and not _is_alike(one.combination)}
            tries = [one for one in tries if one.combination not in refuted and not self._leaves_out(one.combination)]
        letters = sum(len(expected.letters) for expected in self.expected)
        report.combinations += letters * sum(not ledger.is_fatal(one.position) for one in tries)
        beyond = combinations_in_all(kinds, groups) - len(free)
        if beyond and not only_claims:
            report.untested["combinations beyond the cap (a pairwise sample is taken)"] += beyond
        for _ in self.draws():
            tries = [one for one in tries if self._try(one)]
            for claim in self.other_claims:
                self.try_claim(claim, None)
        if options.blank:
            told = any(one.told for one in tries)
            tries = self._try_on_more(tries) if told else self._try_on_special(tries)
        self._keep(tries)
        self._try_wide(tries)
        if not ledger.products and self.size == 0:
            self.note_products()
        self._try_special()

    def _claim_for_handler(self, combinations: Sequence[Combination]) -> None:
        """Let the user's handler of an op without rules be run; where it places the results, it says then."""
        op, outputs = self.ledger.sample.op, ((Replicate(),),) * len(self.expected)
        for one in filter(partial(possible, self.call), combinations):
            rule = Rule(op, tuple(map(placement_text, one)), ())
            self.claims[one] = Claim(rule, one, one, outputs, ())

    def run_unjudged(self) -> None:
        """Run the claims about which no other mesh has said anything: those that DTensor makes on this mesh alone."""
        judged = self.ledger.judged
        self.read()
        self.claims = {one: claim for one, claim in self.claims.items() if claim.rule not in judged}
        tries = self._tries(list(self.claims), _FIRST_UNJUDGED)
        for _ in self.draws() if tries else ():
            tries = [one for one in tries if self._try(one)]

    def _leaves_out(self, combination: Combination) -> bool:
        """Return whether a rank has no element of a sharded dim, and such combinations are not wanted."""
        usual = self.ledger.first_shapes or self.shapes
        if [*map(len, usual)] != [*map(len, self.shapes)]:
            usual = self.shapes
        return any(
            isinstance(placement, Shard)
            and self.ledger.options.leaves_out(now[placement.dim], self.mesh.world_size, before[placement.dim])
            for now, before, (placement,) in zip(self.shapes, usual, combination, strict=True)
        )

    def note_products(self) -> None:
        """Note the claims that have not failed, so that products of them are tried on meshes of several dims."""
        self.ledger.products = {
            tuple(p for (p,) in c): tuple(p for (p,) in claim.outputs)
            for c, claim in self.claims.items()
            if claim.by_rank and not self.ledger.has_failed(claim.rule)
        }

    def _tries(self, combinations: Sequence[Combination], first: int = 0) -> list[_Try]:
        """Return what is to be tried at each draw. Columns get numbers, since placements take long to hash."""
        numbers: dict[tuple[int, Placements], int] = {}
        tries = []
        for number, combination in enumerate(combinations, first):
            columns = tuple(numbers.setdefault(column, len(numbers)) for column in enumerate(combination))
            partial = tuple(c for c, (p,) in zip(columns, combination, strict=True) if p.is_partial())
            position = (self.ledger.number, self.mesh_number, self.size, number)
            masks = [-1] * len(self.expected)
            tries.append(_Try(combination, columns, partial, position, self.claims.get(combination), masks))
        self._columns = list(numbers)
        return tries

    def _try(self, one: _Try) -> bool:
        """Run a combination on the values of this draw; return whether it is worth running on others."""
        ledger, claim = self.ledger, one.claim
        if ledger.is_fatal(one.position):
            self.died(one.combination, claim)
            return False
        if self._says_no_more(one):
            return True
        one.empty |= self.vacuous
        if claim is not None and self.handled is not None:
            if ledger.hangs(claim.rule):
                return False
            ledger.enter(one.position)
            ledger.report.runs += 1
            self.try_claim(claim, None)
            return True
        results, masks = self._run_and_classify(one, one.masks)
        if claim is not None:
            self.try_claim(claim, results if claim.plain else None, masks)
            one.masks = masks or [0] * len(self.expected)
        elif masks:
            one.masks = masks
        else:
            ledger.candidates[one.combination] = Candidate([])
            return False
        one.told += (
            self.telling
            and all(expected.decisive(DECISIVE_FOR_MISSING) for expected in self.expected)
            and not any(self._is_one_sided(column) for column in one.partial)
        )
        return True

    def _says_no_more(self, one: _Try) -> bool:
        """Return whether nobody claims a combination that was tried with empty results, as they are here, too."""
        return one.claim is None and one.empty and self.vacuous and not self.reference.others

    def _try_on_more(self, tries: Sequence[_Try]) -> list[_Try]:
        """Try on more draws what too few have told, as those of results that have the same sign everywhere."""
        enough, draws = self.ledger.options.telling_draws, self.ledger.options.draws
        kept = list(tries)
        for number in range(draws, _MOST_TIMES * draws):
            if all(one.told >= enough for one in kept):
                break
            if self.take_drawn(number) and self.telling and self.finite:
                kept = [one for one in kept if one.told >= enough or self._try(one)]
        return kept

    def _try_on_special(self, tries: Sequence[_Try]) -> list[_Try]:
        """Try what usual values do not tell, as those of ``isnan``, on special ones; they tell nothing of a Partial."""
        kept = [one for one in tries if not one.partial]
        for number in range(_SPECIAL_ROUNDS * _SPECIAL_KINDS):
            if self.take_drawn(number, Values.SPECIAL) and self.telling and self.finite:
                kept = [one for one in kept if self._try(one)]
        return kept + [one for one in tries if one.partial]

    def _run_and_classify(self, one: _Try, within: Sequence[int]) -> tuple[list[Results] | Exception, list[int]]:
        self.ledger.enter(one.position)
        results = self._run(one)
        self.ledger.report.runs += 1
        for expected in self.expected:
            expected.expect_parts(bool(one.partial))
        return results, self._classify(results, within)

    def _is_one_sided(self, column: int) -> bool:
        """Return whether a Partial argument came out with all parts the same, so that this draw says nothing of it."""
        known = self._one_sided.get(column)
        if known is None:
            first, *rest = self._locals(column)
            known = self._one_sided[column] = all(torch.equal(first, other) for other in rest)
        return known

    def _locals(self, column: int) -> list[torch.Tensor]:
        made = self._cut.get(column)
        if made is None:
            made = self._cut[column] = self.cuts.of(*self._columns[column])
        return made

    def _keep(self, tries: Sequence[_Try]) -> None:
        """Note what every draw here has allowed; what another size or mesh has refuted stays refuted."""
        claimed = {combination[: self.call.in_args] for combination in self.claims}
        for one in tries:
            candidate = self.ledger.candidates.setdefault(one.combination, Candidate(list(one.masks)))
            candidate.keep(one.masks, alike=self.ledger.options.blank)
            candidate.draws += one.told
            if one.told:
                candidate.shapes.add(self.shapes)
                candidate.world_sizes.add(self.mesh.world_size)
            candidate.claimed |= one.combination[: self.call.in_args] in claimed

    def _try_wide(self, tries: Sequence[_Try]) -> None:
        """Refute what is not claimed and has held only because of the values that its source draws.

        Where 10 is filled in among smaller numbers, the maximum of ranks is 10 wherever one of them fills it in.
        """
        candidates = {one.combination: self.ledger.candidates[one.combination] for one in tries if one.claim is None}
        told = self.ledger.told
        for draw in range(_WIDE_DRAWS if any(candidate.masks for candidate in candidates.values()) else 0):
            if not self.take_drawn(draw, Values.WIDE):
                continue
            for one in tries:
                if (
                    one.claim is None
                    and not self._says_no_more(one)
                    and (candidate := candidates[one.combination]).masks
                ):
                    candidate.masks = self._run_and_classify(one, candidate.masks)[1]
        self.ledger.told = told  # what claims have met, which are not held against these draws

    def _run(self, one: _Try) -> list[Results] | Exception:
        call = self.call
        run = call.without_buffers if call.buffers and one.claim is None else call
        columns = [self._locals(column) for column in one.columns]
        try:
            if self.ledger.careful:
                for tensors in zip(*columns, strict=True):
                    call.raise_as_on_meta(tensors)
            return [run(tensors) for tensors in zip(*columns, strict=True)]
        except Exception as error:  # noqa: BLE001 - an op may raise anything on a rank's part; that refutes the rule
            return error

    def _classify(self, results: list[Results] | Exception, within: Sequence[int]) -> list[int]:
        if isinstance(results, Exception):
            return []
        count = len(self.expected)
        others = self.reference.others
        for made in results:
            if len(made.tensors) != count or ((others or made.others) and not same_others(made.others, others)):
                return []
        masks = []
        for number, (expected, bits) in enumerate(zip(self.expected, within, strict=True)):
            mask = expected.represented([made.tensors[number] for made in results], bits)
            if not mask:
                return []
            masks.append(mask)
        return masks

    def _try_special(self) -> None:
        """Try the claims that held on values that a Partial cannot always carry, each kind by itself."""
        ledger = self.ledger
        claims = [claim for claim in self.claims.values() if not ledger.has_failed(claim.rule)]
        # the first size has all kinds, the others a few
        kinds = range(_SPECIAL_KINDS) if self.size == 0 else range(self.size, _SPECIAL_KINDS, 2)
        for kind in kinds if claims and not self.hangs() else ():
            if not self.take_drawn(kind, Values.SPECIAL):
                continue
            for claim in claims:
                if claim.rule in ledger.special:
                    continue
                placed, results = self.run_claim(claim)
                found = None if self.refused(results) else self.mismatch(placed, results)
                if found is not None and found.clear:
                    ledger.special[claim.rule] = replace(self.counterexample(claim, found), special=True)

    # --------------------------------------------------------------------------------------------------------- results
    def best_outputs(self, combination: Combination, masks: Sequence[int]) -> list[Placement] | None:
        """Return the most useful placement of each result that ``masks`` allow; None if there is none.

        What an op writes to an argument has to have the placement of that argument.
        """
        masks = list(masks)
        for number, index in zip(self.call.written, self.reference.written, strict=True):
            if number not in self.call.buffers:
                masks[index] &= self.expected[index].bit(combination[number][0])
        if not all(masks):
            return None
        return [_best(expected.letters, mask) for expected, mask in zip(self.expected, masks, strict=True)]

    def with_buffers(self, combination: Combination, outputs: Sequence[Placement]) -> Combination:
        """Return the combination in which each ``out=`` argument is placed as what is written to it."""
        placed = list(combination)
        for number, index in zip(self.call.written, self.reference.written, strict=True):
            if number in self.call.buffers:
                placed[number] = (outputs[index],)
        return tuple(placed)


def _best(letters: Sequence[Placement], mask: int) -> Placement:
    """Return the most useful of the placements that the bits of ``mask`` allow: Replicate, then Shard, then Partial."""
    return next(letter for number, letter in enumerate(letters) if mask >> number & 1)


def _is_alike(combination: Combination) -> bool:
    """Return whether no tensor is sharded, or all are, by the same dim."""
    shards = {placement.dim if isinstance(placement, Shard) else None for (placement,) in combination}
    return len(shards) <= 1
