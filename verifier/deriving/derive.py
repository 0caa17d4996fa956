"""Derives the strategy of an op: evidence, rules, code, and the checks of the code."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from verifier.core.case import MeshSpec
from verifier.core.versions import versions
from verifier.deriving.closing import Closed, close, close_by_test
from verifier.deriving.learning.changes import (
    Change,
    Swap,
    changes,
    other_flags,
    other_numbers,
    swaps,
    without_zero_factors,
)
from verifier.deriving.learning.emptied import told_apart
from verifier.deriving.learning.evidence import CallEvidence, leaves_open
from verifier.deriving.learning.generalise import Derivation, generalise
from verifier.deriving.learning.gradients import has_gradients, ops_without_strategy
from verifier.deriving.learning.held_out import HeldOut, Untried, refuting, refuting_in_blocks
from verifier.deriving.learning.isolated import Gathered, GivenCall, Listed, SamplePool, Samples, Workshop
from verifier.deriving.learning.learned import Learned
from verifier.deriving.writing.emitted_tests import text_of_test
from verifier.deriving.writing.mutants import Mutants, tried_mutants
from verifier.deriving.writing.strategy import strategy_text
from verifier.deriving.writing.subject import Provenance, Subject, Target
from verifier.execution.imports import run_imports_with_warnings
from verifier.gate.baseline import Baseline
from verifier.planning.own_samples import callable_of, is_sampled, overload_named
from verifier.rules.campaign.request import RulesRequest, make_rules_plan
from verifier.rules.execute import LocalCall
from verifier.rules.options import CheckOptions
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.ops import fake_tensors, has_gradient_formula
from verifier.torch_internals.registries import has_own_handler

__all__ = ["DeriveRequest", "Derived", "derivation", "derive", "module_name"]

_CAP = 4096
"""Combinations of a call that are tried, at most."""
_HELD_OUT = 4
"""So many times as many calls are drawn to refute rules that hold for fewer calls."""
_ROUNDS = 4
"""So often rules are derived anew with the calls that refute some of them, and code with those that ``rules`` finds."""
_MOST_OF_GRADIENTS = 4
"""So many ops that run in gradients get strategies, too."""
_INSTEAD = {
    "random": "it draws random numbers, so that ranks have others than the whole call; "
    "derive an op that takes what is drawn as an argument, such as a mask",
}
"""What to do about an op that cannot be tested, by the reason."""


@dataclass(frozen=True)
class DeriveRequest:
    """What a user asked for.

    Parameters
    ----------
    folder
        Where the code and its test are going to be.
    """

    op: str
    target: Target = Target.SINGLE_DIM
    world_sizes: str = "2,3"
    meshes: Sequence[str] = ("2", "3", "2x2")
    dtype: str = "float64"
    max_samples: int = 8
    seed: int = 0
    imports: Sequence[str] = ()
    command: str = ""
    folder: Path = Path()


@dataclass(frozen=True)
class Derived:
    """The strategy of an op as code, and what it rests on.

    Parameters
    ----------
    learned
        The op, then those that run in its gradient and had no strategy.
    not_derived
        Ops that run in its gradient and for which nothing could be derived, each with the reason.
    """

    op: str
    learned: tuple[Learned, ...]
    code: str
    test: str
    closed: Closed
    is_strategy: bool = True
    has_handler: bool = False
    not_derived: Mapping[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def derive(request: DeriveRequest, module: str) -> Derived:
    """Derive the strategy of ``request.op``, and check it as ``module`` in a folder of its own.

    What runs in the gradient of the op and has no strategy gets one in the same module.

    Raises
    ------
    ValueError
        If the op or a mesh does not exist, if no call of it can be tested, if nothing holds for its calls, or if its
        rules cannot be registered in the way that was asked for.
    """
    started = time.perf_counter()
    run_imports_with_warnings(request.imports)
    op = overload_named(request.op)
    for mesh in request.meshes:
        MeshSpec.parse(mesh)
    function = callable_of(str(op))
    Subject(op, (), request.target)  # what cannot be written is not derived
    first = _learned(request, op)
    not_derived: dict[str, str] = {}
    learned = [first, *_of_gradients(request, first, not_derived)]
    seconds = {"deriving": time.perf_counter() - started}
    given = Provenance(
        versions()["torch"], versions()["dtensor-verifier"], request.world_sizes.replace(",", " "), request.dtype,
        request.seed, request.command, request.imports,
    )  # fmt: skip
    learned, code, closed = _closed(learned, request, module, given, not_derived)
    if learned[1:] and not closed.passed:  # what is at fault may be what runs in the gradient
        not_derived |= {str(one.op): "with its code, what is derived did not pass" for one in learned[1:]}
        learned, code, closed = _closed(learned[:1], request, module, given, not_derived)
    none = Mutants(0, ())
    mutants = sum((tried_mutants(code, one.calls, one.made) for one in learned), none)
    seconds["checking"] = time.perf_counter() - started - seconds["deriving"]
    return Derived(
        function or str(op),
        tuple(learned),
        code,
        _test(learned, request, module, request.imports, request.folder, _is_known_of_gradients(learned)),
        replace(closed, mutants=mutants),
        request.target is not Target.LOCAL_MAP,
        has_own_handler(op),
        not_derived,
        seconds,
    )


def _closed(
    learned: list[Learned], request: DeriveRequest, module: str, given: Provenance, not_derived: dict[str, str]
) -> tuple[list[Learned], str, Closed]:
    """Return what is left of what was learned when the checks refute no more of it, the code, and what they say of it.

    Ops that run in the gradient and of which nothing is left are added to ``not_derived``, with the reason.

    Raises
    ------
    ValueError
        If nothing is left of the first op.
    """
    for left in reversed(range(_ROUNDS)):
        if not learned[0].made.rules:
            raise ValueError(f"no rule but the replicated one holds for the calls of {learned[0].op}")
        learned = [*_told(learned, request.target, given, not_derived)]
        code = strategy_text(learned, request.target, given)
        closed = _checked(code, learned, request, module)
        if not closed.passed and closed.only_uneven and request.target is Target.SINGLE_DIM:
            other = strategy_text(learned, request.target, given, uneven=False)
            again = _checked(other, learned, _on_four_ranks(request), module)
            if again.passed:
                code, closed = other, again
        if not (closed.refuting and left):
            break
        with Workshop(request.imports) as shop:
            learned = [_without_refuted(one, closed.refuting, shop) for one in learned]
    return learned, code, closed


def _without_refuted(one: Learned, more: Sequence[CallEvidence], shop: Workshop) -> Learned:
    """Return what is left of what was learned of an op when ``more`` of its calls refute some of it.

    What takes the place of a refuted rule is held against the same calls: ``rules`` tried them with that rule alone.
    """
    one, options = one.refuted_by(more), CheckOptions((MeshSpec((2,)), MeshSpec((3,))))
    held_out = [GivenCall(shop, call, options) for call in more if call.case.op == str(one.op)]
    for _ in range(_ROUNDS):
        found = list(refuting(one.made.rules, held_out, options))
        if not found:
            break
        one = one.refuted_by(found)
    return one


def _told(
    learned: Sequence[Learned], target: Target, given: Provenance, not_derived: dict[str, str]
) -> Iterator[Learned]:
    """Yield what was learned, without rules in blocks of whose conditions the calls do not tell each.

    Such conditions explain by chance for which calls the rule holds. Ops that run in the gradient are left out, and
    added to ``not_derived``, if the calls do not tell each line of what is left.
    """
    for one in learned:
        cut = [(rule, rule.cut) for rule in one.made.rules if rule.cut is not None]
        if not cut and one is learned[0]:
            yield one
            continue
        in_blocks = [rule for rule, blocks in cut if not blocks.in_ones]
        kept = [one, *(one.without(some) for some in (in_blocks, [rule for rule, _ in cut]) if some)]
        best = next((some for some in kept if some.made.rules and _survivors(some, target, given) == ()), None)
        if best is None and one is not learned[0]:
            not_derived[str(one.op)] = "its calls do not tell each line of its rules from a changed one"
        else:
            yield best or one


def _survivors(one: Learned, target: Target, given: Provenance) -> tuple[str, ...]:
    return tried_mutants(strategy_text([one], target, given), one.calls, one.made).survivors


def _learned(request: DeriveRequest, op: OpOverload) -> Learned:
    """Return what is derived for an op.

    Raises
    ------
    ValueError
        If DTensor cannot run the op, or loses its gradient, under any strategy, and as :func:`derivation` does.
    """
    calls, made = derivation(request)
    if request.target is not Target.LOCAL_MAP and is_sampled(str(op)) and (raised := _raised_without_values(calls)):
        raise ValueError(
            f"{op} does not run on tensors without values, on which DTensor runs it before it asks for rules "
            f"({raised}); give it a fake kernel (torch.library.register_fake)"
        )
    writes_out = any(argument.is_out for argument in op._schema.arguments)  # autograd takes no such call
    lacks_formula = is_sampled(str(op)) and not writes_out and not has_gradient_formula(op)
    if request.target is not Target.LOCAL_MAP and lacks_formula and has_gradients(calls[0].case):
        raise ValueError(
            f"{op} has no gradient formula: on plain tensors autograd looks into its kernel, on DTensors it cannot, so "
            "that gradients are lost under any strategy; give it one (torch.library.register_autograd), or let its "
            "kernel run under torch.no_grad()"
        )
    return Learned(op, calls, made)


def _raised_without_values(calls: Sequence[CallEvidence]) -> str:
    """Return what an op raises for calls on fake tensors; empty if it takes one of them."""
    raised = ""
    for call in calls:
        if not call.rare:
            local = LocalCall(call.case)
            try:
                with fake_tensors() as fake, torch.no_grad():
                    local([fake(tensor) for tensor in local.tensors])
            except Exception as error:  # noqa: BLE001 - the user's kernel may raise anything
                raised = raised or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            else:
                return ""
    return raised


def _of_gradients(request: DeriveRequest, first: Learned, not_derived: dict[str, str]) -> Iterator[Learned]:
    """Yield what is derived for ops that run in the gradient of an op and have no strategy, and in theirs.

    Ops for which nothing can be derived are added to ``not_derived``, with the reason.
    """
    if request.target is Target.LOCAL_MAP:
        return
    seen, waiting = {str(first.op)}, [first]
    while waiting and len(seen) <= _MOST_OF_GRADIENTS:
        plain = [call.case for call in waiting.pop(0).calls if not call.rare]
        for name in ops_without_strategy(plain):
            if name in seen:
                continue
            seen.add(name)
            try:
                op = overload_named(name)
                Subject(op, (), request.target)
                found = _learned(replace(request, op=name), op)
                if not found.made.rules:
                    raise ValueError("no rule but the replicated one holds for its calls")
            except ValueError as error:
                not_derived[name] = str(error)
                continue
            waiting.append(found)
            yield found


def _checked(code: str, learned: Sequence[Learned], request: DeriveRequest, module: str) -> Closed:
    """Return what the checks say of derived code."""
    folder = Path(tempfile.mkdtemp(prefix="derive-"))
    try:
        file = folder / f"{module}.py"
        file.write_text(code)
        imports = [str(Path(name).resolve()) if name.endswith(".py") else name for name in request.imports]
        if request.target is not Target.LOCAL_MAP:
            return close(learned, file, imports, request.world_sizes, request.meshes, request.max_samples)
        check = folder / f"test_{module}.py"
        check.write_text(_test(learned, request, module, imports, folder, False))
        return close_by_test(check)
    finally:
        shutil.rmtree(folder)


def _test(
    learned: Sequence[Learned],
    request: DeriveRequest,
    module: str,
    imports: Sequence[str],
    folder: Path,
    gradients: bool,
) -> str:
    """Return the test that goes with derived code."""
    ops = {one.op: one.calls for one in learned}
    return text_of_test(ops, module, imports, folder, request.target, gradients)


def _is_known_of_gradients(learned: Sequence[Learned]) -> bool:
    """Return whether there are derived strategies of what runs in the gradient of an op, and torch's for all else.

    A test that is written for the op asks for gradients then. What DTensor makes from decompositions may be wrong.
    """
    first, *others = learned
    plain = [call.case for call in first.calls if not call.rare]
    return bool(others) and {*ops_without_strategy(plain, or_decomposed=True)} <= {str(one.op) for one in others}


def _on_four_ranks(request: DeriveRequest) -> DeriveRequest:
    """Return a request for code that forbids shards of fewer elements than ranks, to be checked on four ranks, too.

    DTensor still leaves a rank empty where there are as many elements as ranks, such as five on four ranks.
    """
    sizes = request.world_sizes if "4" in request.world_sizes.split(",") else f"{request.world_sizes},4"
    meshes = request.meshes if "4" in request.meshes else (*request.meshes, "4")
    return replace(request, world_sizes=sizes, meshes=meshes)


def derivation(request: DeriveRequest, shop: Workshop | None = None) -> tuple[list[CallEvidence], Derivation]:
    """Return what holds for calls of an op, and the rules that explain it and that no further call refutes.

    ``shop`` runs the calls; if it is None, a worker is started.
    """
    if shop is None:
        with Workshop(request.imports) as own:
            return derivation(request, own)
    op = str(overload_named(request.op))
    asked = RulesRequest(
        [op], request.world_sizes, (), request.dtype, request.max_samples, seed=request.seed, jobs=1,
        imports=request.imports,
    )  # fmt: skip
    plan = make_rules_plan(asked, Baseline())
    gradients = request.target is Target.LOCAL_MAP
    with_elements = CheckOptions(
        tuple(mesh for mesh in plan.check.meshes if mesh.ndim == 1),
        plan.check.sizes,
        plan.check.seed,
        cap=_CAP,
        blank=True,
        emptied=0 if gradients else 1,  # one element leaves a rank empty on every mesh
    )
    samples = Samples(shop, SamplePool(op, tuple(plan.targets), plan.samples), with_elements)
    listed = samples.listed()
    gathered = _gathered([one for one in listed if not one.why_not], samples, with_elements, gradients)
    known = {one.origin: one for one in listed}
    plain = [call for call, _ in gathered]
    others: list[Change | Swap] = [*other_flags(plain, known), *swaps(plain, known)]
    changed = [replace(known[one.origin], change=one) for one in others]
    gathered += _gathered(changed, samples, with_elements, gradients)
    calls = without_zero_factors([call for call, _ in gathered])
    blocks = {id(call): some for call, (_, some) in zip(calls, gathered, strict=True) if some and not call.rare}
    options = with_elements if gradients else replace(with_elements, emptied=None)  # local_map is for even shards
    if not blocks and not any(call.holding for call in calls):
        why_not = (_INSTEAD.get(one.why_not, one.why_not) for one in listed if one.why_not)
        why = "; ".join(dict.fromkeys(why_not)) or (
            f"its calls ended the process {shop.deaths} times" if shop.deaths
            else "too few draws of its calls have results that differ between elements: where all are equal, any "
            "placement would hold" if listed
            else "no call of it has samples; DTensor may see other ops in its place, of which it is made"
        )  # fmt: skip
        raise ValueError(f"nothing can be derived for {op}: {why}{_other_overloads(op)}")
    made = generalise(calls, blocks)
    options_of_more = replace(plan.samples, max_samples=_HELD_OUT * request.max_samples)
    more = Samples(shop, SamplePool(op, tuple(plan.targets), options_of_more), options)
    bools = {call.origin for call in calls if torch.bool in call.dtypes}
    tried = {
        call.origin: frozenset(call.rules)
        for call in calls if call.origin in known and call.origin not in bools and leaves_open(call)
    }  # fmt: skip
    held_out: list[HeldOut] = [
        *(samples.held_out(one) for one in listed if one.origin in bools),
        *(Untried(samples.held_out(known[origin]), rules) for origin, rules in tried.items()),
        *(more.held_out(one) for one in more.listed() if one.origin not in known and not one.why_not),
        *(samples.held_out(replace(known[change.origin], change=change)) for change in changes(calls, known)),
    ]
    testable = [samples.held_out(one) for one in listed if not one.why_not]
    for _ in range(_ROUNDS):
        in_blocks = [rule for rule in made.rules if rule.cut is not None]
        if not in_blocks:
            break
        firsts = ((call, one) for one in testable for size, draw, call in one.calls() if not (size or draw))
        with_others = other_numbers([call for call in calls if id(call) in blocks], known)
        numbers = [(call, samples.held_out(replace(known[one.origin], change=one))) for call, one in with_others]
        found = [*refuting(in_blocks, testable, options), *refuting_in_blocks(in_blocks, [*firsts, *numbers])]
        if not found:
            break
        calls += found
        made = generalise(calls, blocks)
    for _ in range(_ROUNDS):
        found = list(refuting(made.rules, held_out, options))
        if not found:
            break
        calls += found
        made = generalise(calls, blocks)
    return calls, made


def _other_overloads(op: str) -> str:
    """Return the other overloads of an op with the name ``default``, which a user may have meant; empty if none."""
    base, _, name = op.rpartition(".")
    packet = overload_named(op).overloadpacket
    others = [
        one for one in packet.overloads()
        if one != name and "out" not in one
        and any("Tensor" in str(argument.type) for argument in getattr(packet, one)._schema.arguments)
    ]  # fmt: skip
    return f"; its other overloads are {', '.join(f'{base}.{one}' for one in others)}" if others else ""


def _gathered(some: Iterable[Listed], samples: Samples, options: CheckOptions, gradients: bool) -> list[Gathered]:
    """Return what holds for samples, and what holds only where shards begin at multiples of a block."""
    made: list[Gathered] = []
    for sample in some:
        found = samples.gathered(sample, gradients, not gradients)
        if found is None or gradients:
            made += [] if found is None else [found]
            continue
        call, blocks = found
        call, in_ones = told_apart(call, samples.held_out(sample), options)
        made.append((call, blocks | ({} if call.rare else in_ones)))
    return made


def module_name(op: str) -> str:
    """Return a name for the module of a derived strategy.

    >>> module_name("aten.sum.dim_IntList"), module_name("mylib::scale")
    ('sum_dim_IntList_strategy', 'mylib_scale_strategy')
    """
    text = re.sub(r"\W+", "_", op.removeprefix("torch.ops.").removeprefix("aten.").removesuffix(".default"))
    return f"{text}_strategy"
