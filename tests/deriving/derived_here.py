"""Derives, in this process, what a file of a test defines, and has level 1 judge the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verifier.core.case import MeshSpec
from verifier.deriving.derive import DeriveRequest, derivation
from verifier.deriving.learning.isolated import Workshop
from verifier.deriving.learning.learned import Learned
from verifier.deriving.writing.mutants import tried_mutants
from verifier.deriving.writing.strategy import strategy_text
from verifier.deriving.writing.subject import Provenance, Target
from verifier.execution.imports import run_imports
from verifier.planning.own_samples import overload_named
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import Rule, SampleReport
from verifier.rules.samples import SampleOptions, installed_sources
from verifier.rules.samples import Target as OpTarget

__all__ = ["GIVEN", "HERE", "closed", "confirmed", "confirmed_inputs", "derived_of"]

HERE = Workshop(jobs=0)
"""Ops that a test defines are not known in a worker."""
GIVEN = Provenance("2.13.0", "0.1.0", "2 3", "float64", 0, "derive")


def derived_of(example: str, folder: Path, space: str, name: str, target: Target) -> tuple[str, str]:
    """Return the overload of ``name`` that an example defines in ``space``, and the code derived for it.

    Its calls tell each changed line of the code.
    """
    file = folder / f"{space}_{name.replace('.', '_')}.py"
    file.write_text(example.format(space=space))
    run_imports([str(file)])
    op = overload_named(f"{space}::{name}")
    request = DeriveRequest(str(op), target, max_samples=4)
    calls, made = derivation(request, HERE)
    code = strategy_text([Learned(op, calls, made)], target, GIVEN)
    mutants = tried_mutants(code, calls, made)
    assert mutants.tried > 4
    assert (mutants.survivors, mutants.disagrees) == ((), ())
    beside_ops = f"import {space}_that_cannot_be_run_again\n{code}"  # a file may define ops beside a function
    assert tried_mutants(beside_ops, calls, made) == mutants
    return str(op), code


def closed(op: str, code: str, *more: str, calls: str = "") -> list[SampleReport]:
    """Return what level 1 says of the op under the strategy in ``code``, on 2 and 3 ranks, and more meshes.

    Of the first calls, products are tried on 2x2, as ``rules`` does. ``calls`` is an expression for those that are
    checked; without it all are.
    """
    exec(compile(code, "derived.py", "exec"), {})
    meshes = tuple(MeshSpec.parse(text) for text in ("2", "3", *more))
    flat = CheckOptions(meshes, claims_only=True, samples_called_again=0)
    with_products = replace(flat, meshes=(*flat.meshes, MeshSpec.parse("2x2")))
    samples = installed_sources()["own"].samples(OpTarget(op, "own", op), SampleOptions(max_samples=4))
    wanted = [sample for sample in samples if re.search(calls, sample.origin)]
    first = flat.samples_with_products
    return [check_sample(sample, with_products if n < first else flat) for n, sample in enumerate(wanted)]


def confirmed(reports: Sequence[SampleReport]) -> set[Rule]:
    assert not [wrong for report in reports for wrong in report.wrong]
    return set().union(*(report.confirmed for report in reports))


def confirmed_inputs(reports: Sequence[SampleReport]) -> set[tuple[str, ...]]:
    return {rule.inputs for rule in confirmed(reports)}
