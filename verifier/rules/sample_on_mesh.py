"""A sample at one size on one mesh: its draws, what DTensor claims there, and whether the claims hold."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import Partial, Replicate

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.ops import is_users
from verifier.core.verdict import VerdictKind
from verifier.placements.algebra import is_modelled
from verifier.placements.partials import is_reducible, largest_part
from verifier.records.values import trial_record
from verifier.rules.claims import (
    ASKED,
    OWN_CODE,
    Claim,
    claim_reader,
    judge_claim,
    listed_claims,
    possible,
    read_claim,
    run_claim,
    where_to_ask,
)
from verifier.rules.classify import Expected, Mismatch
from verifier.rules.execute import CALL_ERRORS, Cuts, Results, holds_tensor
from verifier.rules.handled import FOR_BACKWARD, HandledCalls, has_hung
from verifier.rules.ledger import Candidate, Ledger
from verifier.rules.options import DECISIVE
from verifier.rules.results import Rule, WrongRule
from verifier.rules.samples import Values, is_rare
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.claims.values import ListedRule
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.placements import Combination, Placements, placement_text
from verifier.torch_internals.refusals import is_refusal, raised_in
from verifier.torch_internals.registries import has_own_handler

__all__ = ["CALL_ERRORS", "IMPOSSIBLE", "SampleOnMesh"]

_LARGE = 1 << 20
_ASKED_EVERYWHERE = 3
"""Samples at which a user's strategy is asked at all placements, also those that it does not list."""
_CONVERTING = frozenset({"_to_copy", "copy", "copy_", "to", "type_as"})
"""Ops whose results are the same numbers in another dtype."""
REFUSED = "that a rule claims and DTensor's handler for the op refuses"
OF_ONES_OWN = "a placement of a class that is not torch's: level 2 only"
HUNG = "that a handler would have to run which has not come back before"
IMPOSSIBLE = "a placement that a tensor of this dtype and shape cannot have"


class SampleOnMesh(ABC):
    """A sample at one size on one mesh.

    Raises
    ------
    RuntimeError, ValueError, IndexError, TypeError
        What the call raises on the whole tensors, so that there is nothing to compare with; see ``CALL_ERRORS``.
    """

    def __init__(self, ledger: Ledger, case: OpCase, mesh: MeshSpec, mesh_number: int, size: int) -> None:
        self.ledger, self.mesh, self.mesh_number, self.size = ledger, mesh, mesh_number, size
        self.take(case, 0)
        self.reader = claim_reader(self.call.op, case.args, case.kwargs, self.reference.returned, ledger.watch)  # type: ignore[arg-type]
        self.reader.dim_names = mesh.names
        self.shapes = tuple(tuple(tensor.shape) for tensor in self.call.tensors)
        self.arguments = _arguments(case)
        self.claims: dict[Combination, Claim] = {}
        self.other_claims: list[Claim] = []
        """What DTensor claimed when it was asked again, and had not claimed before."""
        self.no_claims = "DTensor has no rule for this call"
        self.handled = HandledCalls(mesh) if has_own_handler(self.call.op) else None  # type: ignore[arg-type]
        """Runs what DTensor runs in the op's place; None for an op without a handler."""
        self._bits: dict[Rule, list[int]] = {}

    def close(self) -> None:
        """End the ranks on which handlers run."""
        if self.handled is not None:
            self.handled.close()

    # ----------------------------------------------------------------------------------------------------------- draws
    def take(self, case: OpCase, draw: int) -> None:
        """Make ``case`` the call that is run from now on."""
        self.case, self.draw = case, draw
        self.call, self.reference = self.ledger.run(case)
        terms = sum(t.numel() for t in self.call.tensors) + sum(t.numel() for t in self.reference.tensors)
        parts = self.mesh.world_size
        # a cast to a narrower dtype rounds the parts of a Partial, whatever the whole is
        widest = max((_width(t) for t in self.call.tensors), default=0)
        self.expected = [
            Expected(t, parts, case.exact and not 0 < _width(t) < widest, terms, largest_part(t.dtype))
            for t in self.reference.tensors
        ]
        self.vacuous = not any(t.numel() for t in self.reference.tensors)
        self.telling = all(_telling(t) for t in self.reference.tensors)
        self.ledger.told |= self.telling
        self.finite = all(expected.finite for expected in self.expected)
        text = f"{self.ledger.sample.op}/{self.ledger.sample.origin}/{self.size}/{draw}/{self.mesh}"
        self.seed = zlib.crc32(text.encode()) ^ self.ledger.options.seed
        self.cuts = Cuts(self.call.tensors, self.mesh.shape, self.seed)

    def draws(self) -> Iterator[bool]:
        """Make one draw after the other current.

        Left out are draws whose call raises, and those that came upon an infinity or NaN, by a division by 0 for one,
        where another did not: these are special values, which a Partial cannot always carry.
        """
        others = range(1, self.ledger.options.draws)
        finite = self.finite or any(self.take_drawn(draw) and self.finite for draw in others)
        for draw in (0, *others):
            if (draw == self.draw or self.take_drawn(draw)) and (self.finite or not finite):
                yield True

    def take_drawn(self, draw: int, values: Values = Values.USUAL) -> bool:
        """Make a draw of the sample the call that is run from now on; return whether there is one that runs."""
        case = self.ledger.draw(self.size, draw, values)
        if case is None:
            return False
        try:
            self.take(case, draw)
        except CALL_ERRORS:
            return False
        return True

    # ---------------------------------------------------------------------------------------------------------- claims
    @abstractmethod
    def read(self) -> Mapping[Combination, Claim]:
        """Return what DTensor claims now, by the placements at which it claims it."""

    def judge(self, claims: Mapping[Combination, Claim], ledger: Ledger) -> None:
        """Hold ``claims``, and no other ones, against every draw; ``ledger`` takes down what comes of it."""
        self.ledger = ledger
        if self.draw and not self.take_drawn(0):
            return
        for _ in self.draws():
            for claim in claims.values():
                if (claim.rule, self.mesh.ndim) not in ledger.failed:
                    self.try_claim(claim, None)

    def read_claims(self, combinations: Sequence[Combination]) -> None:
        op = self.ledger.sample.op
        if op in OWN_CODE:
            self.no_claims = "DTensor runs code of its own instead of the op: level 2 only"
            return
        if not self.reader.lost:  # else it has noted why
            self.reader.failures.clear()
        options = self.ledger.options
        first = self.mesh_number == self.size == 0
        of_torchs = is_torchs(self.call.op)  # type: ignore[arg-type]
        listed = [self.reader.rules_now() for _ in range(2)] if first and not of_torchs else []
        most = ASKED if options.claims_only else None
        if self.ledger.traced is not None and is_rare(self.ledger.sample):  # at another size a trace seldom finds more
            combinations = self.ledger.traced
        asked = where_to_ask(self.reader, self.call, combinations, self.mesh.shape, most, options.asked)
        kept = [combination for combination in asked if possible(self.call, combination)]
        if impossible := len(asked) - len(kept):
            self.ledger.report.untested[IMPOSSIBLE] += impossible
        # a rule that keeps a state may look at no placements and list other rules each time
        self.reader.asks_everywhere = of_torchs or (first and self.ledger.number < _ASKED_EVERYWHERE)
        if first and self.reader.is_decomposed:
            self.ledger.traced = asked
        in_full = _each_placement(kept) if first else frozenset()
        for combination in kept:
            claim = self._claim_at(combination, combination in in_full)
            if claim is not None:
                self.claims[combination] = claim
                bits = [expected.bit(p) for (p,), expected in zip(claim.outputs, self.expected, strict=False)]
                if claim.plain and len(bits) == len(self.expected) and all(bits):
                    self._bits[claim.rule] = bits
        # rules of torch's keep no state of their own: a few samples are enough
        if first and (options.samples_called_again or not of_torchs):
            self.other_claims = [*self._ask_again(kept), *self._not_always_listed(listed)]
        if self.reader.lost:
            self.no_claims = self.reader.why_lost
        for wrong in (*self.failing(), *self.writing(), *(self.misdescribed() if first else ())):
            self.ledger.note(wrong, 1)

    def _claim_at(self, combination: Combination, in_full: bool = False) -> Claim | None:
        """Return what DTensor claims at ``combination``; None if there is nothing that level 1 can try."""
        op = self.ledger.sample.op
        claim = read_claim(self.reader, self.call, op, combination, self.mesh, self.reference, in_full)
        if claim is not None and not _is_modelled(claim):
            self.ledger.report.untested[OF_ONES_OWN] += 1
            return None
        if claim is not None and not self.reducible(claim):
            self.ledger.report.untested[IMPOSSIBLE] += 1
            return None
        return claim

    def _ask_again(self, combinations: Sequence[Combination]) -> list[Claim]:
        """Ask about ``combinations`` again, the last one first; return the claims that DTensor has not made before.

        A rule that keeps state, which counts its calls for one, answers by what it was asked before.
        """
        again = ((combination, self._claim_at(combination)) for combination in reversed(combinations))
        return [
            replace(claim, again=True)
            for combination, claim in again
            if claim is not None and claim != self.claims.get(combination)
        ]

    def _not_always_listed(self, before: Sequence[Sequence[ListedRule]]) -> list[Claim]:
        """Return what DTensor claims if it asks once, as it does of a call: rules that are not listed each time.

        ``before`` has the rules that were listed when the strategy was first asked about the call. One that keeps
        something of the call before it lists other rules then: later, that is the same call.
        """
        times = [*before, self.reader.rules_now()] if before else []
        by_text = {repr(rule): rule for rules in times for rule in rules}  # a masked partial is equal to itself alone
        always = set(by_text).intersection(*(map(repr, rules) for rules in times))
        some = [rule for text, rule in by_text.items() if text not in always]
        return listed_claims(some, self.call, self.ledger.sample.op, self.mesh, self.reference)

    def failing(self) -> Iterator[WrongRule]:
        """Yield where DTensor failed, when it was last asked, instead of naming rules: once for each way to fail."""
        seen = set()
        for combination, failure in self.reader.failures.items():
            if (failure.kind, failure.where) in seen:
                continue
            seen.add((failure.kind, failure.where))
            rule = Rule(self.ledger.sample.op, tuple(placement_text(p) for p in combination), ())
            kind = VerdictKind.CRASH if failure.kind else VerdictKind.HANG
            message = f"the rule raised {failure.kind}: {failure.message}" if failure.kind else failure.message
            wrong = self._wrong(rule, combination, Mismatch(kind, message, raised=failure.kind))
            yield replace(wrong, fails=True)

    def writing(self) -> Iterator[WrongRule]:
        """Yield where DTensor would run the op with other arguments, because its strategy has written to them.

        A strategy gets the lists among the arguments themselves. Where DTensor redistributes, it takes the arguments of
        the local call from what the strategy has left. Only what changes the result of the call is wrong.
        """
        seen = set()
        for combination, args in self.reader.written.items():
            found = self._mismatch_with(args)
            if found is not None and found.kind not in seen:
                seen.add(found.kind)
                rule = Rule(self.ledger.sample.op, tuple(map(placement_text, combination)), ())
                yield replace(self._wrong(rule, combination, found), writes=True)

    def misdescribed(self) -> Iterator[WrongRule]:
        """Yield how the fake kernel of an op of the user's describes results of another shape or dtype than there are.

        DTensor then gives them that shape and dtype, however they are placed.
        """
        if not is_users(self.ledger.sample.op):
            return
        described = self.reader.of_fake_kernel()
        results = self.reference.tensors[: self.reference.returned_tensors]
        if described is None or len(described) != len(results):
            return
        for number, ((shape, dtype), result) in enumerate(zip(described, results, strict=True)):
            if shape != tuple(result.shape):
                found = VerdictKind.WRONG_SHAPE
                text = f"output {number} has shape {list(result.shape)}, and the op's fake kernel says {list(shape)}"
            elif dtype != result.dtype:
                found = VerdictKind.WRONG_DTYPE
                text = f"output {number} has dtype {result.dtype}, and the op's fake kernel says {dtype}"
            else:
                continue
            whole = tuple((Replicate(),) for _ in self.call.tensors)
            rule = Rule(self.ledger.sample.op, tuple(map(placement_text, whole)), ())
            yield self._wrong(rule, whole, Mismatch(found, text))
            return

    def _mismatch_with(self, args: Sequence[object]) -> Mismatch | None:
        """Return how the call on whole tensors differs with ``args``, in which slots stand for the tensors."""
        why = "the strategy writes to the arguments of the call, and DTensor runs the op with what it leaves"
        try:
            made = self.call.rewritten(self.call.op, args, self.call.tensors)
        except CALL_ERRORS as error:
            return Mismatch(VerdictKind.CRASH, why, raised=type(error).__name__)
        pairs = [*zip(made.tensors, self.reference.tensors, strict=False)]
        if len(made.tensors) != len(self.reference.tensors) or any(one.shape != other.shape for one, other in pairs):
            return Mismatch(VerdictKind.WRONG_SHAPE, why)
        if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
            return Mismatch(VerdictKind.WRONG_VALUE, why)
        return None

    def reducible(self, claim: Claim) -> bool:
        """Return whether collectives reduce each result as it is claimed, or do not say plainly that they cannot.

        They refuse a maximum of complex numbers; an average of bools or integers ends in an error that names neither.
        """
        return all(
            not (placement.is_partial() and expected.dtype.is_complex)
            or is_reducible(expected.dtype, placement.reduce_op)  # type: ignore[attr-defined]
            for expected, placements in zip(self.expected, claim.outputs, strict=False)
            for placement in placements
        )

    def try_claim(self, claim: Claim, results: list[Results] | Exception | None, masks: Sequence[int] = ()) -> None:
        """Hold the claim against this draw. ``masks`` is what the results represent, where that is known."""
        if self.hangs():
            self.ledger.report.untested[HUNG] += 1
            return
        bits = self._bits.get(claim.rule)
        if results is not None and bits and masks and all(a & b for a, b in zip(bits, masks, strict=True)):
            self._hold(claim)
            return
        if results is None:
            claim, results = self.run_claim(claim)
        if self.refused(results):
            self.ledger.report.untested[REFUSED] += 1
            return
        found = self.mismatch(claim, results)
        if found is None:
            self._hold(claim)
        elif not found.clear:
            self.ledger.unclear.add(claim.rule)
        elif (
            (is_rare(self.ledger.sample) and not self.finite)
            or self._is_hidden(results)
            or self._sums_bools(claim, found)
        ):
            # such as a division by a number that is 0, or a 0 that hides a logarithm of 0
            self.ledger.special.setdefault(claim.rule, replace(self.counterexample(claim, found), special=True))
        else:
            self.ledger.note(self.counterexample(claim, found), self.mesh.ndim)

    def _sums_bools(self, claim: Claim, found: Mismatch) -> bool:
        """Return whether a rule of the user's computes with a pending sum of bools, and has other values for that.

        Collectives make that an OR, so that no rule of arithmetic holds for it, true as it is for numbers. A rule of an
        op that does nothing but convert is about dtypes, and has to leave bools out.
        """
        op = self.call.op
        if found.kind is not VerdictKind.WRONG_VALUE or not isinstance(op, OpOverload) or is_torchs(op):
            return False
        if op.__name__.partition(".")[0] in _CONVERTING:
            return False
        pairs = zip(self.call.tensors, claim.inputs, strict=False)
        return any(tensor.dtype == torch.bool and Partial("sum") in placements for tensor, placements in pairs)

    def _is_hidden(self, results: list[Results] | Exception) -> bool:
        """Return whether ranks got an infinity or NaN that zeros alone hide in the result, as in ``xlogy(0, 0)``.

        With 1 for each 0 of one argument, the whole result is then an infinity or NaN, too.
        """
        if isinstance(results, Exception) or not self.finite:
            return False
        if all(_is_finite(tensor) for one in results for tensor in one.tensors):
            return False
        for number, tensor in enumerate(self.call.tensors):
            if not (tensor.is_floating_point() and bool((tensor == 0).any())):
                continue
            filled = [*self.call.tensors]
            filled[number] = torch.where(tensor == 0, torch.ones_like(tensor), tensor)
            try:
                shown = self.call(filled)
            except CALL_ERRORS:
                continue
            if not all(_is_finite(one) for one in shown.tensors):
                return True
        return False

    def run_claim(self, claim: Claim) -> tuple[Claim, list[Results] | Exception]:
        """Return what each rank gets where DTensor applies ``claim``, or what the first rank to raise has raised.

        A handler places its results as it likes; the claim that comes back says where.
        """
        try:
            if self.handled is None:
                return claim, run_claim(claim, self.call, self.cuts, self.mesh)
            results, placed = self.handled.run(self.call, self.cuts, claim.inputs)
            if not claim.by_rank and self.ledger.sample.op in FOR_BACKWARD:
                results = [replace(made, tensors=made.tensors[:1] + self.reference.tensors[1:]) for made in results]
                placed = placed[:1]
        except Exception as error:  # noqa: BLE001 - an op may raise anything on a rank's part; that refutes the rule
            return claim, error
        outputs = tuple(own or promised for own, promised in zip(placed, claim.outputs, strict=False))
        outputs = (*outputs, *claim.outputs[len(outputs) :])
        rule = claim.rule if claim.by_rank else replace(claim.rule, outputs=tuple(map(placement_text, outputs)))
        return replace(claim, rule=rule, outputs=outputs), results

    def hangs(self) -> bool:
        """Return whether the op has a handler that has not come back before, which costs seconds each time."""
        return self.handled is not None and has_hung(self.call.op)

    def refused(self, results: list[Results] | Exception) -> bool:
        """Return whether DTensor's handler says plainly that it does not support what its rule claims."""
        return self.handled is not None and isinstance(results, Exception) and is_refusal(results)

    def _hold(self, claim: Claim) -> None:
        ledger = self.ledger
        if self.vacuous or not all(expected.decisive(DECISIVE) for expected in self.expected):
            ledger.vacuous.add(claim.rule)
        else:
            (ledger.held if self.telling else ledger.constant).add(claim.rule)

    def mismatch(self, claim: Claim, results: list[Results] | Exception) -> Mismatch | None:
        """Return how the ranks' results differ from what is claimed; None if they do not."""
        if isinstance(results, Exception):
            text = (str(results).strip() or _where(results)).splitlines()[0]
            kind = type(results).__name__
            return Mismatch(VerdictKind.CRASH, f"a rank raised {kind}: {text}", raised=kind)
        return judge_claim(claim, results, self.expected, self.reference.others, self.mesh)

    def counterexample(self, claim: Claim, found: Mismatch) -> WrongRule:
        """Return the record of a claim that this draw refutes."""
        if claim.again:
            text = "the strategy does not claim this each time that it is asked about the call"
            found = replace(found, message=f"{found.message}; {text}")
        return self._wrong(claim.rule, claim.inputs, found)

    def _wrong(self, rule: Rule, inputs: Combination, found: Mismatch) -> WrongRule:
        trial = Trial(self.case, self.mesh, inputs, (), self.seed)
        return WrongRule(
            rule, str(self.mesh), self.shapes, self.arguments, self.ledger.sample.origin, found.kind,
            found.message, trial_record(trial), _complexity(self.call.tensors), self.call.in_args,
            raised=found.raised,
        )  # fmt: skip

    def died(self, combination: Combination, claim: Claim | None) -> None:
        """Note a combination that ended the process when it was run before; if DTensor claims it, that is a defect."""
        ledger = self.ledger
        placed = ", ".join(placement_text(placements) for placements in combination)
        text = f"{ledger.sample.op} of shapes {[list(shape) for shape in self.shapes]} at {placed} on mesh {self.mesh}"
        ledger.report.untested["DIED: it ended the process"] += 1
        if text not in ledger.report.died:
            ledger.report.died.append(text)
        ledger.candidates[combination] = Candidate([])
        if claim is not None:
            found = Mismatch(VerdictKind.DIED, "the op ended the process of a rank")
            ledger.note(self.counterexample(claim, found), self.mesh.ndim)


def _each_placement(combinations: Sequence[Combination]) -> frozenset[Combination]:
    """Return few of ``combinations`` in which each tensor has each placement that it has in any of them.

    That is where a decision of DTensor's to redistribute may fail: what that costs depends on each tensor by itself.
    """
    seen: set[tuple[int, Placements]] = set()
    chosen = set()
    for most_are_new in (True, False):
        for combination in combinations:
            new = set(enumerate(combination)) - seen
            if len(new) >= (len(combination) - 1 if most_are_new else 1):
                chosen.add(combination)
                seen |= new
    return frozenset(chosen)


def _is_modelled(claim: Claim) -> bool:
    return all(is_modelled(p) for placements in (*claim.inputs, *claim.outputs) for p in placements)


def _complexity(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of elements; a call with an empty tensor is no simpler than others."""
    return sum(tensor.numel() for tensor in tensors) + _LARGE * (not all(tensor.numel() for tensor in tensors))


def _width(tensor: torch.Tensor) -> int:
    """Return the bytes of an element of a floating tensor, or of a part of a complex one; 0 for any other."""
    if tensor.is_complex():
        return tensor.element_size() // 2
    return tensor.element_size() if tensor.is_floating_point() else 0


def _telling(value: torch.Tensor) -> bool:
    """Return whether agreeing with ``value`` says anything: it is neither empty nor the same everywhere."""
    if value.numel() < 2:
        return bool(value.numel())
    return not bool((value == value.reshape(-1)[0]).all())


def _is_finite(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


def _arguments(case: OpCase) -> str:
    """Return the arguments that are no tensors, as text."""
    texts = [repr(value) for value in case.args if not holds_tensor(value)]
    texts += [f"{name}={value!r}" for name, value in case.kwargs.items() if not holds_tensor(value)]
    return ", ".join(texts)


def _where(error: Exception) -> str:
    """Return what is said of an exception without a message: the function that raised it, and its file."""
    code = raised_in(error)
    return "no message" if code is None else f"no message, in {code.co_qualname} of {Path(code.co_filename).name}"
