"""What ranks saw of a sharded module against what the local one did: what differs, and where that began."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.cases import DifferenceKind, MeshSpec, Placements, format_placements
from verifier.comparison import compare
from verifier.module_observing import Held, ModuleRun, Recorded
from verifier.placements import local_shape, sharded_dim, take_local

__all__ = ["Judgement", "ModuleDifference", "judge_module"]

SLACK = 512
"""Units in the last place by which a value may differ: errors of rounding add up over the layers of a model."""

Options = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class ModuleDifference:
    """One tensor that is not what the local model has.

    Attributes
    ----------
    subject
        What differs: ``output``, ``loss 0``, ``gradient of layers.0.wq.weight``, ``output of layers.0.wq``.
    phase
        ``forward``, ``backward`` or ``step``.
    module
        The submodule that it belongs to; empty for the model itself.
    rank
        The first rank on which it shows; -1 where it takes all ranks to see it.
    likely
        A guess at the cause; empty if there is none.
    """

    kind: DifferenceKind
    subject: str
    phase: str
    module: str
    rank: int
    got: str
    expected: str
    index: tuple[int, ...] | None = None
    likely: str = ""

    def __str__(self) -> str:
        at = f" {list(self.index)}" if self.index else ""
        rank = f" on rank {self.rank}" if self.rank >= 0 else ""
        return f"{self.subject}{at}{rank}: got {self.got}, expected {self.expected}"


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
    mesh: MeshSpec,
    dim_names: tuple[str, ...],
    outputs: Placements,
    losses: Placements,
    inputs: Sequence[Placements | None],
    steps: int,
) -> Judgement:
    """Compare ``ranks``, in order, with ``local``.

    Parameters
    ----------
    outputs, losses
        How plain tensors that the model, and the loss, return stand for the whole.
    inputs
        Placements of the inputs, which their gradients have, too.
    """
    return _Judge(local, ranks, mesh, dim_names, outputs, losses, steps).judge(inputs)


@dataclass(frozen=True)
class _Match:
    placements: Placements
    found: ModuleDifference | None = None


class _Judge:
    def __init__(
        self,
        local: ModuleRun,
        ranks: Sequence[ModuleRun],
        mesh: MeshSpec,
        dim_names: tuple[str, ...],
        outputs: Placements,
        losses: Placements,
        steps: int,
    ) -> None:
        self.local = local
        self.ranks = ranks
        self.mesh = mesh
        self.dim_names = dim_names
        self.outputs = outputs
        self.losses = losses
        self.steps = steps
        self.unchecked: list[str] = []
        self.vacuous: list[str] = []
        self.compared = 0
        # a loss that is averaged over a mesh dim has gradients, before they are averaged, of as many times the size
        self.averaged = 1
        for placement, extent in zip(losses, mesh.shape, strict=True):
            if isinstance(placement, Partial) and placement.reduce_op == "avg":
                self.averaged *= extent

    def judge(self, inputs: Sequence[Placements | None]) -> Judgement:
        final = [*self._final_forward(), *self._final_backward(inputs), *self._final_state()]
        unchecked = tuple(dict.fromkeys(self.unchecked))  # what is between counts less
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
            first, before = final[0], self.compared - len(final)
        return Judgement(
            tuple(final), first, before, layouts, unchecked, tuple(self.vacuous),
            self.compared,
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
        count = len(self.local.result)
        scale = _scale([held.local for held in self.local.result])
        for number, expected in enumerate(self.local.result):
            name = "output" if count == 1 else f"output {number}"
            helds = [run.result[number] if number < len(run.result) else None for run in self.ranks]
            yield from self._check(name, "forward", "", helds, expected, self._options(helds, self.outputs), scale)
        for step, expected in enumerate(self.local.losses):
            helds = [run.losses[step] for run in self.ranks]
            options = self._options(helds, self.losses)
            scale = _scale([held.local for held in self.local.losses]) * (step + 1)
            yield from self._check(f"loss {step}" if self.steps > 1 else "loss", "forward" if step == 0 else "step",
                                   "", helds, expected, options, scale)  # fmt: skip

    def _final_backward(self, inputs: Sequence[Placements | None]) -> Iterator[ModuleDifference]:
        known = [held for held in self.local.gradients.values() if held is not None]
        scale = _scale([held.local for held in known])
        for name, expected in self.local.gradients.items():
            subject, module = f"gradient of {name}", name.rpartition(".")[0]
            helds = [run.gradients.get(name) for run in self.ranks]
            if expected is None:
                for rank, held in enumerate(helds):
                    if held is not None:
                        yield ModuleDifference(DifferenceKind.STRUCTURE, subject, "backward", module, rank,
                                               "a gradient", "none")  # fmt: skip
                        break
                continue
            likely = self._untied(name)
            for difference in self._check(
                subject, "backward", module, helds, expected, self._options(helds, self._whole), scale
            ):
                yield _because(difference, likely)
        for number, (expected, placements) in enumerate(zip(self.local.input_gradients, inputs, strict=True)):
            if expected is not None and placements is not None:
                helds = [run.input_gradients[number] for run in self.ranks]
                options = self._options(helds, placements)
                yield from self._check(
                    f"gradient of input {number}", "backward", "", helds, expected, options, _scale([expected.local]),
                    self.averaged,
                )  # fmt: skip

    def _final_state(self) -> Iterator[ModuleDifference]:
        scale = _scale([held.local for held in self.local.state.values()]) * self.steps
        for name, expected in self.local.state.items():
            helds = [run.state.get(name) for run in self.ranks]
            options = self._options(helds, self._whole)
            for found in self._check(name, "step", name.rpartition(".")[0], helds, expected, options, scale):
                yield _because(found, self._untied(name))
        added = sorted(set(self.ranks[0].state) - set(self.local.state))
        if added:
            yield ModuleDifference(DifferenceKind.STRUCTURE, "parameters and buffers", "step", "", 0,
                                   f"also {', '.join(added)}", "those of the local model")  # fmt: skip

    @property
    def _whole(self) -> Placements:
        return (Replicate(),) * self.mesh.ndim

    def _untied(self, name: str) -> str:
        for group in self.local.tied:
            if name in group and group not in self.ranks[0].tied:
                return f"{' and '.join(group)} are one parameter in the local model; did the plan make two of them?"
        return ""

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
        scale = _scale([recorded.held.local for recorded in local])
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
            subject = subject if phase == "forward" else f"gradient of the {subject}"
            options = self._any(helds, recorded.held)
            match = self._match(subject, phase, module, helds, recorded.held, options, scale, factor)
            text = format_placements(match.placements)
            difference: ModuleDifference | None = match.found
            if difference is None:
                layouts.setdefault(recorded.module, text)
                pending = any(placement.is_partial() for placement in match.placements)
                if pending and helds[0] is not None and not helds[0].dtensor:
                    difference = self._unreduced(subject, phase, module, helds[0], recorded.held, text)
            found.append(difference)
        return found, tuple(layouts.items())

    def _unreduced(
        self, subject: str, phase: str, module: str, held: Held, expected: Held, text: str
    ) -> ModuleDifference | None:
        difference = compare(held.local, expected.local, 0.0)
        if difference is None:  # the other ranks have nothing to add
            return None
        kind, got, wanted, index = difference
        likely = f"the ranks hold parts of it, as {text}, in a plain tensor: was the reduction left out?"
        return ModuleDifference(kind, subject, phase, module, 0, got, wanted, index, likely)

    # --------------------------------------------------------------------------------------------------- the comparison
    def _options(self, helds: Sequence[Held | None], declared: Placements) -> Options:
        """Return the placements on each mesh dim: those of the DTensor, and ``declared`` on dims that it is not on."""
        return tuple(
            (placement,) if (placement := self._placement_on(helds, mesh_dim)) is not None else (declared[mesh_dim],)
            for mesh_dim in range(self.mesh.ndim)
        )

    def _any(self, helds: Sequence[Held | None], expected: Held) -> Options:
        free = (Replicate(), *(Shard(dim) for dim in range(expected.local.ndim)), Partial("sum"))
        return tuple(
            (placement,) if (placement := self._placement_on(helds, mesh_dim)) is not None else free
            for mesh_dim in range(self.mesh.ndim)
        )

    def _placement_on(self, helds: Sequence[Held | None], mesh_dim: int) -> object | None:
        """Return the placement of a DTensor on a mesh dim; None if it is plain, or on a submesh without that dim."""
        first = helds[0]
        if first is None or first.placements is None:
            return None
        dims = self._mesh_dims(first)
        return first.placements[dims.index(mesh_dim)] if dims is not None and mesh_dim in dims else None

    def _mesh_dims(self, held: Held) -> tuple[int, ...] | None:
        """Return the mesh dims that the placements of a DTensor are on; None if its mesh is no part of ours."""
        if held.mesh_dims and set(held.mesh_dims) <= set(self.dim_names):
            return tuple(self.dim_names.index(name) for name in held.mesh_dims)
        # another mesh of as many dims: all ranks in another shape would not fit the local tensors
        whole = held.placements is not None and len(held.placements) == self.mesh.ndim
        return tuple(range(self.mesh.ndim)) if whole else None

    def _why_unchecked(self, held: Held) -> str:
        if held.reason or held.placements is None:
            return held.reason
        if self._mesh_dims(held) is not None:
            return ""
        theirs = ", ".join(held.mesh_dims) or "without names"
        return f"it is on a mesh with the dims {theirs}, which are not among {', '.join(self.dim_names)}"

    def _check(
        self,
        subject: str,
        phase: str,
        module: str,
        helds: Sequence[Held | None],
        expected: Held,
        options: Options,
        scale: float,
        factor: int = 1,
    ) -> Iterator[ModuleDifference]:
        if expected.local.numel() == 0 or not bool(expected.local.count_nonzero()):
            self.vacuous.append(subject)
        match = self._match(subject, phase, module, helds, expected, options, scale, factor)
        if match.found is not None:
            yield match.found

    def _match(
        self,
        subject: str,
        phase: str,
        module: str,
        helds: Sequence[Held | None],
        expected: Held,
        options: Options,
        scale: float,
        factor: int = 1,
    ) -> _Match:
        """Return the first placements out of ``options`` under which the ranks hold ``expected``, or what differs."""

        def differs(kind: DifferenceKind, rank: int, got: object, wanted: object, likely: str = "") -> _Match:
            found = ModuleDifference(kind, subject, phase, module, rank, str(got), str(wanted), None, likely)
            return _Match(self._whole, found)

        self.compared += 1
        present = [held for held in helds if held is not None]
        if len(present) < len(helds):
            return differs(DifferenceKind.STRUCTURE, helds.index(None), "none", f"a tensor of {list(expected.shape)}")
        texts = {
            format_placements(held.placements) if held.placements else "plain": r for r, held in enumerate(present)
        }
        if len(texts) > 1:
            (one, _), (other, rank) = list(texts.items())[:2]
            return differs(DifferenceKind.PLACEMENT, rank, other, f"{one} as on another rank")
        first = present[0]
        if reason := self._why_unchecked(first):
            self.unchecked.append(f"{subject}: {reason}")
            return _Match(self._whole)
        if first.dtensor and first.shape != expected.shape:
            return differs(DifferenceKind.SHAPE, 0, list(first.shape), list(expected.shape))
        value = expected.local * factor if factor != 1 else expected.local
        absolute = _allowed(value, scale * factor)
        best: tuple[int, _Match] | None = None
        for placements in itertools.product(*options):
            if not self._fits(present, value, placements):  # type: ignore[arg-type]
                continue
            wrong, found = self._compare(present, value, placements, absolute)  # type: ignore[arg-type]
            if found is None:
                return _Match(placements)  # type: ignore[arg-type]
            if best is None or wrong < best[0]:
                kind, rank, got, wanted, index = found
                likely = _ratio(got, wanted)
                difference = ModuleDifference(kind, subject, phase, module, rank, got, wanted, index, likely)
                best = wrong, _Match(placements, difference)  # type: ignore[arg-type]
        if best is not None:
            return best[1]
        promised = [format_placements(option) for option in itertools.islice(itertools.product(*options), 2)]  # type: ignore[arg-type]
        part = f"{list(expected.shape)} as {promised[0]}" if len(promised) == 1 else f"a part of {list(expected.shape)}"
        halved = "does a submodule get only this rank's part of its input?" if len(promised) > 1 else ""
        return differs(DifferenceKind.SHAPE, 0, f"shape {list(first.local.shape)}", part, halved)

    def _fits(self, helds: Sequence[Held], value: torch.Tensor, placements: Placements) -> bool:
        if any((dim := sharded_dim(p)) is not None and dim >= value.ndim for p in placements):
            return False
        return all(
            tuple(held.local.shape) == local_shape(value.shape, placements, self.mesh.shape, self.mesh.coordinate(rank))
            for rank, held in enumerate(helds)
        )

    def _compare(
        self, helds: Sequence[Held], value: torch.Tensor, placements: Placements, absolute: float
    ) -> tuple[int, tuple[DifferenceKind, int, str, str, tuple[int, ...] | None] | None]:
        """Return how many ranks hold something else than ``placements`` promise, and what the first of them does."""
        pending = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
        cut = tuple(Replicate() if dim in pending else placement for dim, placement in enumerate(placements))
        wrong, first = 0, None
        for rank, group in self._groups(pending):
            parts = [helds[member].local for member in group]
            whole = _reduced(parts, placements, self.mesh) if pending else parts[0]
            piece = take_local(value, cut, self.mesh.shape, self.mesh.coordinate(rank), seed=0)
            found = compare(whole, piece, absolute * len(group))
            if found is not None:
                wrong += len(group)
                first = first or (found[0], -1 if pending else rank, *found[1:])
        return wrong, first

    def _groups(self, pending: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
        """Yield each rank, or the first of those whose parts belong together, with all of these."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.world_size):
            coordinate = self.mesh.coordinate(rank)
            groups.setdefault(tuple(c for dim, c in enumerate(coordinate) if dim not in pending), []).append(rank)
        return ((group[0], group) for group in groups.values()) if pending else (
            (rank, [rank]) for rank in range(self.mesh.world_size)
        )  # fmt: skip


def _reduced(parts: Sequence[torch.Tensor], placements: Placements, mesh: MeshSpec) -> torch.Tensor:
    """Return what parts under Partial reduce to; only sums and averages may meet in one tensor."""
    pending = [
        (p.reduce_op, extent) for p, extent in zip(placements, mesh.shape, strict=True) if isinstance(p, Partial)
    ]
    stacked = torch.stack(list(parts))
    kinds = {kind for kind, _ in pending}
    if kinds <= {"sum", "avg"}:
        return stacked.sum(0) / math.prod(extent for kind, extent in pending if kind == "avg")
    (kind,) = kinds
    if kind == "product":
        return stacked.prod(0)
    return stacked.amax(0) if kind == "max" else stacked.amin(0)


def _scale(tensors: Iterable[torch.Tensor]) -> float:
    sizes = [float(t.abs().max()) for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    return max(sizes, default=0.0)


def _allowed(expected: torch.Tensor, scale: float) -> float:
    """Return the largest error that rounding explains, in a section of the model whose values go up to ``scale``."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0
    return SLACK * torch.finfo(expected.dtype).eps * scale


def _ratio(got: str, wanted: str) -> str:
    try:
        ratio = float(got) / float(wanted)
    except (ValueError, ZeroDivisionError):
        return ""
    for count in range(2, 9):
        if abs(ratio - count) < 1e-4 * count:
            return f"it is {count} times what it should be: is it summed over ranks that hold the same?"
        if abs(ratio * count - 1) < 1e-4:
            return f"it is 1/{count} of what it should be: is it averaged over ranks, or one rank's part of a sum?"
    return ""


def _because(found: ModuleDifference, likely: str) -> ModuleDifference:
    fields: Mapping[str, object] = vars(found)
    return ModuleDifference(**{**fields, "likely": likely or found.likely})  # type: ignore[arg-type]
