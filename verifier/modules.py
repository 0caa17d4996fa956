"""``verify_module``: a whole model under a parallel plan against the same model in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial

from verifier.cases import (
    DifferenceKind,
    Fate,
    MeshSpec,
    Placements,
    VerdictKind,
    parse_placements,
)
from verifier.codec import unpack
from verifier.meshes import Pool, PoolError, PoolKey, PoolSet
from verifier.module_arguments import (
    DIM_NAMES,
    Plan,
    built_model,
    check_mesh,
    check_plan,
    converted,
    packed_for_ranks,
    parsed_placements,
    placements_of,
    plan_text,
    spread,
)
from verifier.module_judging import Judgement, judge_module
from verifier.module_matching import Matcher, ModuleDifference, rounding
from verifier.module_observing import RAISED_IN, Assignment, ModuleCollective, ModuleRun, observe
from verifier.reference import resolve
from verifier.tasks import Task, TaskOutcome
from verifier.verification import NothingVerified, ToolError
from verifier.wording import plural

__all__ = [
    "ModuleCollective",
    "ModuleDifference",
    "ModuleError",
    "ModuleVerification",
    "Plan",
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


# -------------------------------------------------------------------------------------------------------------- result
class ModuleError(AssertionError):
    """A sharded model does not do what the local one does.

    Attributes
    ----------
    kind
        The verdict, such as ``WRONG_GRADIENT`` or ``HANG``.
    first
        Where the first difference arose; None where the ranks did not come to an end.
    differences
        Whatever differs of the output, the losses, the gradients and the state after the last step.
    """

    def __init__(
        self,
        message: str,
        kind: VerdictKind,
        first: ModuleDifference | None = None,
        differences: tuple[ModuleDifference, ...] = (),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.first = first
        self.differences = differences


@dataclass(frozen=True)
class ModuleVerification:
    """A sharded model that does what the local one does.

    Attributes
    ----------
    call
        Model, plan and mesh, as text.
    losses, local_losses
        The loss of each step, of the ranks together and of the local model.
    collectives
        What rank 0 ran in the first step, by submodule and phase.
    layouts
        How the ranks hold what each submodule returns, as ``("net1", "S(1)")``, in the order of execution; for plain
        tensors the first layout that fits.
    compared
        How many tensors were compared.
    vacuous
        What is 0 everywhere in the local model, so that agreement proves nothing.
    """

    call: str
    losses: tuple[float, ...]
    local_losses: tuple[float, ...]
    collectives: tuple[ModuleCollective, ...]
    layouts: tuple[tuple[str, str], ...]
    compared: int
    vacuous: tuple[str, ...] = ()

    def collectives_of(self, module: str, phase: str | None = None) -> dict[str, int]:
        """Return how often each collective ran in ``module`` and what is within it, in ``phase`` or in all of them."""
        inside = [
            c
            for c in self.collectives
            if (c.module == module or c.module.startswith(f"{module}.") or not module) and phase in (None, c.phase)
        ]
        return {name: sum(c.count for c in inside if c.name == name) for name in dict.fromkeys(c.name for c in inside)}

    def describe(self) -> str:
        """Return what was compared, and the collectives by submodule, one a line."""
        lines = [f"{self.call}: {plural(self.compared, 'tensor')} equal"]
        lines += [f"  {c.phase:8} {c.module or '(model)'}: {c.count} {c.name}" for c in self.collectives]
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------- call
def verify_module(
    model: nn.Module | Callable[[], nn.Module] | str,
    plan: Plan,
    inputs: Sequence[object],
    *,
    targets: Sequence[object] = (),
    mesh: MeshSpec | str | int = 2,
    dim_names: Sequence[str] = (),
    placements: str | Sequence[str | None] | None = None,
    as_dtensors: bool = False,
    outputs: str | None = None,
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
    step of the optimiser. Where one of them differs, what every submodule returned says where that began.

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
    mesh
        As ``"2x2"``, ``4`` or a :class:`MeshSpec`; its ranks are processes.
    dim_names
        Names of the mesh dims; ``tp``, or ``dp`` and ``tp``, by default.
    placements
        How each of inputs and targets is given to the ranks, as ``"(S(0), R)"``; one text for all of them, or one
        each. By default all are replicated.
    as_dtensors
        Give them as DTensors. Otherwise each rank gets a plain tensor, which is its part.
    outputs
        How plain tensors that the model returns stand for the output; by default as the first input.
    loss
        ``loss(output, *targets)``, or its dotted path; by default the mean of the squares.
    loss_placements
        How a plain loss stands for the whole one: ``P(avg)`` where gradients are averaged over the ranks, as data
        parallelism does, ``P(sum)`` where they are summed, as sequence parallelism does. By default ``P(avg)`` on mesh
        dims that cut the output.
    optimizer
        Makes an optimiser of parameters; ``SGD(lr=0.1)`` by default.
    steps
        How many steps to make, all with the same inputs. The first is compared in detail.
    dtype
        What floating-point parameters, buffers and inputs are converted to first, so that rounding neither hides a
        difference nor makes one; None leaves them as they are.
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
        If every gradient of the local model is 0, if the plan shards nothing, or if something that counts could not be
        compared.
    ToolError
        If the ranks could not be started.
    ValueError
        If an argument does not fit, or the ranks cannot import it; or if the local model raises.
    """
    __tracebackhide__ = True
    spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec.parse(str(mesh))
    names = tuple(dim_names) or DIM_NAMES[-spec.ndim :]
    check_mesh(spec, names, plan)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    sequences: dict[str, object] = {"inputs": inputs, "targets": targets}
    for what, values in sequences.items():
        if isinstance(values, torch.Tensor):
            raise ValueError(f"{what} is one tensor; give a sequence of them, as [{what[:-1]}]")
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
    )
    first_input = next((p for p in given.placements if p is not None), parse_placements(spread("R", spec)))
    output_placements = parsed_placements(outputs, spec, "outputs") if outputs is not None else first_input
    averaged = tuple("P(avg)" if placement.is_shard() else "R" for placement in output_placements)
    whole_loss = parsed_placements(loss_placements or f"({', '.join(averaged)})", spec, "loss_placements")
    packed = packed_for_ranks(given, "plan, loss, optimizer or inputs")
    call = f"{type(given.model).__name__} under {plan_text(plan)} on mesh {spec}, backend {spec.backend}"
    try:
        local = observe(unpack(packed))  # a copy, so that the caller's model stays as it is
    except Exception as error:
        raise ValueError(f"the local model, its loss or a step raises {type(error).__name__}: {error}") from error
    if not local.result:
        raise ValueError("the model returns no tensor, also not in tuples, lists, dicts or dataclasses of them")
    if not any(held is not None and bool(held.local.count_nonzero()) for held in local.gradients.values()):
        raise NothingVerified(f"{call}: every gradient of the local model is 0; give inputs and a loss that move it")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool(PoolKey.of(spec))) if pools is None else pools.of(spec)
        try:
            outcome = pool.call(Task("verifier.module_observing.on_rank", (packed,), spec, names, limit))
        except PoolError as error:
            raise ToolError(f"{error}; in {call}") from error
    if not outcome.ok:
        raise _failure(outcome, call)
    runs: list[ModuleRun] = list(outcome.returned)  # type: ignore[arg-type]

    def judged(disturbed: ModuleRun | None = None) -> Judgement:
        matcher, placements = Matcher(spec, names), given.placements[: len(given.inputs)]
        return judge_module(local, runs, matcher, output_placements, whole_loss, placements, disturbed)

    judgement = judged()
    if judgement.first is not None and judgement.first.phase == "step":
        share = max(rounding(parameter.dtype) for parameter in built.parameters())
        judgement = judged(observe(replace(unpack(packed), disturbed=share)))
    if judgement.first is not None:
        raise _difference(judgement, local, call)
    if _nothing_sharded(runs, (*given.placements, output_placements)):
        raise NothingVerified(
            f"{call}: nothing is sharded; ranks hold plain tensors, whole, and ran no collective; does the plan name "
            "submodules of the model?"
        )
    if judgement.unchecked:
        raise NothingVerified(f"{call}: not compared are {'; '.join(judgement.unchecked[:_NAMED])}")
    return ModuleVerification(
        call=call,
        losses=tuple(_losses(runs, whole_loss)),
        local_losses=tuple(float(held.local) for held in local.losses),
        collectives=runs[0].collectives,
        layouts=judgement.layouts,
        compared=judgement.compared,
        vacuous=judgement.vacuous,
    )


# ------------------------------------------------------------------------------------------------------------ outcomes
def _losses(runs: Sequence[ModuleRun], placements: Placements) -> Iterator[float]:
    """Yield the loss of each step: that of rank 0, or of all together where each has its part."""
    kinds = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
    for helds in zip(*(run.losses for run in runs), strict=True):
        parts = [float(held.local) for held in helds]
        if helds[0].dtensor:
            kinds = {p.reduce_op for p in helds[0].placements or () if isinstance(p, Partial)}
        yield {"avg": sum(parts) / len(parts), "sum": sum(parts)}.get(next(iter(kinds), ""), parts[0])


def _nothing_sharded(runs: Sequence[ModuleRun], placements: Sequence[Placements | None]) -> bool:
    """Return whether every rank just ran the local model."""
    replicated = all(placement.is_replicate() for given in placements for placement in given or ())
    return replicated and not any(
        run.collectives or any(held.dtensor for held in (*run.state.values(), *(seen.held for seen in run.outputs)))
        for run in runs
    )


def _failure(outcome: TaskOutcome, call: str) -> ModuleError:
    """Return the exception for ranks that did not all come to an end."""
    found = outcome.failure()
    kind = {Fate.HANG: VerdictKind.HANG, Fate.DIED: VerdictKind.DIED}.get(outcome.fate, VerdictKind.CRASH)
    lines = []
    if found is not None and kind is VerdictKind.CRASH:
        rank, raised = found
        kind = VerdictKind.UNSUPPORTED if raised.refusal else kind
        lines.append(f"{kind} rank {rank} raised {raised.type}: {raised.message}")
    else:
        lines.append(f"{kind} {outcome.detail}")
    lines.append(f"  in {call}")
    if found is not None and kind not in (VerdictKind.HANG, VerdictKind.DIED):
        frames = found[1].traceback.strip().splitlines()
        notes = [line for line in frames if line.startswith(RAISED_IN)]
        lines += [f"  {note}" for note in notes]
        lines += [f"  {line}" for line in frames[-_FRAMES:] if line not in notes]
    return ModuleError("\n".join(lines), kind)


_FRAMES = 12
"""Last lines of a traceback that a message shows."""
_NAMED = 5
"""So many of the differences after the first one are named in a message."""


def _difference(judgement: Judgement, local: ModuleRun, call: str) -> ModuleError:
    """Return the exception for a model that does something else."""
    first = judgement.first
    assert first is not None
    kind = _VERDICTS.get(first.kind) or (
        VerdictKind.WRONG_GRADIENT if first.phase == "backward" else VerdictKind.WRONG_VALUE
    )
    lines = [f"{kind} {first}", f"  in {call}, during {first.phase}"]
    if first.module:
        what = f"{first.module} ({local.modules.get(first.module, 'not in the local model')})"
        lines.append(f"  first in the submodule {what}; {_equal(judgement.before)} before it")
    rest = [found.subject for found in judgement.final if found.subject != first.subject]
    if rest:
        more = f", and {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
        lines.append(f"  also: {', '.join(rest[:_NAMED])}{more}")
    likely = first.likely or next((found.likely for found in judgement.final if found.likely), "")
    if "Dropout" in local.modules.get(first.module, ""):
        likely = likely or "ranks draw other random numbers for their parts than one process for all: set p to 0"
    if likely:
        lines.append(f"  likely: {likely}")
    return ModuleError("\n".join(lines), kind, first, judgement.final)


def _equal(count: int) -> str:
    return f"{plural(count, 'tensor')} {'is' if count == 1 else 'are'} equal"


_VERDICTS = {
    DifferenceKind.SHAPE: VerdictKind.WRONG_SHAPE,
    DifferenceKind.DTYPE: VerdictKind.WRONG_DTYPE,
    DifferenceKind.PLACEMENT: VerdictKind.RANKS_DISAGREE,
}
