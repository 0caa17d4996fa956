"""``verify_module``: a whole model under a parallel plan against the same model in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from verifier.calls.result import NothingVerified, ToolError
from verifier.core.case import MeshSpec
from verifier.execution.packing import unpack
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import PoolError, RulesNotInRanks
from verifier.meshes.tasks import Task, TaskOutcome
from verifier.modules.arguments import ParallelPlan, fits, misfit, wrong_keyword
from verifier.modules.case import ModuleCase
from verifier.modules.data import ModuleCollective, ModuleRun
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
    case = ModuleCase(
        model=model,
        plan=plan,
        inputs=inputs,
        kwargs={} if kwargs is None else kwargs,
        targets=targets,
        mesh=mesh if isinstance(mesh, MeshSpec) else MeshSpec.parse(str(mesh)),
        dim_names=dim_names,
        placements=placements,
        kwargs_placements=kwargs_placements,
        as_dtensors=as_dtensors,
        outputs=outputs,
        loss=loss,
        loss_placements=loss_placements,
        optimizer=optimizer,
        steps=steps,
        dtype=dtype,
        seed=seed,
    )
    return judge(case, observe(case, limit, pools))


# --------------------------------------------------------------------------------------------------------- observation
@dataclass(frozen=True)
class ModuleObservation:
    """What the local model did and what came of the ranks.

    ``outputs`` and ``loss`` say how plain tensors of the ranks stand for the whole ones.
    """

    local: ModuleRun
    outputs: tuple[Placements, ...]
    loss: Placements
    outcome: TaskOutcome


def observe(case: ModuleCase, limit: float, pools: PoolSet | None) -> ModuleObservation:
    """Run the local model, then the ranks: of ``pools``, or else of their own, for ``limit`` seconds at most."""
    __tracebackhide__ = True
    local = _run_locally(case)
    outputs = case.output_placements(local)
    loss = case.whole_loss(outputs)
    task = Task("verifier.modules.observing.on_rank", (case.packed,), case.mesh, case.names, limit)
    with Pool(PoolKey.of(case.mesh)) if pools is None else nullcontext(pools.of(case.mesh)) as pool:
        try:
            outcome = pool.call(task)
        except RulesNotInRanks as error:
            raise ValueError(error.text("--verifier-import FILE")) from error
        except PoolError as error:
            raise ToolError(f"{error}; in {case.call}") from error
    return ModuleObservation(local, outputs, loss, outcome)


def _run_locally(case: ModuleCase) -> ModuleRun:
    """Run the local model; refuse one that raises, returns no tensor, or proves nothing."""
    __tracebackhide__ = True
    try:
        local = run_module(unpack(case.packed))  # a copy, so that the caller's model stays as it is
    except Exception as error:
        if wrong := wrong_keyword(case.given.model, len(case.inputs), case.kwargs):
            raise ValueError(wrong) from error
        raise ValueError(f"the local model, its loss or a step raises {type(error).__name__}: {error}") from error
    if not local.returned:
        raise ValueError("the model returns no tensor, also not in tuples, lists, dicts or dataclasses of them")
    if all(held is None or proves_nothing(held.local) for held in local.gradients.values()):
        advice = "give inputs and a loss that move it"
        raise NothingVerified(f"{case.call}: every gradient of the local model is 0 or NaN; {advice}")
    return local


# ------------------------------------------------------------------------------------------------------------- verdict
def judge(case: ModuleCase, observed: ModuleObservation) -> ModuleVerification:
    """Return what was compared and equal; raise what ``verify_module`` raises once the ranks have run."""
    __tracebackhide__ = True
    if not observed.outcome.ok:
        raise failure_error(observed.outcome, case.call)
    local, outputs, loss = observed.local, observed.outputs, observed.loss
    runs: list[ModuleRun] = list(observed.outcome.returned)  # type: ignore[arg-type]
    matcher = partial(Matcher, case.mesh, case.names, local.eps)
    _check_fit(local, runs, outputs, matcher(), "" if case.outputs else ", as the first input,")
    judged = partial(judge_module, local, runs, outputs=outputs, losses=loss, inputs=case.input_placements)
    judgement = judged(matcher())
    if judgement.first is not None and judgement.first.phase == "step":
        off = disturbances(local, runs, matcher())
        disturbed = [run_module(replace(unpack(case.packed), disturbed=one)) for one in off]
        judgement = judged(matcher(), disturbed=disturbed)
    warned = _warnings(runs)
    if judgement.first is not None:
        raise difference_error(judgement, local, case.call, warned)
    if _nothing_sharded(runs, (*case.placed, *outputs)):
        message = (
            f"{case.call}: nothing is sharded; ranks hold plain tensors, whole, and ran no collective; does the plan "
            "name submodules of the model?"
        )
        raise NothingVerified("\n".join([message, *warning_lines(warned)]))
    if judgement.unchecked:
        raise NothingVerified(f"{case.call}: not compared are {some(judgement.unchecked, '; ')}")
    return ModuleVerification(
        call=case.call,
        losses=tuple(float(matcher().value(helds, loss)) for helds in zip(*(run.losses for run in runs), strict=True)),
        local_losses=tuple(float(held.local) for held in local.losses),
        collectives=runs[0].collectives,
        layouts=judgement.layouts,
        compared=judgement.compared,
        vacuous=judgement.vacuous,
        warnings=warned,
    )


def _check_fit(
    local: ModuleRun, runs: Sequence[ModuleRun], placements: Sequence[Placements], matcher: Matcher, source: str
) -> None:
    """Refuse placements of an output that has not the dims which they cut, where ranks hold it as a plain tensor.

    What a DTensor is placed as it says itself.
    """
    for number, ((at, expected), declared) in enumerate(zip(local.returned.items(), placements, strict=True)):
        helds = [run.returned.get(at) for run in runs]
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
