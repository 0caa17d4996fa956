"""``verify_module``: a whole model under a parallel plan against the same model in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from verifier.calls.result import NothingVerified, ToolError
from verifier.core.case import MeshSpec
from verifier.core.ops import resolve
from verifier.execution.packing import unpack
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import PoolError, RulesNotInRanks
from verifier.meshes.tasks import Task
from verifier.modules.arguments import (
    DIM_NAMES,
    ParallelPlan,
    built_model,
    check_mesh,
    check_plan,
    check_values,
    converted,
    fits,
    kwargs_placements_of,
    misfit,
    output_placements_of,
    packed_for_ranks,
    parsed_placements,
    placements_of,
    plan_text,
    spread,
    wrong_keyword,
)
from verifier.modules.data import Assignment, ModuleCollective, ModuleRun
from verifier.modules.judging import Judgement, disturbances, judge_module
from verifier.modules.matching import Matcher, ModuleDifference, proves_nothing
from verifier.modules.observing import observe
from verifier.modules.outcomes import (
    ModuleError,
    ModuleVerification,
    difference_error,
    failure_error,
    some,
    warning_lines,
)
from verifier.placements.parsing import parse_placements
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
    names = tuple(dim_names) or DIM_NAMES[-spec.ndim :]
    check_mesh(spec, names, plan)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    kwargs = {} if kwargs is None else kwargs
    check_values(inputs, targets, kwargs)
    built = built_model(model, seed, dtype)
    check_plan(plan, built)
    given = Assignment(
        model=built,
        plan=plan,
        inputs=tuple(converted(value, dtype) for value in inputs),
        targets=tuple(converted(value, dtype) for value in targets),
        placements=placements_of(placements, (*inputs, *targets), spec),
        as_dtensors=as_dtensors,
        loss=resolve(loss) if isinstance(loss, str) else loss,  # type: ignore[arg-type]
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1),
        steps=steps,
        seed=seed,
        kwargs={name: converted(value, dtype) for name, value in kwargs.items()},
        kwargs_placements=kwargs_placements_of(kwargs_placements, kwargs, spec),
    )
    packed = packed_for_ranks(given, "plan, loss, optimizer or inputs")
    call = f"{type(given.model).__name__} under {plan_text(plan)} on mesh {spec}, backend {spec.backend}"
    try:
        local = observe(unpack(packed))  # a copy, so that the caller's model stays as it is
    except Exception as error:
        if wrong := wrong_keyword(built, len(inputs), kwargs):
            raise ValueError(wrong) from error
        raise ValueError(f"the local model, its loss or a step raises {type(error).__name__}: {error}") from error
    if not local.returned:
        raise ValueError("the model returns no tensor, also not in tuples, lists, dicts or dataclasses of them")
    if all(held is None or proves_nothing(held.local) for held in local.gradients.values()):
        advice = "give inputs and a loss that move it"
        raise NothingVerified(f"{call}: every gradient of the local model is 0 or NaN; {advice}")
    placed = (*given.placements[: len(inputs)], *given.kwargs_placements.values(), *given.placements[len(inputs) :])
    first_input = next((p for p in placed if p is not None), parse_placements(spread("R", spec)))
    ndims = [len(held.shape) for held in local.returned.values()]
    output_placements = output_placements_of(outputs, ndims, first_input, spec)
    averaged = tuple("P(avg)" if placement.is_shard() else "R" for placement in output_placements[0])
    whole_loss = parsed_placements(loss_placements or f"({', '.join(averaged)})", spec, "loss_placements")
    if not fits(whole_loss, 0):
        raise ValueError(f"loss_placements {loss_placements!r}: a loss has no dim to cut; give P(avg), P(sum) or R")
    matcher = partial(Matcher, spec, names, local.eps)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool(PoolKey.of(spec))) if pools is None else pools.of(spec)
        try:
            outcome = pool.call(Task("verifier.modules.observing.on_rank", (packed,), spec, names, limit))
        except RulesNotInRanks as error:
            raise ValueError(error.text("--verifier-import FILE")) from error
        except PoolError as error:
            raise ToolError(f"{error}; in {call}") from error
    if not outcome.ok:
        raise failure_error(outcome, call)
    runs: list[ModuleRun] = list(outcome.returned)  # type: ignore[arg-type]

    _check_fit(local, runs, output_placements, matcher(), "" if outputs else ", as the first input,")
    input_placements = {f"input {number}": p for number, p in enumerate(given.placements[: len(inputs)])}
    input_placements |= {f"input {name}": p for name, p in given.kwargs_placements.items()}

    def judged(disturbed: Sequence[ModuleRun] = ()) -> Judgement:
        return judge_module(local, runs, matcher(), output_placements, whole_loss, input_placements, disturbed)

    judgement = judged()
    if judgement.first is not None and judgement.first.phase == "step":
        off = disturbances(local, runs, matcher())
        judgement = judged([observe(replace(unpack(packed), disturbed=one)) for one in off])
    warned = _warnings(runs)
    if judgement.first is not None:
        raise difference_error(judgement, local, call, warned)
    if _nothing_sharded(runs, (*placed, *output_placements)):
        message = (
            f"{call}: nothing is sharded; ranks hold plain tensors, whole, and ran no collective; does the plan name "
            "submodules of the model?"
        )
        raise NothingVerified("\n".join([message, *warning_lines(warned)]))
    if judgement.unchecked:
        raise NothingVerified(f"{call}: not compared are {some(judgement.unchecked, '; ')}")
    return ModuleVerification(
        call=call,
        losses=tuple(
            float(matcher().value(helds, whole_loss)) for helds in zip(*(run.losses for run in runs), strict=True)
        ),
        local_losses=tuple(float(held.local) for held in local.losses),
        collectives=runs[0].collectives,
        layouts=judgement.layouts,
        compared=judgement.compared,
        vacuous=judgement.vacuous,
        warnings=warned,
    )


# ------------------------------------------------------------------------------------------------------------ outcomes
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
