"""``verify_module``: compares a whole model under a parallel plan with the same model in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from verifier.calls.result import NothingVerified, ToolError
from verifier.core.case import MeshSpec
from verifier.core.ops import resolve
from verifier.execution.packing import pack, unpack
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import PoolError, RulesNotInRanks
from verifier.meshes.tasks import Task
from verifier.modules.arguments import (
    DIM_NAMES,
    ModuleCase,
    ParallelPlan,
    built_model,
    converted_kwargs,
    converted_values,
    fits,
    kwargs_placements_of,
    misfit,
    packed_for_ranks,
    placements_of,
    wrong_keyword,
)
from verifier.modules.data import ModuleCollective, ModuleObservation, ModuleRun
from verifier.modules.judging import disturbances, judge_module
from verifier.modules.matching import Matcher, ModuleDifference, proves_nothing
from verifier.modules.observing import run_module
from verifier.modules.outcomes import (
    ModuleError,
    ModuleVerification,
    difference_error,
    failure_error,
    some,
    warning_lines,
)
from verifier.torch_internals.placements import Placements

__all__ = [
    "ModuleCollective",
    "ModuleDifference",
    "ModuleError",
    "ModuleVerification",
    "ParallelPlan",
    "mean_square",
    "sum_of_squares",
    "verify_module",
]


def sum_of_squares(output: object, *_targets: object) -> torch.Tensor:
    """Return the sum of the squares of ``output``; with a shard of it on each rank, the loss is ``P(sum)``."""
    assert isinstance(output, torch.Tensor), "the model returns more than a tensor; give a loss"
    return output.square().sum()


def mean_square(output: object, *_targets: object) -> torch.Tensor:
    """Return the mean of the squares of ``output``, the default loss."""
    assert isinstance(output, torch.Tensor), "the model returns more than a tensor; give a loss"
    return output.square().mean()


# ---------------------------------------------------------------------------------------------------------------- call
def verify_module(
    model: nn.Module | Callable[[], nn.Module] | str,
    plan: ParallelPlan,
    inputs: Sequence[object],
    *,
    kwargs: Mapping[str, object] | None = None,
    targets: Sequence[object] = (),
    mesh: MeshSpec | str | int = 2,
    dim_names: Sequence[str] = (),
    placements: str | Sequence[str | None] | None = None,
    kwargs_placements: Mapping[str, str] | None = None,
    as_dtensors: bool = False,
    outputs: str | Sequence[str] | None = None,
    loss: Callable[..., torch.Tensor] | str = mean_square,
    loss_placements: str | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    steps: int = 1,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
    limit: float = 120.0,
    pools: PoolSet | None = None,
) -> ModuleVerification:
    """Run ``model`` under ``plan`` on a mesh, and compare it with the same model in one process.

    It compares the output, the loss, the gradient of every parameter and input, and the parameters and buffers after a
    step of the optimiser. In the output it compares the structure and every tensor, text, None and number (numbers
    other than integers within rounding); other objects only have to be there. If anything differs, it looks for the
    first submodule whose result differs.

    Parameters
    ----------
    model
        A module, a function that makes one, or the dotted path of such a function. It is made once, here, and all
        ranks get the same parameters. The ranks must be able to import its classes.
    plan
        A function ``plan(model, mesh)``, which changes the model in place or returns it, or its dotted path; or a plan
        for ``parallelize_module``, on a 1-D mesh. The mesh dims have names: see ``dim_names``.
    inputs, targets
        Global values: positional arguments of the model, and of the loss after the output.
    kwargs
        Keyword arguments of the model. The gradients of tensors are compared as those of ``inputs`` are.
    mesh
        Such as ``"2x2"``, ``4`` or a :class:`MeshSpec`; its ranks are processes.
    dim_names
        Names of the mesh dims; ``tp``, or ``dp`` and ``tp``, by default.
    placements
        The placements of inputs and targets on the ranks, as ``"(S(0), R)"``: one text for all of them, or one each.
        By default all are replicated.
    kwargs_placements
        The placements of tensors of ``kwargs``, by name; by default they are replicated.
    as_dtensors
        Whether the ranks get DTensors. Otherwise each rank gets its local tensor as a plain tensor.
    outputs
        The placements of plain tensors that the model returns: one text for all of them, or one each, in their order.
        The default is the placements of the first input; inputs by name come after the others.
    loss
        A function ``loss(output, *targets)``, or its dotted path; by default the mean of the squares.
    loss_placements
        The placements of a plain loss: ``P(avg)`` if gradients are averaged over the ranks, as in data parallelism, or
        ``P(sum)`` if they are summed, as in sequence parallelism. The default is ``P(avg)`` on mesh dims that shard the
        output (the first output if there are several).
    optimizer
        Makes an optimiser of parameters; ``SGD(lr=0.1)`` by default. An optimiser that divides by the size of a
        gradient, as Adam does, makes a whole step from a gradient that is only rounding error. If only steps differ,
        the local model therefore repeats them with gradients perturbed by rounding, and an element may differ by three
        times the effect of this perturbation. In float64 the effect is negligible. In float32 it loosens elements whose
        gradient is below about 1e-4 of the largest one and not exactly 0 on all ranks, and in each step 6e-5 of the
        largest parameter counts as rounding: use float64 to see a slightly wrong rate or beta.
    steps
        Number of steps, all with the same inputs. The first step is compared in detail. A wrong beta of Adam shows
        only from the second step on, because the first step does not depend on it.
    dtype
        The dtype to which floating-point parameters, buffers and inputs are converted, so that rounding neither hides
        nor causes differences; complex values get the matching dtype. None converts nothing. If the model or the loss
        converts values to a narrower dtype, as ``values.float()`` does, the tolerance is that of the narrower dtype.
    seed
        Seed of the model, if it is made here, and of random numbers in each step, on the ranks and locally. Dropout can
        be compared only if it acts on replicated plain tensors; otherwise ``p`` must be 0.
    limit
        Seconds after which the ranks count as hung.
    pools
        The pools that provide the ranks; without them, ranks are started for this call.

    Returns
    -------
    ModuleVerification
        Losses, and the collectives by submodule.

    Raises
    ------
    ModuleError
        If something differs, or the ranks raise, hang or die.
    NothingVerified
        If every gradient of the local model is 0 or NaN, the plan shards nothing, or a tensor could not be compared.
    ToolError
        If the ranks could not be started.
    ValueError
        If an argument does not fit, the ranks cannot import it, or the local model raises. Also if this process has
        registered a sharding rule that the ranks do not have; the message names the option that gives it to them.
    """
    __tracebackhide__ = True
    spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec.parse(str(mesh))
    values = converted_values(inputs, "inputs", dtype)
    wanted = converted_values(targets, "targets", dtype)
    named = converted_kwargs({} if kwargs is None else kwargs, dtype)
    case = ModuleCase(
        model=built_model(model, seed, dtype),
        plan=plan,
        inputs=values,
        targets=wanted,
        mesh=spec,
        dim_names=tuple(dim_names) or DIM_NAMES[-spec.ndim :],
        placements=placements_of(placements, (*values, *wanted), spec),
        as_dtensors=as_dtensors,
        loss=resolve(loss) if isinstance(loss, str) else loss,  # type: ignore[arg-type]
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1),
        steps=steps,
        seed=seed,
        kwargs=named,
        kwargs_placements=kwargs_placements_of(kwargs_placements, named, spec),
        outputs=outputs,
        loss_placements=loss_placements,
    )
    return judge(case, observe(case, limit, pools))


# --------------------------------------------------------------------------------------------------------- observation
def observe(case: ModuleCase, limit: float, pools: PoolSet | None) -> ModuleObservation:
    """Run the local model, then the ranks (from ``pools``, or new ones) for ``limit`` seconds at most."""
    __tracebackhide__ = True
    packed = packed_for_ranks(case, "plan, loss, optimizer or inputs")
    try:
        local = run_module(unpack(packed))  # a copy, so that the caller's model stays as it is
    except Exception as error:
        if wrong := wrong_keyword(case.model, len(case.inputs), case.kwargs):
            raise ValueError(wrong) from error
        raise ValueError(f"the local model, its loss or a step raises {type(error).__name__}: {error}") from error
    if not local.returned:
        raise ValueError("the model returns no tensor, also not in tuples, lists, dicts or dataclasses of them")
    if all(held is None or proves_nothing(held.local) for held in local.gradients.values()):
        advice = "give inputs and a loss that move it"
        raise NothingVerified(f"{case}: every gradient of the local model is 0 or NaN; {advice}")
    outputs = case.output_placements([len(held.shape) for held in local.returned.values()])
    loss = case.whole_loss(outputs)
    with Pool(PoolKey.of(case.mesh)) if pools is None else nullcontext(pools.of(case.mesh)) as pool:
        try:
            task = Task("verifier.modules.observing.on_rank", (packed,), case.mesh, case.dim_names, limit)
            return ModuleObservation(local, outputs, loss, pool.call(task))
        except RulesNotInRanks as error:
            raise ValueError(error.text("--verifier-import FILE")) from error
        except PoolError as error:
            raise ToolError(f"{error}; in {case}") from error


# ------------------------------------------------------------------------------------------------------------- verdict
def judge(case: ModuleCase, observed: ModuleObservation) -> ModuleVerification:
    """Return the result of ``verify_module``, or raise its exception, after the ranks have run."""
    __tracebackhide__ = True
    if not observed.outcome.ok:
        raise failure_error(observed.outcome, str(case))
    local, ranks = observed.local, observed.ranks
    matcher = Matcher(case, local.eps)
    _check_fit(observed, matcher, "" if case.outputs else ", as the first input,")
    judgement = judge_module(case, observed)
    if judgement.first is not None and judgement.first.phase == "step":
        off = disturbances(case, observed)
        disturbed = [run_module(replace(unpack(pack(case)), disturbed=one)) for one in off]
        judgement = judge_module(case, observed, disturbed)
    warned = _warnings(ranks)
    if judgement.first is not None:
        raise difference_error(judgement, local, str(case), warned)
    if _nothing_sharded(ranks, (*case.placed, *observed.outputs)):
        message = (
            f"{case}: nothing is sharded; ranks hold plain tensors, whole, and ran no collective; does the plan "
            "name submodules of the model?"
        )
        raise NothingVerified("\n".join([message, *warning_lines(warned)]))
    if judgement.unchecked:
        raise NothingVerified(f"{case}: not compared are {some(judgement.unchecked, '; ')}")
    losses = zip(*(run.losses for run in ranks), strict=True)
    return ModuleVerification(
        call=str(case),
        losses=tuple(float(matcher.value(helds, observed.loss)) for helds in losses),
        local_losses=tuple(float(held.local) for held in local.losses),
        collectives=ranks[0].collectives,
        layouts=judgement.layouts,
        compared=judgement.compared,
        vacuous=judgement.vacuous,
        warnings=warned,
    )


def _check_fit(observed: ModuleObservation, matcher: Matcher, source: str) -> None:
    """Refuse placements that shard a dim that the output lacks, unless the output is a DTensor with its own."""
    returned = observed.local.returned.items()
    for number, ((at, expected), declared) in enumerate(zip(returned, observed.outputs, strict=True)):
        helds = [run.returned.get(at) for run in observed.ranks]
        used = [p for mesh_dim, p in enumerate(declared) if matcher.placement_on(helds, mesh_dim) is None]
        if all(helds) and not fits(tuple(used), len(expected.shape)):
            raise misfit(declared, len(expected.shape), number, source)


def _warnings(runs: Sequence[ModuleRun]) -> tuple[str, ...]:
    """Return each warning of the plan once, after the ranks that gave it unless all did."""
    found: dict[str, list[int]] = {}
    for rank, run in enumerate(runs):
        for text in run.warnings:
            found.setdefault(text, []).append(rank)
    return tuple(
        text if len(ranks) == len(runs) else f"rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in found.items()
    )


def _nothing_sharded(runs: Sequence[ModuleRun], placements: Sequence[Placements | None]) -> bool:
    """Return whether every rank ran the model without any sharding."""
    replicated = all(placement.is_replicate() for given in placements for placement in given or ())
    return replicated and not any(
        run.collectives or any(held.dtensor for held in (*run.state.values(), *(seen.held for seen in run.outputs)))
        for run in runs
    )
