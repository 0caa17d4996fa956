"""Level 1: checks one sample, that is one way of calling one op, on all meshes, at all sizes, with many values.

For each choice of input placements the op runs once on each rank's local tensors, and what comes out is compared with
what every output placement promises. A claim of DTensor's that a draw refutes is a wrong rule; a rule that no draw
refutes, and in whose place DTensor communicates, is a missing one.
"""

from __future__ import annotations

import math
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.cases import Combination, MeshSpec, OpCase, Trial, VerdictKind
from verifier.codec import trial_record
from verifier.placements import LARGEST_PART, Alphabet, partial_reductions, sharded_dim
from verifier.rules.claims import Claim, judge_claim, read_claim, run_claim, same_others
from verifier.rules.classify import Expected, Mismatch
from verifier.rules.enumerate import input_combinations, product_choices
from verifier.rules.execute import Cuts, LocalCall, Results
from verifier.rules.results import MissingRule, Rule, SampleReport, Transfer, WrongRule
from verifier.rules.samples import Sample
from verifier.torch_internals import ClaimReader, has_own_handler, masked_extent, placement_text, pytree

__all__ = ["CheckOptions", "Position", "check_sample"]

Position = tuple[int, int, int, int]
"""Which combination is being run: sample, mesh, size, combination."""

DRAWS_FOR_MISSING = 20
SIZES_FOR_MISSING = 3
TRACED = 48
"""At most so many combinations are traced through the decomposition of an op that has no strategy."""
MOST_DEATHS = 4
"""After so many combinations of a sample that ended the process, no more are tried but those that DTensor claims."""
IMPOSSIBLE = "a placement that a tensor of this dtype and shape cannot have"
_OWN_CODE = ("aten.equal.default", "aten._local_scalar_dense.default")


@dataclass(frozen=True)
class CheckOptions:
    """How thoroughly a sample is checked.

    Parameters
    ----------
    meshes
        Meshes of one dim on which rules are looked for, and of several dims on which products of claims are tried.
    sizes
        How many sizes.
    claims_only
        Try what DTensor claims and nothing else.
    cap
        At most so many input combinations of a call (all of a smaller number, else a pairwise cover).
    products
        At most so many products of one-dim rules on each mesh of several dims.
    """

    meshes: tuple[MeshSpec, ...]
    sizes: int = 3
    seed: int = 0
    claims_only: bool = False
    cap: int = 256
    products: int = 12

    @property
    def flat(self) -> tuple[MeshSpec, ...]:
        return tuple(mesh for mesh in self.meshes if mesh.ndim == 1)

    @property
    def draws(self) -> int:
        """Draws at each size and mesh, so that a rule that is said to be missing has held in at least 20."""
        places = max(1, len(self.flat) * min(self.sizes, SIZES_FOR_MISSING))
        return 3 if self.claims_only else max(3, math.ceil(DRAWS_FOR_MISSING / places))


@dataclass
class _Candidate:
    """What is known of one combination of inputs so far, over all meshes, sizes and draws.

    ``masks`` has for each result the placements that every draw has allowed.
    """

    masks: list[int]
    draws: int = 0
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    world_sizes: set[int] = field(default_factory=set)
    claimed: bool = False


class _Stopwatch:
    def __init__(self) -> None:
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def check_sample(
    sample: Sample,
    options: CheckOptions,
    number: int = 0,
    enter: Callable[[Position], None] = lambda position: None,
    skip: frozenset[Position] = frozenset(),
) -> SampleReport:
    """Return what comes of checking ``sample``, which has ``number`` among the samples of its op.

    ``enter`` is told of each combination before it is run. Those in ``skip`` have ended the process before and are not
    run, at this size and any other.
    """
    watch = _Stopwatch()
    report = SampleReport(sample.op, sample.origin)
    if sample.not_testable:
        report.not_testable = sample.not_testable
        report.untested[sample.not_testable] += 1
        return report
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _SampleCheck(sample, options, number, enter, skip, report).run()
    report.seconds = watch.seconds
    return report


class _SampleCheck:
    def __init__(
        self,
        sample: Sample,
        options: CheckOptions,
        number: int,
        enter: Callable[[Position], None],
        skip: frozenset[Position],
        report: SampleReport,
    ) -> None:
        self.sample, self.options, self.number = sample, options, number
        unsafe = sample.claims_only
        if not unsafe and len({position[3] for position in skip if position[0] == number}) >= MOST_DEATHS:
            unsafe = f"it ended the process {MOST_DEATHS} times: only what DTensor claims is tried"
        if unsafe and not options.claims_only:
            self.options = replace(options, claims_only=True)
            report.untested[unsafe] += 1
        self.enter, self.report = enter, report
        ndims = {mesh_number: mesh.ndim for mesh_number, mesh in enumerate(options.meshes)}
        self._fatal = {(where, ndims[mesh], number) for where, mesh, _, number in skip}
        self._ndims = ndims
        self.candidates: dict[Combination, _Candidate] = {}
        self.held: set[Rule] = set()
        self.vacuous: set[Rule] = set()
        self.failed: dict[tuple[Rule, int], WrongRule] = {}
        self.unclear: set[Rule] = set()
        self.special: dict[Rule, WrongRule] = {}
        self.products: dict[tuple[Placement, ...], tuple[Placement, ...]] = {}
        self.letters: list[tuple[Placement, ...]] = []
        self.largest: tuple[int, _Place] | None = None

    def is_fatal(self, position: Position) -> bool:
        """Return whether this combination has ended the process before, at whatever size and on however many ranks.

        What corrupts memory at one size does so at others: to find each of them out would cost a process each.
        """
        sample, mesh, _, combination = position
        return (sample, self._ndims[mesh], combination) in self._fatal

    def run(self) -> None:
        report = self.report
        for mesh_number, mesh in enumerate(self.options.meshes):
            for size in range(self.options.sizes if mesh.ndim == 1 else 1):
                case = self.sample.draw(size, 0)
                if case is None:
                    continue
                place = _Place.make(self, case, mesh, mesh_number, size)
                if place is None:
                    report.untested["the local call raises"] += 1
                    continue
                if mesh.ndim == 1:
                    place.explore()
                    elements = sum(tensor.numel() for tensor in place.call.tensors)
                    if self.largest is None or elements >= self.largest[0]:
                        self.largest = (elements, place)
                else:
                    place.try_products()
        wrong = {rule for rule, _ in self.failed}
        report.wrong = [self.failed[key] for key in sorted(self.failed, key=lambda key: (key[0], key[1]))]
        report.confirmed = self.held - wrong - self.unclear
        report.inconclusive = (self.vacuous | self.unclear) - wrong - report.confirmed
        report.special = [self.special[rule] for rule in sorted(self.special) if rule not in wrong]
        if not self.options.claims_only:
            report.missing = self._missing()

    # --------------------------------------------------------------------------------------------------------- missing
    def _missing(self) -> list[MissingRule]:
        """Return the rules that every draw bore out, where DTensor communicates or refuses."""
        if self.largest is None:
            return []
        place = self.largest[1]
        found = []
        for combination, candidate in self.candidates.items():
            if candidate.claimed or not candidate.masks or not all(candidate.masks):
                continue
            if candidate.world_sizes != {mesh.world_size for mesh in self.options.flat}:
                continue
            outputs = place.best_outputs(combination, candidate.masks)
            if outputs is None:
                continue
            combination = place.with_buffers(combination, outputs)
            rule = Rule(
                self.sample.op,
                tuple(placement_text(placements) for placements in combination),
                tuple(str(placement) for placement in outputs),
            )
            if candidate.draws < DRAWS_FOR_MISSING or len(candidate.shapes) < SIZES_FOR_MISSING:
                self.report.untested["holds, but in too few draws or sizes to be called missing"] += 1
                continue
            decided = place.reader.at(combination, place.mesh.shape)
            saves = () if decided is None else tuple(transfers(combination, decided.inputs, place))
            if decided is not None and not saves:
                continue  # DTensor gets to a rule of its own by cutting locally: nothing is saved
            missing = MissingRule(
                rule, place.shapes, place.arguments, self.sample.origin, candidate.draws, len(candidate.shapes),
                tuple(sorted(candidate.world_sizes)), saves,
            )  # fmt: skip
            found.append(missing)
        return sorted(found, key=lambda missing: missing.rule)


def _best(letters: Sequence[Placement], mask: int) -> Placement:
    """Return the most useful of the placements that the bits of ``mask`` allow: Replicate, then Shard, then Partial."""
    return next(letter for number, letter in enumerate(letters) if mask >> number & 1)


def transfers(given: Combination, wanted: Combination, place: _Place) -> Iterator[Transfer]:
    """Yield the collectives that bring each argument from its ``given`` to its ``wanted`` placements (one mesh dim)."""
    for number, ((source,), (target,)) in enumerate(zip(given, wanted, strict=True)):
        if source == target or source == Replicate() or masked_extent(target) is not None:
            continue
        local = max(place.cuts(0).of(number, (source,)), key=torch.Tensor.numel)
        size = local.numel() * local.element_size()
        if source.is_partial():
            collective = "all_reduce" if target == Replicate() or target.is_partial() else "reduce_scatter"
        else:
            collective = "all_gather" if target == Replicate() or target.is_partial() else "all_to_all"
        yield Transfer(number, str(source), str(target), collective, size)


# ----------------------------------------------------------------------------------------------------------- one place
class _Place:
    """A sample at one size on one mesh."""

    def __init__(self, check: _SampleCheck, case: OpCase, mesh: MeshSpec, mesh_number: int, size: int) -> None:
        self.check, self.mesh, self.mesh_number, self.size = check, mesh, mesh_number, size
        self.take(case, 0)
        self.reader = ClaimReader(self.call.op, case.args, case.kwargs, self.reference.returned)  # type: ignore[arg-type]
        self.shapes = tuple(tuple(tensor.shape) for tensor in self.call.tensors)
        self.arguments = _arguments(case)
        self.claims: dict[Combination, Claim] = {}
        self.no_claims = "DTensor has no rule for this call"
        self._bits: dict[Rule, list[int]] = {}

    @classmethod
    def make(cls, check: _SampleCheck, case: OpCase, mesh: MeshSpec, mesh_number: int, size: int) -> _Place | None:
        """Return the place; None if the call raises on the whole tensors, so that there is nothing to compare with."""
        try:
            return cls(check, case, mesh, mesh_number, size)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return None

    # ----------------------------------------------------------------------------------------------------------- draws
    def take(self, case: OpCase, draw: int) -> None:
        """Make ``case`` the call that is run from now on."""
        self.case, self.draw = case, draw
        self.call = LocalCall(case)
        self.reference: Results = self.call(self.call.tensors)
        terms = sum(t.numel() for t in self.call.tensors) + sum(t.numel() for t in self.reference.tensors)
        parts = self.mesh.world_size
        self.expected = [Expected(t, parts, case.exact, terms, LARGEST_PART) for t in self.reference.tensors]
        self.vacuous = not any(t.numel() for t in self.reference.tensors)
        self.telling = all(_telling(t) for t in self.reference.tensors)
        self.finite = all(bool(torch.isfinite(t).all()) for t in self.reference.tensors if t.is_floating_point())
        text = f"{self.check.sample.op}/{self.check.sample.origin}/{self.size}/{draw}/{self.mesh}"
        self.seed = zlib.crc32(text.encode()) ^ self.check.options.seed
        self._cuts: Cuts | None = None

    def cuts(self, _: int = 0) -> Cuts:
        if self._cuts is None:
            self._cuts = Cuts(self.call.tensors, self.mesh.shape, self.seed)
        return self._cuts

    def draws(self) -> Iterator[bool]:
        """Make one draw after the other current.

        Left out are draws whose call raises, and those that came upon an infinity or NaN, by a division by 0 for one,
        where the first did not: these are special values, which a Partial cannot always carry.
        """
        finite = self.finite
        yield True
        for draw in range(1, self.check.options.draws):
            case = self.check.sample.draw(self.size, draw)
            if case is None:
                return
            try:
                self.take(case, draw)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            if self.finite or not finite:
                yield True

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

    # --------------------------------------------------------------------------------------------------------- explore
    def explore(self) -> None:
        """Run every combination, on one mesh dim."""
        check, options, report = self.check, self.check.options, self.check.report
        kinds = tuple((tensor.ndim, tensor.dtype) for tensor in self.call.tensors)
        free = input_combinations(kinds, self._groups(), options.cap)
        self._read_claims(free)
        if not self.claims:
            report.untested[self.no_claims] += 1
            return
        combinations = list(dict.fromkeys([*free, *self.claims] if not options.claims_only else self.claims))
        numbers = {combination: i for i, combination in enumerate(combinations)}
        letters = sum(len(expected.letters) for expected in self.expected)
        alive = {c: [-1] * len(self.expected) for c in combinations}
        told = dict.fromkeys(combinations, 0)
        for _ in self.draws():
            for combination in list(alive):
                position = (check.number, self.mesh_number, self.size, numbers[combination])
                claim = self.claims.get(combination)
                if check.is_fatal(position):
                    self._died(combination, claim)
                    del alive[combination]
                    continue
                check.enter(position)
                results = self._run(combination)
                report.runs += 1
                masks = self._classify(results, alive[combination])
                if claim is not None:
                    self._try_claim(claim, results if claim.plain else None, masks)
                    alive[combination] = masks or [0] * len(self.expected)
                elif masks:
                    alive[combination] = masks
                else:
                    del alive[combination]
                    check.candidates[combination] = _Candidate([])
                    continue
                told[combination] += self.telling and not self._one_sided(combination)
        report.combinations += letters * len(combinations)
        self._keep(alive, told)
        if not check.products and self.size == 0:
            check.products = {
                tuple(p for (p,) in c): tuple(p for (p,) in claim.outputs)
                for c, claim in self.claims.items()
                if (claim.rule, 1) not in check.failed
            }
        self._try_special()

    def _mixed(self, rules: Sequence[tuple[Placement, ...]], seed: int) -> Iterator[Combination]:
        """Yield combinations that are a rule on one mesh dim and anything at all on the others.

        DTensor is to communicate there; a strategy that looks at one mesh dim only claims them. One that lists its
        rules for a single mesh dim cannot do so.
        """
        if self.reader.lists_rules:
            return
        kinds = tuple((tensor.ndim, tensor.dtype) for tensor in self.call.tensors)
        anything = input_combinations(kinds, self._groups(), self.check.options.cap)
        generator = torch.Generator().manual_seed(seed)
        for number in range(self.check.options.products):
            other = anything[int(torch.randint(0, len(anything), (), generator=generator))]
            rule = rules[int(torch.randint(0, len(rules), (), generator=generator))]
            at = number % self.mesh.ndim
            yield tuple(
                tuple(p if mesh_dim == at else q for mesh_dim in range(self.mesh.ndim))
                for p, (q,) in zip(rule, other, strict=True)
            )

    def _died(self, combination: Combination, claim: Claim | None) -> None:
        """Note a combination that ended the process when it was run before; if DTensor claims it, that is a defect."""
        check = self.check
        placed = ", ".join(placement_text(placements) for placements in combination)
        text = f"{check.sample.op} of shapes {[list(shape) for shape in self.shapes]} at {placed} on mesh {self.mesh}"
        check.report.untested["DIED: it ended the process"] += 1
        if text not in check.report.died:
            check.report.died.append(text)
        check.candidates[combination] = _Candidate([])
        if claim is not None:
            found = Mismatch(VerdictKind.DIED, "the op ended the process of a rank")
            self._note(check.failed, (claim.rule, self.mesh.ndim), claim, found)

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """Return which tensors are placed alike: the lists of an op that goes through them element by element.

        What is only written to has the placement of what is written, so it is in no group.
        """
        numbers = [n for n in range(len(self.call.tensors)) if n not in self.call.buffers]
        if not self.check.sample.op.startswith(("aten._foreach_", "aten._amp_foreach_", "aten._fused_")):
            return tuple((number,) for number in numbers)
        groups: list[tuple[int, ...]] = []
        count = 0
        for value in [*self.case.args, *self.case.kwargs.values()]:
            here = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
            groups.append(tuple(n for n in range(count, count + here) if n in numbers))
            count += here
        return tuple(group for group in groups if group)

    def _one_sided(self, combination: Combination) -> bool:
        """Return whether a Partial argument came out with all parts the same, so that this draw says nothing of it."""
        cuts = self.cuts()
        return any(
            placements[0].is_partial() and cuts.one_sided(number, placements)
            for number, placements in enumerate(combination)
        )

    def _keep(self, alive: dict[Combination, list[int]], told: dict[Combination, int]) -> None:
        """Note what every draw here has allowed; what another size or mesh has refuted stays refuted."""
        claimed = {combination[: self.call.in_args] for combination in self.claims}
        for combination, masks in alive.items():
            candidate = self.check.candidates.setdefault(combination, _Candidate(list(masks)))
            if len(candidate.masks) == len(masks):
                candidate.masks = [a & b for a, b in zip(candidate.masks, masks, strict=True)]
            else:  # refuted before, or an op whose number of results depends on the size
                candidate.masks = []
            candidate.draws += told[combination]
            if told[combination]:
                candidate.shapes.add(self.shapes)
                candidate.world_sizes.add(self.mesh.world_size)
            candidate.claimed |= combination[: self.call.in_args] in claimed

    def _run(self, combination: Combination) -> list[Results] | Exception:
        cuts, call = self.cuts(), self.call
        columns = [cuts.of(number, placements) for number, placements in enumerate(combination)]
        run = call.without_buffers if call.buffers and combination not in self.claims else call
        try:
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

    # ---------------------------------------------------------------------------------------------------------- claims
    def _read_claims(self, combinations: Sequence[Combination]) -> None:
        op = self.check.sample.op
        if has_own_handler(self.call.op) or op in _OWN_CODE:  # type: ignore[arg-type]
            self.no_claims = "DTensor runs code of its own instead of the op: level 2 only"
            return
        returned = len(self.reference.tensors) - self._written_only()
        listed = self.reader.listed(self.mesh.shape, [tuple(p for (p,) in c) for c in combinations[:TRACED]])
        if listed is not None:
            rules = dict.fromkeys(tuple((_unmasked(p),) for p in rule) for rule in listed)
            combinations = [combination for combination in rules if self._possible(combination)]
            if impossible := len(rules) - len(combinations):
                self.check.report.untested[IMPOSSIBLE] += impossible
        else:
            # what the strategy enumerates by itself may lie beyond the combinations that are sampled
            own = [tuple((_unmasked(p),) for p in rule) for rule in self.reader.enumerated(self.mesh.shape)]
            combinations = list(dict.fromkeys([*combinations, *(c for c in own if self._possible(c))]))
        for combination in combinations:
            claim = read_claim(self.reader, self.call, op, combination, self.mesh, returned)
            if claim is not None and not self._reducible(claim):
                self.check.report.untested[IMPOSSIBLE] += 1
            elif claim is not None:
                self.claims[combination] = claim
                bits = [expected.bit(p) for (p,), expected in zip(claim.outputs, self.expected, strict=False)]
                if claim.plain and len(bits) == len(self.expected) and all(bits):
                    self._bits[claim.rule] = bits

    def _possible(self, combination: Combination) -> bool:
        """Return whether each tensor can be placed so: a sum of bools is not a bool, and a 0-d tensor has no shards."""
        return all(
            can_be(tensor.dtype, placement) and (sharded_dim(placement) or 0) < max(1, tensor.ndim)
            and not (tensor.ndim == 0 and sharded_dim(placement) is not None)
            for tensor, (placement,) in zip(self.call.tensors, combination, strict=True)
        )  # fmt: skip

    def _reducible(self, claim: Claim) -> bool:
        """Return whether each result can be placed as it is claimed."""
        return all(
            can_be(expected.dtype, placement)
            for expected, placements in zip(self.expected, claim.outputs, strict=False)
            for placement in placements
        )

    def _written_only(self) -> int:
        returned = [leaf for leaf in pytree.tree_leaves(self.reference.returned) if isinstance(leaf, torch.Tensor)]
        return len(self.reference.tensors) - len(returned)

    def _try_claim(self, claim: Claim, results: list[Results] | Exception | None, masks: Sequence[int] = ()) -> None:
        """Hold the claim against this draw. ``masks`` is what the results represent, where that is known."""
        bits = self._bits.get(claim.rule)
        if results is not None and bits and masks and all(a & b for a, b in zip(bits, masks, strict=True)):
            self._hold(claim)
            return
        if results is None:
            try:
                results = run_claim(claim, self.call, self.cuts(), self.mesh)
            except Exception as error:  # noqa: BLE001 - as above
                results = error
        found = self._mismatch(claim, results)
        if found is None:
            self._hold(claim)
        elif not found.clear:
            self.check.unclear.add(claim.rule)
        else:
            self._note(self.check.failed, (claim.rule, self.mesh.ndim), claim, found)

    def _hold(self, claim: Claim) -> None:
        if self.vacuous:
            self.check.vacuous.add(claim.rule)
        else:
            self.check.held.add(claim.rule)

    def _mismatch(self, claim: Claim, results: list[Results] | Exception) -> Mismatch | None:
        if isinstance(results, Exception):
            text = (str(results).strip() or "no message").splitlines()[0]
            return Mismatch(VerdictKind.CRASH, f"a rank raised {type(results).__name__}: {text}")
        return judge_claim(claim, results, self.expected, self.reference.others, self.mesh)

    def _note(self, into: dict, key: object, claim: Claim, found: Mismatch) -> None:  # type: ignore[type-arg]
        elements = sum(tensor.numel() for tensor in self.call.tensors)
        known = into.get(key)
        if known is not None and known.elements <= elements:
            into[key] = replace(known, draws=known.draws + 1)
            return
        trial = Trial(self.case, self.mesh, claim.inputs, (), self.seed)
        into[key] = WrongRule(
            claim.rule, str(self.mesh), self.shapes, self.arguments, self.check.sample.origin, found.kind,
            found.message, trial_record(trial), elements, self.call.in_args,
            1 if known is None else known.draws + 1,
        )  # fmt: skip

    def _try_special(self) -> None:
        """Try the claims that held on values that a Partial cannot always carry."""
        if self.size or not self.claims:
            return
        case = self.check.sample.draw(self.size, 0, special=True)
        if case is None:
            return
        try:
            self.take(case, 0)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return
        for claim in self.claims.values():
            if (claim.rule, 1) in self.check.failed:
                continue
            try:
                results: list[Results] | Exception = run_claim(claim, self.call, self.cuts(), self.mesh)
            except Exception as error:  # noqa: BLE001 - as above
                results = error
            found = self._mismatch(claim, results)
            if found is not None:
                self._note(self.check.special, claim.rule, claim, found)

    # -------------------------------------------------------------------------------------------------------- products
    def try_products(self) -> None:
        """Try claims on a mesh of several dims: products of rules that hold on one, whatever DTensor makes of them."""
        check = self.check
        rules = sorted(check.products, key=str)
        if not rules or not check.options.products:
            return
        seed = zlib.crc32(check.sample.op.encode())
        chosen = product_choices(len(rules), self.mesh.ndim, check.options.products, seed)
        returned = len(self.reference.tensors) - self._written_only()
        combinations: dict[Combination, None] = {}
        for choice in chosen:
            columns = zip(*(rules[i] for i in choice), strict=True)
            combinations[tuple(tuple(column) for column in columns)] = None
        combinations |= dict.fromkeys(self._mixed(rules, seed))
        for number, combination in enumerate(combinations):
            if not all(Alphabet.legal(placements) for placements in combination):
                continue
            position = (check.number, self.mesh_number, self.size, number)
            claim = read_claim(self.reader, self.call, check.sample.op, combination, self.mesh, returned)
            if check.is_fatal(position):
                self._died(combination, claim)
                continue
            check.enter(position)
            if claim is None or not self._reducible(claim):
                continue
            if any(sum(masked_extent(p) is not None for p in placements) > 1 for placements in claim.masked):
                check.report.untested["a masked partial on two mesh dims: level 2 only"] += 1
                continue
            self._try_claim(claim, None)
            check.report.runs += 1
            check.report.combinations += 1


def _unmasked(placement: Placement) -> Placement:
    return Replicate() if masked_extent(placement) is not None else placement


def can_be(dtype: torch.dtype, placement: Placement) -> bool:
    """Return whether a tensor of ``dtype`` can have ``placement``, whatever its shape."""
    return not placement.is_partial() or placement.reduce_op in partial_reductions(dtype)  # type: ignore[attr-defined]


def _telling(value: torch.Tensor) -> bool:
    """Return whether agreeing with ``value`` says anything: it is neither empty nor the same everywhere."""
    if value.numel() < 2:
        return bool(value.numel())
    return not bool((value == value.reshape(-1)[0]).all())


def _arguments(case: OpCase) -> str:
    """Return the arguments that are no tensors, as text."""
    texts = [repr(value) for value in case.args if not _holds_tensor(value)]
    texts += [f"{name}={value!r}" for name, value in case.kwargs.items() if not _holds_tensor(value)]
    return ", ".join(texts)


def _holds_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
