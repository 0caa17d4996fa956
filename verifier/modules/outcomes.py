"""The result of ``verify_module``, or its exception with a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verifier.core.observation import DifferenceKind, Fate
from verifier.core.verdict import VerdictKind
from verifier.core.wording import plural
from verifier.meshes.tasks import TaskOutcome
from verifier.modules.data import NOTES, ModuleCollective, ModuleRun
from verifier.modules.judging import Judgement
from verifier.modules.leaves import shortened
from verifier.modules.matching import ModuleDifference

__all__ = ["ModuleError", "ModuleVerification", "difference_error", "failure_error", "some", "warning_lines"]


class ModuleError(AssertionError):
    """A sharded model differs from the local model.

    Attributes
    ----------
    kind
        The verdict, such as ``WRONG_GRADIENT`` or ``HANG``.
    first
        Where the first difference arose; None if not all ranks completed.
    differences
        All differences in the output, the losses, the gradients and the state after the last step.
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
    """A sharded model that agrees with the local model.

    Attributes
    ----------
    call
        Model, plan and mesh, as text.
    losses, local_losses
        The loss of each step: reduced over the ranks, and of the local model.
    collectives
        The collectives of rank 0 in the first step, by submodule and phase.
    layouts
        The placements of each submodule's result, as ``("net1", "S(1)")``, in the order of execution; for plain
        tensors the first that fit.
    compared
        How many tensors were compared.
    vacuous
        The tensors that are 0 or NaN everywhere in the local model, so that agreement proves nothing.
    warnings
        The warnings while the plan was applied, as ``UserWarning: ...``; the rank stands before a warning that not
        all ranks gave.
    """

    call: str
    losses: tuple[float, ...]
    local_losses: tuple[float, ...]
    collectives: tuple[ModuleCollective, ...]
    layouts: tuple[tuple[str, str], ...]
    compared: int
    vacuous: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def collectives_of(self, module: str, phase: str | None = None) -> dict[str, int]:
        """Return how often each collective ran in ``module`` and its submodules, in ``phase`` or in all phases."""
        inside = [
            c
            for c in self.collectives
            if (c.module == module or c.module.startswith(f"{module}.") or not module) and phase in (None, c.phase)
        ]
        return {name: sum(c.count for c in inside if c.name == name) for name in dict.fromkeys(c.name for c in inside)}

    def describe(self) -> str:
        """Return what was compared, the collectives by submodule, what proves nothing, and warnings; one a line."""
        lines = [f"{self.call}: {plural(self.compared, 'tensor')} equal"]
        lines += [f"  {c.phase:8} {c.module or '(model)'}: {c.count} {c.name}" for c in self.collectives]
        if self.vacuous:
            lines.append(f"  0 or NaN everywhere in the local model, so agreement proves nothing: {some(self.vacuous)}")
        lines += warning_lines(self.warnings)
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- messages
def warning_lines(warned: Sequence[str]) -> list[str]:
    """Return the warnings of a plan as lines of a message; long ones are cut."""
    lines = [f"  {NOTES[2]}{shortened(text)}" for text in warned[:_NAMED]]
    return lines + ([f"  and {plural(len(warned) - _NAMED, 'more warning')}"] if len(warned) > _NAMED else [])


def some(names: Sequence[str], comma: str = ", ") -> str:
    """Return the first ``names`` as text, and the number of the others."""
    more = f"{comma}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return comma.join(names[:_NAMED]) + more


def failure_error(outcome: TaskOutcome, call: str) -> ModuleError:
    """Return the exception for ranks that did not all complete."""
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
        notes = [line for line in frames if line.startswith(NOTES)]
        lines += [f"  {note}" for note in notes]
        lines += [f"  {line}" for line in frames[-_FRAMES:] if line not in notes]
    return ModuleError("\n".join(lines), kind)


_FRAMES = 12
"""The number of last lines of a traceback that a message shows."""
_NAMED = 5
"""The most further differences or warnings that a message names."""


def difference_error(judgement: Judgement, local: ModuleRun, call: str, warned: Sequence[str]) -> ModuleError:
    """Return the exception for a model that differs."""
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
        lines.append(f"  also: {some(rest)}")
    lines += warning_lines(warned)
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
