"""Derives the strategy of an op: evidence, rules, code, and the checks of the code."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from verifier.core.case import MeshSpec
from verifier.core.versions import versions
from verifier.deriving.closing import Closed, close, close_by_test
from verifier.deriving.cuts import with_blocks
from verifier.deriving.emit import CannotWriteError, Provenance, Target, strategy_text
from verifier.deriving.emitted_tests import text_of_test
from verifier.deriving.evidence import CallEvidence, gather
from verifier.deriving.generalise import Derivation, generalise
from verifier.deriving.held_out import crossed, refuting
from verifier.deriving.mutants import tried_mutants
from verifier.execution.imports import run_imports_with_warnings
from verifier.gate.baseline import Baseline
from verifier.planning.own_samples import callable_of, overload_named
from verifier.rules.campaign.request import RulesPlan, RulesRequest, make_rules_plan
from verifier.rules.options import CheckOptions
from verifier.rules.samples import Sample, SampleOptions, installed_sources

__all__ = ["DeriveRequest", "Derived", "derivation", "derive", "module_name"]

_CAP = 4096
"""Combinations of a call that are tried, at most."""
_HELD_OUT = 4
"""So many times as many calls are drawn to refute rules that hold for fewer calls."""
_ROUNDS = 4
"""So often rules are derived anew with the calls that refute some of them."""


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
    """The strategy of an op as code, and what it rests on."""

    op: str
    calls: tuple[CallEvidence, ...]
    made: Derivation
    code: str
    test: str
    closed: Closed
    is_strategy: bool = True
    seconds: dict[str, float] = field(default_factory=dict)


def derive(request: DeriveRequest, module: str) -> Derived:
    """Derive the strategy of ``request.op``, and check it as ``module`` in a folder of its own.

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
    if function and request.target is not Target.LOCAL_MAP:
        raise CannotWriteError(f"{function} is a function and no op, so it has no strategy; use --target local-map")
    calls, made, uneven = derivation(request)
    if not made.rules:
        raise ValueError(f"no rule but the replicated one holds for the calls of {op}")
    given = Provenance(
        versions()["torch"], versions()["dtensor-verifier"], request.world_sizes.replace(",", " "), request.dtype,
        request.seed, request.command,
    )  # fmt: skip
    code = strategy_text(op, calls, made, request.target, given, uneven)
    mutants = tried_mutants(code, calls, made)
    seconds = {"deriving": time.perf_counter() - started}
    folder = Path(tempfile.mkdtemp(prefix="derive-"))
    try:
        file = folder / f"{module}.py"
        file.write_text(code)
        imports = [str(Path(name).resolve()) if name.endswith(".py") else name for name in request.imports]
        if request.target is Target.LOCAL_MAP:
            check = folder / f"test_{module}.py"
            check.write_text(text_of_test(op, calls, module, imports, folder, request.target))
            closed = close_by_test(check)
        else:
            closed = close(
                str(op), file, imports, request.world_sizes, request.meshes, calls, made, request.max_samples
            )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    seconds["checking"] = time.perf_counter() - started - seconds["deriving"]
    test = text_of_test(op, calls, module, request.imports, request.folder, request.target)
    return Derived(
        function or str(op),
        tuple(calls),
        made,
        code,
        test,
        replace(closed, mutants=mutants),
        request.target is not Target.LOCAL_MAP,
        seconds,
    )


def derivation(request: DeriveRequest) -> tuple[list[CallEvidence], Derivation, bool]:
    """Return what holds for the calls of an op, the rules that explain it, and whether ranks may have no elements."""
    op = str(overload_named(request.op))
    asked = RulesRequest(
        [op], request.world_sizes, (), request.dtype, request.max_samples, seed=request.seed, jobs=1,
        imports=request.imports,
    )  # fmt: skip
    plan = make_rules_plan(asked, Baseline())
    uneven = request.target is Target.SINGLE_DIM
    calls, made = _derived(op, plan, request, uneven)
    if uneven and not _has_shards(made):  # an op may refuse tensors without elements
        fewer = _derived(op, plan, request, False)
        if _has_shards(fewer[1]):
            return *fewer, False
    return calls, made, uneven


def _has_shards(made: Derivation) -> bool:
    return any(rule.pivot is not None and rule.cut is None for rule in made.rules)


def _derived(
    op: str, plan: RulesPlan, request: DeriveRequest, empty_shards: bool
) -> tuple[list[CallEvidence], Derivation]:
    """Return what holds for calls of an op, and the rules that explain it and that no further call refutes."""
    options = CheckOptions(
        tuple(mesh for mesh in plan.check.meshes if mesh.ndim == 1),
        plan.check.sizes,
        plan.check.seed,
        cap=_CAP,
        blank=True,
        empty_shards=empty_shards,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = list(_samples(op, plan, plan.samples))
        calls = list(gather(samples, options, request.target is Target.LOCAL_MAP))
        blocks = with_blocks(calls, samples, options) if request.target is not Target.LOCAL_MAP else {}
        if not blocks and not any(call.holding for call in calls):
            reasons = dict.fromkeys(sample.not_testable or sample.claims_only for sample in samples)
            why = "; ".join(reason for reason in reasons if reason) or (
                "in none of its calls enough draws say something" if samples
                else "no call of it has samples; DTensor may see other ops in its place, of which it is made"
            )  # fmt: skip
            raise ValueError(f"nothing can be derived for {op}: {why}")
        made = generalise(calls, blocks)
        known = {sample.origin for sample in samples}
        more = replace(plan.samples, max_samples=_HELD_OUT * request.max_samples)
        held_out = [
            *(sample for sample in _samples(op, plan, more) if sample.origin not in known),
            *crossed(calls, samples),
        ]
        if in_blocks := [rule for rule in made.rules if rule.cut is not None]:
            calls += refuting(in_blocks, samples, options)
            made = generalise(calls, blocks)
        for _ in range(_ROUNDS):
            found = list(refuting(made.rules, held_out, options))
            if not found:
                break
            calls += found
            made = generalise(calls, blocks)
    finally:
        torch.set_num_threads(threads)
    return calls, made


def _samples(op: str, plan: RulesPlan, options: SampleOptions) -> Iterator[Sample]:
    sources = installed_sources()
    for target in plan.targets:
        yield from (one for one in sources[target.source].samples(target, options) if one.op == op)


def module_name(op: str) -> str:
    """Return a name for the module of a derived strategy.

    >>> module_name("aten.sum.dim_IntList"), module_name("mylib::scale")
    ('sum_dim_IntList_strategy', 'mylib_scale_strategy')
    """
    text = re.sub(r"\W+", "_", op.removeprefix("torch.ops.").removeprefix("aten.").removesuffix(".default"))
    return f"{text}_strategy"
