"""Compares a sharded module on the ranks with the local module: what differs, and where the difference began."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial

from verifier.core.observation import DifferenceKind
from verifier.core.placement_text import format_placements
from verifier.modules.arguments import ModuleCase
from verifier.modules.data import PHASES, Disturbance, Held, ModuleObservation, ModuleRun, Recorded
from verifier.modules.leaves import Plain, same_number
from verifier.modules.matching import Matcher, ModuleDifference, Options, TensorSite, largest, proves_nothing, rounding
from verifier.oracle.comparison import compare
from verifier.torch_internals.placements import Placements

__all__ = ["Judgement", "disturbances", "judge_module"]

_DRAWS = 4
"""Number of perturbed runs, in pairs of opposite directions. In one run alone, an element might by chance be perturbed
in the direction that has no effect."""
_MARGIN = 3.0
"""Factor on the largest difference in the perturbed runs. If a gradient is only rounding error, it may have opposite
signs on the ranks and in the local model, and Adam's steps depend on earlier gradients."""


@dataclass(frozen=True)
class Judgement:
    """What differs.

    Attributes
    ----------
    final
        Differences in output, losses, gradients and the state after the last step; only these fail the comparison.
    first
        The first difference in the order of execution; None if ``final`` is empty.
    before
        How many tensors before it, in the same order, were equal.
    layouts
        The placements of each submodule's result on the ranks.
    unchecked, vacuous
        The tensors that could not be compared, with the reason; and those that are 0 or NaN everywhere, so that
        agreement proves nothing.
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


def judge_module(case: ModuleCase, observed: ModuleObservation, disturbed: Sequence[ModuleRun] = ()) -> Judgement:
    """Compare the runs of the ranks with the run of the local model.

    ``disturbed`` has runs of the local model whose gradients are perturbed by as much as rounding explains. An element
    of the state may differ on the ranks by as much as it differs in these runs. An optimiser that divides by the size
    of a gradient, as Adam does, makes a whole step from a gradient that is 0 except for rounding.
    """
    return _Judge(case, observed, disturbed).judge()


def disturbances(case: ModuleCase, observed: ModuleObservation) -> list[Disturbance]:
    """Return how to perturb the gradients of the local model, to see how the optimiser amplifies rounding."""
    matcher = Matcher(case, observed.local.eps)
    present = {name: held for name, held in observed.local.gradients.items() if held is not None}
    share = max(rounding(held.local.dtype, matcher.eps) for held in present.values())  # others may be integers
    touched = {
        name: matcher.touched([run.gradients.get(name) for run in observed.ranks], held)
        for name, held in present.items()
    }
    return [Disturbance(share, draw, touched) for draw in range(_DRAWS)]


class _Judge:
    def __init__(self, case: ModuleCase, observed: ModuleObservation, disturbed: Sequence[ModuleRun]) -> None:
        self.local, self.ranks, self.disturbed = observed.local, observed.ranks, disturbed
        self.inputs, self.outputs, self.losses = case.input_placements, observed.outputs, observed.loss
        self.matcher = Matcher(case, self.local.eps)
        self.steps = len(self.local.losses)
        self.vacuous: list[str] = []
        # if a plain loss is averaged over n ranks, its gradients are n times as large until they are averaged
        first_losses = [run.losses[0] for run in self.ranks]
        self.averaged = math.prod(
            extent
            for mesh_dim, (placement, extent) in enumerate(zip(self.losses, case.mesh.shape, strict=True))
            if isinstance(placement, Partial)
            and placement.reduce_op == "avg"
            and self.matcher.placement_on(first_losses, mesh_dim) is None
        )

    def judge(self) -> Judgement:
        final = [*self._final_forward(), *self._final_backward(), *self._final_state()]
        final.sort(key=lambda found: PHASES.index(found.phase))  # losses of later steps follow from gradients
        unchecked = tuple(dict.fromkeys(self.matcher.unchecked))  # tensors of submodules do not count
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
        """Return the first difference in ``found``, or else in ``final``, and the number of tensors before it."""
        for number, difference in enumerate(found):
            if difference is not None:
                return difference, number
        return final[0], len(found)

    def _with_parameters(
        self, found: Sequence[ModuleDifference | None], final: Sequence[ModuleDifference]
    ) -> list[ModuleDifference | None]:
        """Return ``found`` with the gradients of parameters, each after the gradient of its submodule's result."""
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
        returned = self.local.returned
        scale = largest([held.local for held in returned.values()])
        for number, ((at, expected), declared) in enumerate(zip(returned.items(), self.outputs, strict=True)):
            helds = [run.returned.get(at) for run in self.ranks]
            if all(helds):
                name = "output" if len(returned) == 1 else f"output {number}"
                yield from self._check(TensorSite(name, "forward", ""), helds, expected, declared, scale)
        yield from self._final_structure(scale)
        scale = max(largest([held.local for held in self.local.losses]), self._summed())
        for step, expected in enumerate(self.local.losses):
            place = TensorSite(f"loss {step}" if self.steps > 1 else "loss", "forward" if step == 0 else "step", "")
            helds = [run.losses[step] for run in self.ranks]
            away = _distance([run.losses[step] for run in self.disturbed], expected)
            yield from self._check(place, helds, expected, self.losses, scale * (step + 1), away=away)

    def _summed(self) -> float:
        """Return the size of the loss's terms, to first order: terms may cancel, but their rounding errors do not."""
        values = {recorded.key: recorded.held.local for recorded in self.local.outputs if not recorded.module}
        terms = [
            (recorded.held.local * values[recorded.key]).abs().nan_to_num(0.0, 0.0).sum()
            for recorded in self.local.output_gradients
            if recorded.key in values
        ]
        return sum(map(float, terms))

    def _final_structure(self, scale: float) -> Iterator[ModuleDifference]:
        """Yield the first path at which a rank returns another structure, and other leaves that differ."""
        for rank, run in enumerate(self.ranks):
            missing = [at for at in self.local.result if at not in run.result]
            odd = next(iter([*missing, *(at for at in run.result if at not in self.local.result)]), None)
            if odd is not None:
                got, wanted = (_at(one.result, odd) for one in (run, self.local))
                likely = (
                    f"the sharded model returns values at {_places(run.result)}, the local one at "
                    f"{_places(self.local.result)}: does a style of the plan return something else?"
                )
                yield _in_output(odd).difference(DifferenceKind.STRUCTURE, rank, got, wanted, None, likely)
                break
        dtypes = [held.local.dtype for held in self.local.state.values() if held.local.is_floating_point()]
        share = max((rounding(dtype, self.matcher.eps) for dtype in dtypes), default=0.0)
        for at, expected in self.local.result.items():
            for rank, run in enumerate(self.ranks):
                if at in run.result:
                    kind, likely = _plain_difference(run.result[at], expected, share, scale)
                    if kind is not None:
                        got, wanted = _at(run.result, at), _at(self.local.result, at)
                        yield _in_output(at).difference(kind, rank, got, wanted, None, likely)
                        break

    def _final_backward(self) -> Iterator[ModuleDifference]:
        scale = largest([held.local for held in self.local.gradients.values() if held is not None])
        for name, expected in self.local.gradients.items():
            place = TensorSite(f"gradient of {name}", "backward", name.rpartition(".")[0])
            helds = [run.gradients.get(name) for run in self.ranks]
            if expected is not None:
                found = self._check(place, helds, expected, self.matcher.whole, scale)
                yield from (self._because_untied(difference, name) for difference in found)
            elif any(helds):
                rank = next(rank for rank, held in enumerate(helds) if held is not None)
                yield place.difference(DifferenceKind.STRUCTURE, rank, "a gradient", "none")
        for name, placements in self.inputs.items():
            expected = self.local.input_gradients[name]
            if expected is not None and placements is not None:
                place = TensorSite(f"gradient of {name}", "backward", "")
                helds = [run.input_gradients[name] for run in self.ranks]
                scale = largest([expected.local, *(recorded.held.local for recorded in self.local.output_gradients)])
                yield from self._check(place, helds, expected, placements, scale, self.averaged)

    def _final_state(self) -> Iterator[ModuleDifference]:
        parameters = largest([self.local.state[name].local for name in self.local.gradients])
        for name, expected in self.local.state.items():
            scale = (
                max(parameters, largest([expected.local])) * self.steps
            )  # a mask may be as large as the dtype admits
            place = TensorSite(name, "step", name.rpartition(".")[0])
            helds = [run.state.get(name) for run in self.ranks]
            away = _distance([run.state[name] for run in self.disturbed], expected)
            found = self._check(place, helds, expected, self.matcher.whole, scale, away=away)
            yield from (self._because_untied(difference, name) for difference in found)
        added = sorted(set(self.ranks[0].state) - set(self.local.state))
        if added:
            place = TensorSite("parameters and buffers", "step", "")
            yield place.difference(DifferenceKind.STRUCTURE, 0, f"also {', '.join(added)}", "those of the local model")

    def _check(
        self,
        place: TensorSite,
        helds: Sequence[Held | None],
        expected: Held,
        declared: Placements,
        scale: float,
        factor: int = 1,
        away: torch.Tensor | None = None,
    ) -> Iterator[ModuleDifference]:
        if proves_nothing(expected.local):
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
        """Return how each tensor differs, in the order of the local execution, and its placements on the ranks.

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
            if all(held is None for held in helds):  # the submodule is called in another way than in the local model
                found.append(None)
                continue
            subject = f"output of {recorded.module or 'the model'}"
            place = TensorSite(subject if phase == "forward" else f"gradient of the {subject}", phase, module)
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


def _distance(disturbed: Sequence[Held], expected: Held) -> torch.Tensor | None:
    """Return by how much each element may differ, given the perturbed runs; None if no element may."""
    value = expected.local
    if not disturbed or not (value.is_floating_point() or value.is_complex()):
        return None
    farthest = torch.stack([(one.local - value).abs() for one in disturbed]).amax(0)
    return _MARGIN * farthest.nan_to_num(0.0, 0.0)


def _in_output(at: str) -> TensorSite:
    return TensorSite(f"output{at}", "forward", "")


def _at(result: Mapping[str, Held | Plain], at: str) -> str:
    """Return the text for what a model returns at a path."""
    found = result.get(at)
    if found is None:
        return "nothing" if at else f"values at {_places(result)}"
    return f"a tensor of {list(found.shape)}" if isinstance(found, Held) else str(found)


def _places(result: Mapping[str, object], most: int = 4) -> str:
    shown = [at or "its top" for at in result]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _plain_difference(
    got: Held | Plain, expected: Held | Plain, share: float, scale: float
) -> tuple[DifferenceKind | None, str]:
    """Return how a leaf differs that is no tensor on at least one side, with a guess at the cause."""
    if isinstance(got, Held) and isinstance(expected, Held):
        return None, ""  # compared as tensors
    if isinstance(got, Held) or isinstance(expected, Held) or got.kind != expected.kind:
        return DifferenceKind.STRUCTURE, ""
    if got.kind == "number":
        one, other = got.value, expected.value
        assert isinstance(one, complex | float | int)
        assert isinstance(other, complex | float | int)
        if same_number(one, other, share * max(scale, abs(other))):
            return None, ""
        likely = "numbers are compared as they are: is it made of this rank's part only? A tensor can stand for a part"
        return DifferenceKind.VALUE, likely
    return (None if got.value == expected.value else DifferenceKind.VALUE), ""


def _unreduced(place: TensorSite, held: Held, expected: Held, text: str) -> ModuleDifference | None:
    """Return how the summand on rank 0 differs from the sum; None if it equals the sum."""
    difference = compare(held.local, expected.local, 0.0)
    if difference is None:
        return None
    kind, got, wanted, index = difference
    likely = f"the ranks hold parts of it, as {text}, in a plain tensor: was the reduction left out?"
    return place.difference(kind, 0, got, wanted, index, likely)
