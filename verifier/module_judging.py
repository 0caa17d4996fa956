"""What ranks saw of a sharded module against what the local one did: what differs, and where that began."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial

from verifier.cases import DifferenceKind, Placements, format_placements
from verifier.comparison import compare
from verifier.module_matching import Matcher, ModuleDifference, Options, Place, largest
from verifier.module_observing import PHASES, Held, ModuleRun, Recorded
from verifier.wording import plural

__all__ = ["Judgement", "judge_module"]


@dataclass(frozen=True)
class Judgement:
    """What differs.

    Attributes
    ----------
    final
        Differences in what counts: output, losses, gradients and the state after the last step.
    first
        Where the first difference arose, in the order of execution; None where nothing final differs.
    before
        How many tensors were compared before it, in the same order, and were equal.
    layouts
        How the ranks hold what each submodule returns.
    unchecked, vacuous
        What could not be compared, with the reason, and what is 0 everywhere, so that agreement proves nothing.
    compared
        How many tensors were compared.
    """

    final: tuple[ModuleDifference, ...]
    first: ModuleDifference | None
    before: int
    layouts: tuple[tuple[str, str], ...]
    unchecked: tuple[str, ...]
    vacuous: tuple[str, ...]
    compared: int


def judge_module(
    local: ModuleRun,
    ranks: Sequence[ModuleRun],
    matcher: Matcher,
    outputs: Placements,
    losses: Placements,
    inputs: Sequence[Placements | None],
    disturbed: ModuleRun | None = None,
) -> Judgement:
    """Compare ``ranks``, in order, with ``local``.

    Parameters
    ----------
    matcher
        Knows the mesh.
    outputs, losses
        How plain tensors that the model, and the loss, return stand for the whole.
    inputs
        Placements of the inputs, which their gradients have, too.
    disturbed
        The local model with gradients that are off by what rounding explains: how far it gets from ``local``, the
        ranks may get in their steps. An optimiser that divides by the size of a gradient, as Adam does, makes a step
        of one that is 0 but for rounding.
    """
    return _Judge(local, ranks, matcher, outputs, losses, disturbed or local).judge(inputs)


class _Judge:
    def __init__(
        self,
        local: ModuleRun,
        ranks: Sequence[ModuleRun],
        matcher: Matcher,
        outputs: Placements,
        losses: Placements,
        disturbed: ModuleRun,
    ) -> None:
        self.local = local
        self.ranks = ranks
        self.matcher = matcher
        self.outputs = outputs
        self.losses = losses
        self.disturbed = disturbed
        self.steps = len(local.losses)
        self.vacuous: list[str] = []
        # a plain loss averaged over a mesh dim has gradients, before they are averaged, of as many times the size
        first_losses = [run.losses[0] for run in ranks]
        self.averaged = math.prod(
            extent
            for mesh_dim, (placement, extent) in enumerate(zip(losses, matcher.mesh.shape, strict=True))
            if isinstance(placement, Partial)
            and placement.reduce_op == "avg"
            and not matcher.has_placement(first_losses, mesh_dim)
        )

    def judge(self, inputs: Sequence[Placements | None]) -> Judgement:
        final = [*self._final_forward(), *self._final_backward(inputs), *self._final_state()]
        final.sort(key=lambda found: PHASES.index(found.phase))  # losses of later steps follow from gradients
        unchecked = tuple(dict.fromkeys(self.matcher.unchecked))  # what is between counts less
        forward, layouts = self._walk(self.local.outputs, [run.outputs for run in self.ranks], "forward")
        first: ModuleDifference | None = None
        before = 0
        if final and final[0].phase == "forward":
            first, before = self._first(forward, final)
        elif final and final[0].phase == "backward":
            gradients = [run.output_gradients for run in self.ranks]
            backward, _ = self._walk(self.local.output_gradients, gradients, "backward")
            first, before = self._first(self._with_parameters(backward, final), final)
            before += len(forward)
        elif final:
            first, before = final[0], self.matcher.compared - len(final)
        return Judgement(
            tuple(final), first, before, layouts, unchecked, tuple(self.vacuous),
            self.matcher.compared,
        )  # fmt: skip

    def _first(
        self, found: Sequence[ModuleDifference | None], final: Sequence[ModuleDifference]
    ) -> tuple[ModuleDifference, int]:
        """Return the first difference on the way, or else the first final one, and the number of tensors before it."""
        for number, difference in enumerate(found):
            if difference is not None:
                return difference, number
        return final[0], len(found)

    def _with_parameters(
        self, found: Sequence[ModuleDifference | None], final: Sequence[ModuleDifference]
    ) -> list[ModuleDifference | None]:
        """Return ``found`` with the gradients of parameters, each right after that of what its submodule returns."""
        of_modules: dict[str, list[ModuleDifference]] = {}
        for wrong in final:
            if wrong.phase == "backward":
                of_modules.setdefault(wrong.module, []).append(wrong)
        last = {recorded.module: number for number, recorded in enumerate(self.local.output_gradients)}
        merged: list[ModuleDifference | None] = []
        for number, (recorded, difference) in enumerate(zip(self.local.output_gradients, found, strict=True)):
            merged.append(difference)
            if last[recorded.module] == number and recorded.module:
                merged += of_modules.get(recorded.module, [])
        return merged

    # ------------------------------------------------------------------------------------------------- what has to hold
    def _final_forward(self) -> Iterator[ModuleDifference]:
        scale = largest([held.local for held in self.local.result])
        for number, expected in enumerate(self.local.result):
            name = "output" if len(self.local.result) == 1 else f"output {number}"
            helds = [run.result[number] if number < len(run.result) else None for run in self.ranks]
            yield from self._check(Place(name, "forward", ""), helds, expected, self.outputs, scale)
        most = max(len(run.result) for run in self.ranks)
        if most > len(self.local.result):
            rank = next(rank for rank, run in enumerate(self.ranks) if len(run.result) == most)
            place, wanted = Place("output", "forward", ""), len(self.local.result)
            yield place.difference(DifferenceKind.STRUCTURE, rank, plural(most, "tensor"), wanted)
        scale = largest([held.local for held in self.local.losses])
        for step, expected in enumerate(self.local.losses):
            place = Place(f"loss {step}" if self.steps > 1 else "loss", "forward" if step == 0 else "step", "")
            helds = [run.losses[step] for run in self.ranks]
            away = _distance(self.disturbed.losses[step], expected)
            yield from self._check(place, helds, expected, self.losses, scale * (step + 1), away=away)

    def _final_backward(self, inputs: Sequence[Placements | None]) -> Iterator[ModuleDifference]:
        scale = largest([held.local for held in self.local.gradients.values() if held is not None])
        for name, expected in self.local.gradients.items():
            place = Place(f"gradient of {name}", "backward", name.rpartition(".")[0])
            helds = [run.gradients.get(name) for run in self.ranks]
            if expected is not None:
                found = self._check(place, helds, expected, self.matcher.whole, scale)
                yield from (self._because_untied(difference, name) for difference in found)
            elif any(helds):
                rank = next(rank for rank, held in enumerate(helds) if held is not None)
                yield place.difference(DifferenceKind.STRUCTURE, rank, "a gradient", "none")
        for number, (expected, placements) in enumerate(zip(self.local.input_gradients, inputs, strict=True)):
            if expected is not None and placements is not None:
                place = Place(f"gradient of input {number}", "backward", "")
                helds = [run.input_gradients[number] for run in self.ranks]
                scale = largest([expected.local])
                yield from self._check(place, helds, expected, placements, scale, self.averaged)

    def _final_state(self) -> Iterator[ModuleDifference]:
        parameters = largest([self.local.state[name].local for name in self.local.gradients])
        for name, expected in self.local.state.items():
            scale = (
                max(parameters, largest([expected.local])) * self.steps
            )  # a mask may be as large as the dtype admits
            place = Place(name, "step", name.rpartition(".")[0])
            helds = [run.state.get(name) for run in self.ranks]
            away = _distance(self.disturbed.state[name], expected)
            found = self._check(place, helds, expected, self.matcher.whole, scale, away=away)
            yield from (self._because_untied(difference, name) for difference in found)
        added = sorted(set(self.ranks[0].state) - set(self.local.state))
        if added:
            place = Place("parameters and buffers", "step", "")
            yield place.difference(DifferenceKind.STRUCTURE, 0, f"also {', '.join(added)}", "those of the local model")

    def _check(
        self,
        place: Place,
        helds: Sequence[Held | None],
        expected: Held,
        declared: Placements,
        scale: float,
        factor: int = 1,
        away: float = 0.0,
    ) -> Iterator[ModuleDifference]:
        if not bool(expected.local.count_nonzero()):
            self.vacuous.append(place.subject)
        options: Options = self.matcher.options(helds, declared)
        match = self.matcher.match(place, helds, expected, options, scale, factor, away)
        if match.found is not None:
            yield match.found

    def _because_untied(self, found: ModuleDifference, name: str) -> ModuleDifference:
        for group in self.local.tied:
            if name in group and group not in self.ranks[0].tied:
                names = " and ".join(group)
                likely = f"{names} are one parameter in the local model; did the plan make two of them?"
                return replace(found, likely=likely)
        return found

    # ------------------------------------------------------------------------------------------------ where it began
    def _walk(
        self, local: Sequence[Recorded], ranks: Sequence[Sequence[Recorded]], phase: str
    ) -> tuple[list[ModuleDifference | None], tuple[tuple[str, str], ...]]:
        """Return, for each tensor in the order of the local execution, how it differs; and how the ranks hold it.

        Plain tensors have no placements, so every layout is tried.
        """
        tables = [{recorded.key: recorded.held for recorded in records} for records in ranks]
        found: list[ModuleDifference | None] = []
        layouts: dict[str, str] = {}
        scale = largest([recorded.held.local for recorded in local])
        factor = self.averaged if phase == "backward" else 1
        through = ""
        for recorded in local:
            helds = [table.get(recorded.key) for table in tables]
            module = recorded.module if phase == "forward" else through
            through = recorded.module
            if all(held is None for held in helds):  # called otherwise than in the local model
                found.append(None)
                continue
            subject = f"output of {recorded.module or 'the model'}"
            place = Place(subject if phase == "forward" else f"gradient of the {subject}", phase, module)
            options = self.matcher.any_layout(helds, recorded.held)
            match = self.matcher.match(place, helds, recorded.held, options, scale, factor)
            text = format_placements(match.placements)
            difference: ModuleDifference | None = match.found
            if difference is None:
                layouts.setdefault(recorded.module, text)
                pending = any(placement.is_partial() for placement in match.placements)
                if pending and helds[0] is not None and not helds[0].dtensor:
                    difference = _unreduced(place, helds[0], recorded.held, text)
            found.append(difference)
        return found, tuple(layouts.items())


def _distance(one: Held, other: Held) -> float:
    if not one.local.is_floating_point():
        return 0.0
    return largest([one.local - other.local])


def _unreduced(place: Place, held: Held, expected: Held, text: str) -> ModuleDifference | None:
    """Return how the part that rank 0 has differs from the whole; None if the other ranks have nothing to add."""
    difference = compare(held.local, expected.local, 0.0)
    if difference is None:
        return None
    kind, got, wanted, index = difference
    likely = f"the ranks hold parts of it, as {text}, in a plain tensor: was the reduction left out?"
    return place.difference(kind, 0, got, wanted, index, likely)
