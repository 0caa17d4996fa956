"""What comes of ``verify_module``: the result, or the exception, in words."""

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
        What is 0 or NaN everywhere in the local model, so that agreement proves nothing.
    warnings
        What the plan warned of while it was applied, as ``UserWarning: ...``; with the rank before it unless all
        ranks did.
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
        """Return how often each collective ran in ``module`` and what is within it, in ``phase`` or in all of them."""
        inside = [
            c
            for c in self.collectives
            if (c.module == module or c.module.startswith(f"{module}.") or not module) and phase in (None, c.phase)
        ]
        return {name: sum(c.count for c in inside if c.name == name) for name in dict.fromkeys(c.name for c in inside)}

    def describe(self) -> str:
        """Return what was compared, the collectives by submodule, one a line, and what makes it prove less."""
        lines = [f"{self.call}: {plural(self.compared, 'tensor')} equal"]
        lines += [f"  {c.phase:8} {c.module or '(model)'}: {c.count} {c.name}" for c in self.collectives]
        if self.vacuous:
            lines.append(f"  0 or NaN everywhere in the local model, so agreement proves nothing: {some(self.vacuous)}")
        lines += warning_lines(self.warnings)
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- messages
def warning_lines(warned: Sequence[str]) -> list[str]:
    """Return what a plan warned of as lines of a message, cut where they are long."""
    lines = [f"  {NOTES[2]}{shortened(text)}" for text in warned[:_NAMED]]
    return lines + ([f"  and {plural(len(warned) - _NAMED, 'more warning')}"] if len(warned) > _NAMED else [])


def some(names: Sequence[str], comma: str = ", ") -> str:
    """Return the first of ``names``, and how many more there are."""
    more = f"{comma}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return comma.join(names[:_NAMED]) + more


def failure_error(outcome: TaskOutcome, call: str) -> ModuleError:
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
        notes = [line for line in frames if line.startswith(NOTES)]
        lines += [f"  {note}" for note in notes]
        lines += [f"  {line}" for line in frames[-_FRAMES:] if line not in notes]
    return ModuleError("\n".join(lines), kind)


_FRAMES = 12
"""Last lines of a traceback that a message shows."""
_NAMED = 5
"""So many of the differences after the first one are named in a message."""


def difference_error(judgement: Judgement, local: ModuleRun, call: str, warned: Sequence[str]) -> ModuleError:
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
