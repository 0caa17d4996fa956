"""``verify_module``: a whole model under a parallel plan against the same model in one process."""

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
    """Return the sum of the squares of ``output``, of whose parts each rank may have one: ``P(sum)``."""
    assert isinstance(output, torch.Tensor), "the model returns more than a tensor; give a loss"
    return output.square().sum()


def mean_square(output: object, *_targets: object) -> torch.Tensor:
    """Return the mean of the squares of ``output``: the loss where a call names none."""
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
    """Run ``model`` under ``plan`` on a mesh, and compare with the same model in one process.

    Compared are the output, the loss, the gradient of every parameter and input, and parameters and buffers after a
    step of the optimiser. Of the output that is every tensor, every number (within rounding, unless it is an integer),
    text or None, and where each of them is; of other objects only that they are there. Where one of them differs, what
    every submodule returned says where that began.

    Parameters
    ----------
    model
        A module, or a function that makes one, or its dotted path; the ranks have to be able to import its classes. It
        is made once, here, and all ranks get the same parameters.
    plan
        ``plan(model, mesh)``, which changes the model in place or returns it, or its dotted path; or a plan for
        ``parallelize_module``, on a mesh of one dim. The mesh has names: see ``dim_names``.
    inputs, targets
        Positional arguments of the model, and of the loss behind the output; global values.
    kwargs
        What the model gets by name: tensors, of which the gradients are compared as those of inputs are, and others.
    mesh
        As ``"2x2"``, ``4`` or a :class:`MeshSpec`; its ranks are processes.
    dim_names
        Names of the mesh dims; ``tp``, or ``dp`` and ``tp``, by default.
    placements
        How each of inputs and targets is given to the ranks, as ``"(S(0), R)"``; one text for all of them, or one
        each. By default all are replicated.
    kwargs_placements
        The same for tensors of ``kwargs``, by name; those that it does not name are replicated.
    as_dtensors
        Give them as DTensors. Otherwise each rank gets a plain tensor, which is its part.
    outputs
        How plain tensors that the model returns stand for the output: one text for all of them, or one each, in their
        order; by default as the first input, those by name behind the others.
    loss
        ``loss(output, *targets)``, or its dotted path; by default the mean of the squares.
    loss_placements
        How a plain loss stands for the whole one: ``P(avg)`` where gradients are averaged over the ranks, as data
        parallelism does, ``P(sum)`` where they are summed, as sequence parallelism does. By default ``P(avg)`` on mesh
        dims that cut the output, the first one if there are several.
    optimizer
        Makes an optimiser of parameters; ``SGD(lr=0.1)`` by default. One that divides by the size of a gradient, as
        Adam does, makes a whole step of one that is nothing but rounding. So where only steps differ, the local model
        makes them again with gradients that are off by rounding, and an element may be three times as far off as it
        gets then. In float64 that is next to nothing. In float32 it loosens elements whose gradient is below about
        1e-4 of the largest one and not exactly 0 on all ranks, and 6e-5 of the largest parameter count as rounding in
        each step: keep float64 to see a slightly wrong rate or beta.
    steps
        How many steps to make, all with the same inputs. The first is compared in detail. A wrong beta of Adam shows
        from the second on, since the first one does not depend on it.
    dtype
        What floating-point parameters, buffers and inputs are converted to first, so that rounding neither hides a
        difference nor makes one, and complex ones in the same way; None leaves them as they are. Where the model or
        the loss converts values to a narrower dtype, as ``values.float()``, what rounding explains goes by that.
    seed
        Of the model, if it is made here, and of random numbers on the way: ranks and the local model begin each step
        with the same. Dropout can be compared where it acts on replicated plain tensors; elsewhere ``p`` has to be 0.
    limit
        Seconds after which the ranks count as hung.
    pools
        Where the ranks come from; without it they are started for this call.

    Returns
    -------
    ModuleVerification
        Losses, and the collectives by submodule.

    Raises
    ------
    ModuleError
        If something differs, or the ranks raise, hang or die.
    NothingVerified
        If every gradient of the local model is 0 or NaN, if the plan shards nothing, or if something that counts could
        not be compared.
    ToolError
        If the ranks could not be started.
    ValueError
        If an argument does not fit, or the ranks cannot import it; if the local model raises; or if this process has
        registered a sharding rule that the ranks cannot have, with the option that gives it to them.
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
    """Run the local model, then the ranks: of ``pools``, or else of their own, for ``limit`` seconds at most."""
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
    """Return what was compared and equal; raise what ``verify_module`` raises once the ranks have run."""
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
    """Refuse placements of an output that has not the dims which they cut, where ranks hold it as a plain tensor.

    What a DTensor is placed as it says itself.
    """
    returned = observed.local.returned.items()
    for number, ((at, expected), declared) in enumerate(zip(returned, observed.outputs, strict=True)):
        helds = [run.returned.get(at) for run in observed.ranks]
        used = [p for mesh_dim, p in enumerate(declared) if not matcher.has_placement(helds, mesh_dim)]
        if all(helds) and not fits(tuple(used), len(expected.shape)):
            raise misfit(declared, len(expected.shape), number, source)


def _warnings(runs: Sequence[ModuleRun]) -> tuple[str, ...]:
    """Return what the plan warned of, each once: with the rank before it unless all ranks did."""
    found: dict[str, list[int]] = {}
    for rank, run in enumerate(runs):
        for text in run.warnings:
            found.setdefault(text, []).append(rank)
    return tuple(
        text if len(ranks) == len(runs) else f"rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in found.items()
    )


def _nothing_sharded(runs: Sequence[ModuleRun], placements: Sequence[Placements | None]) -> bool:
    """Return whether every rank just ran the local model."""
    replicated = all(placement.is_replicate() for given in placements for placement in given or ())
    return replicated and not any(
        run.collectives or any(held.dtensor for held in (*run.state.values(), *(seen.held for seen in run.outputs)))
        for run in runs
    )
