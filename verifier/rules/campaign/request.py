"""From what the user asked to a plan of the rule check."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain

import torch

from verifier.core.case import MeshSpec
from verifier.core.errors import SamplesError
from verifier.core.ops import of_ones_own
from verifier.core.versions import versions
from verifier.core.wording import did_you_mean
from verifier.execution.imports import (
    imports_beside,
    modules_of_rules,
    own_rules,
    patterns_of_imports,
    run_imports_with_warnings,
)
from verifier.gate.baseline import Baseline
from verifier.records.files import new_run_id
from verifier.records.schema import OpRulesRecord, RunHeader
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions, SampleSource, Target, installed_sources
from verifier.runs.revision import BASELINE, revision

__all__ = [
    "BEYOND",
    "MAX_JOBS",
    "Progress",
    "RulesPlan",
    "RulesRequest",
    "errors_of_samples",
    "make_rules_plan",
]

DEFAULT_WORLD_SIZES = (2, 3)
DEFAULT_PRODUCT_MESHES = ("2x2",)
BEYOND = tuple(map(MeshSpec, ((1,), (4,), (6,), (8,), (1, 2), (2, 3), (3, 2), (2, 2, 2))))
"""Where strategies of one's own are tried: on one mesh dim only the rules that they have for no default mesh.

On several mesh dims only strategies are tried that are told the mesh.
"""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SIZES = 5
MAX_JOBS = 256
Progress = Callable[[int, int, str, OpRulesRecord | None], None]
"""Told of each op that has been checked: how many are, of how many, its name, and what came of it."""


@dataclass(frozen=True)
class RulesRequest:
    """What a user asked for, as text; :func:`make_rules_plan` checks it."""

    patterns: Sequence[str] = ()
    world_sizes: str | None = None
    meshes: Sequence[str] = ()
    dtype: str = "float64"
    max_samples: int = 8
    sizes: int = 3
    seed: int = 0
    claims_only: bool = False
    jobs: int | None = None
    imports: Sequence[str] = ()
    command: str = ""
    products: int | None = None
    only: Sequence[str] = ()
    """The ops to verify of those that the imports register; all if none is given."""


@dataclass(frozen=True)
class RulesPlan:
    """Everything that decides what a rule check does, and on how many workers."""

    header: RunHeader
    targets: tuple[Target, ...]
    samples: SampleOptions
    check: CheckOptions
    jobs: int
    baseline: Baseline = field(default_factory=Baseline)
    without_samples: tuple[str, ...] = ()
    """Ops that were to be checked and of which no source has samples."""
    wrong_samples: Mapping[str, str] = field(default_factory=dict)
    """Ops that were to be checked and whose declared samples are wrong, with what is wrong."""
    meshes_named: bool = False
    """Whether the user named the meshes; entries of the baseline on other meshes are then not tried again."""
    answers: str = ""
    """The folder in which processes share what DTensor claims of calls; see :class:`.work.WorkItem`."""


def make_rules_plan(request: RulesRequest, baseline: Baseline) -> RulesPlan:
    """Return the plan for ``request``.

    Raises
    ------
    ValueError
        If anything in it does not exist or does not fit, with the nearest valid name.
    """
    run_imports_with_warnings(request.imports)
    if request.dtype not in DTYPES:
        hint = did_you_mean(request.dtype, DTYPES)
        raise ValueError(f"dtype {request.dtype!r} is none of {', '.join(DTYPES)}{hint}")
    for name, value, least, most in (
        ("--max-samples", request.max_samples, 1, None),
        ("--sizes", request.sizes, 1, MAX_SIZES),
        ("--products", request.products if request.products is not None else 0, 0, None),
        ("--jobs", request.jobs if request.jobs is not None else 1, 0, MAX_JOBS),
    ):
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name} {value}: must be {limits}")
    meshes = _meshes(request)
    if request.products is not None and all(mesh.ndim == 1 for mesh in meshes):
        raise ValueError(f"--products {request.products}: no mesh has several dims; add one, as --mesh 2x2")
    check = CheckOptions(meshes, request.sizes, request.seed, request.claims_only)
    if request.products is not None:
        check = replace(check, products=request.products, samples_with_products=request.max_samples)
    with imports_beside(request.imports) as imports:
        asked = patterns_of_imports(request.patterns, request.imports, request.only)
        registered = bool(asked) and not request.patterns
        wrong_samples = errors_of_samples(asked) if registered else {}
        right = [op for op in asked if op not in wrong_samples]
        if wrong_samples and not right:
            raise SamplesError("; ".join(dict.fromkeys(wrong_samples.values())))
        targets, without_samples = _targets_of_ops(right) if registered else (_targets(asked), ())
    own = own_rules()
    if own and request.world_sizes is None and not request.meshes:
        check = replace(check, beyond=BEYOND, samples_with_products=request.max_samples)
    header = RunHeader(
        id=new_run_id(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.seed,
        profile="rules",
        families=sorted({target.source for target in targets}),
        meshes=[str(mesh) for mesh in meshes],
        dtypes=[request.dtype],
        device="cpu",
        max_examples=request.max_samples,
        time_limit=None,
        imports=imports,
        versions=versions(),
        command=request.command,
        digests={BASELINE: baseline.digest, **revision(imports, modules_of_rules())},
        own_rules=own,
    )
    return RulesPlan(
        header=header,
        targets=targets,
        samples=SampleOptions(DTYPES[request.dtype], request.sizes, request.max_samples, request.seed),
        check=check,
        jobs=request.jobs if request.jobs is not None else len(os.sched_getaffinity(0)),
        baseline=baseline.about(imports, own),
        without_samples=without_samples,
        wrong_samples=wrong_samples,
        meshes_named=bool(request.meshes) or request.world_sizes is not None,
    )


def _meshes(request: RulesRequest) -> tuple[MeshSpec, ...]:
    """Return the meshes, those of one dim first; the default mesh of two dims only where nothing was asked for."""
    sizes: tuple[int, ...] = DEFAULT_WORLD_SIZES
    if request.world_sizes is not None:
        parts = [part.strip() for part in request.world_sizes.split(",")]
        if not all(part.isdigit() for part in parts):
            raise ValueError(f"--world-size {request.world_sizes!r} is not a list of numbers such as 2,3,4")
        sizes = tuple(int(part) for part in parts)
    for size in sizes:
        if not 2 <= size <= 16:
            raise ValueError(f"--world-size {size}: level 1 checks meshes of 2 to 16 ranks")
    asked = bool(request.meshes) or request.world_sizes is not None
    meshes = [MeshSpec((size,)) for size in sizes]
    for text in request.meshes if asked else DEFAULT_PRODUCT_MESHES:
        mesh = MeshSpec.parse(text)
        if mesh.backend != "gloo":
            raise ValueError(f"--mesh {text}: level 1 runs no collectives; give a shape such as 2x2")
        if mesh.flat:
            raise ValueError(f"--mesh {text}: level 1 runs no collectives, which a flattened mesh merges; give a shape")
        if min(mesh.shape) < 2 or mesh.world_size > 16:
            raise ValueError(f"--mesh {text}: level 1 checks meshes of 2 to 16 ranks, with 2 or more on each mesh dim")
        meshes.append(mesh)
    unique = dict.fromkeys(meshes)
    return tuple(sorted(unique, key=lambda mesh: mesh.ndim))


def _targets(patterns: Sequence[str]) -> tuple[Target, ...]:
    sources = installed_sources()
    if not sources:
        raise ValueError("no source of samples is installed; install the distribution (pip install -e .)")
    if not patterns:
        return tuple(target for source in sources.values() for target in source.select(()))
    targets: dict[Target, None] = {}
    for pattern in patterns:
        errors: dict[str, ValueError] = {}
        for name, source in sources.items():
            try:
                targets |= dict.fromkeys(source.select((pattern,)))
            except SamplesError:
                raise
            except ValueError as error:
                errors[name] = error
        if len(errors) == len(sources):
            names = _names(sources)
            if own := of_ones_own(pattern, [*chain.from_iterable(names.values()), "aten.", "prims."]):
                raise ValueError(own)
            # a source that has the name of a namespace knows best what is in that, or else one with an op of that name
            near = [name for name, ops in names.items() if any(pattern in op.split(".") for op in ops)]
            raise next(errors[name] for name in (pattern.partition(".")[0], *near, *errors) if name in errors)
    return tuple(targets)


def _targets_of_ops(ops: Sequence[str]) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Return the targets of overloads that were registered, and the overloads without a target."""
    targets: dict[Target, None] = {}
    left = []
    for op in ops:
        try:
            targets |= dict.fromkeys(_targets((op,)))
        except SamplesError:
            raise
        except ValueError:
            left.append(op)
    return tuple(targets), tuple(left)


def errors_of_samples(ops: Sequence[str]) -> dict[str, str]:
    """Return the overloads whose declared samples are no calls of them, with what is wrong."""
    errors = {}
    for op in ops:
        try:
            _targets_of_ops((op,))
        except SamplesError as error:
            errors[op] = str(error)
    return errors


def _names(sources: Mapping[str, SampleSource]) -> dict[str, list[str]]:
    """Return the names of all targets of each source, which may have none as yet."""
    names: dict[str, list[str]] = {}
    for name, source in sources.items():
        with contextlib.suppress(ValueError):
            names[name] = [target.name for target in source.select(("*",))]
    return names
