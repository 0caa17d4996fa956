"""Judges the redistributions that a run executed."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, replace

from verifier.core.case import MeshSpec
from verifier.core.placement_text import split_placements
from verifier.core.verdict import Phase
from verifier.records.schema import PathRecord
from verifier.redistribution.bounds import Bound, lower_bound
from verifier.redistribution.graph import Graph, Path
from verifier.redistribution.layouts import Layout, Space, parse_layout
from verifier.redistribution.models import AlphaBeta
from verifier.redistribution.steps import Step, steps_between

__all__ = ["Executed", "NotJudged", "Reader", "of_the_call"]

_ITEMSIZES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "bfloat16": 2}
_MOST_LAYOUTS = 200
_MERGED = ("all_gather", "all_reduce", "reduce_scatter")
_OF_THE_CALL = (Phase.FORWARD.value, Phase.BACKWARD.value)


class NotJudged(ValueError):  # noqa: N818 - what happened to it
    """A redistribution has placements or steps that are not modelled."""


def of_the_call(record: PathRecord) -> PathRecord | None:
    """Return ``record`` without the redistributions in which the verifier gathers results; None if there are no others.

    The call did not ask for them.
    """
    phases = {phase: count for phase, count in record.phases.items() if phase in _OF_THE_CALL}
    return replace(record, phases=phases, count=sum(phases.values())) if phases else None


@dataclass(frozen=True)
class Executed:
    """A redistribution that a run executed, its path, and the bytes that it cannot do without.

    ``across_ops`` has the bytes that were received in vain, each time, by this op and one before: all, if the same
    tensor was redistributed in the same way, or at least those of the gather that is undone.
    """

    record: PathRecord
    path: Path
    bound: Bound
    across_ops: int = 0

    @property
    def excess(self) -> int:
        """Bytes that ranks received beyond the lower bound, each time."""
        return self.path.bytes - self.bound.total

    @property
    def waste(self) -> str:
        """What is wasteful about the path, whatever it cost; empty if nothing is."""
        record = self.record
        if record.repeats:
            return f"the same tensor was redistributed in the same way for {record.repeats} before"
        if record.undoes:
            return f"shards again what was gathered for {record.undoes}"
        gathered = [step for step in self.path.steps if step.kind == "all_gather"]
        if gathered and any(step.kind == "slice" for step in self.path.steps):
            return "gathers and shards again"
        reductions = [step for step in self.path.steps if step.kind in ("all_reduce", "reduce_scatter")]
        rounds = "float" in record.tensor or record.tensor.startswith("complex")
        if len(reductions) > 1 and rounds and not {"P(max)", "P(min)"} & {*self.path.source.placements}:
            return f"reduces in {len(reductions)} steps, so replicas may differ in the last bit"
        return ""


@dataclass
class Reader:
    """Turns stored paths into judged ones; keeps what is equal for tensors of one shape on one mesh."""

    _spaces: dict[tuple[object, ...], Space] = field(default_factory=dict)
    _graphs: dict[Space, Graph] = field(default_factory=dict)

    def read(self, record: PathRecord) -> Executed:
        """Return ``record`` with its path.

        Raises
        ------
        NotJudged
            If a placement or a step of it is not modelled.
        """
        record = _as_plain_partials(record)
        space = self._space(record)
        source, target = (self._layout(text, space) for text in (record.source, record.target))
        layout, steps = source, list[Step]()
        for collective, after in record.steps:
            after_layout = layout.moved_to(split_placements(after))
            for kind, onward in _single(layout, after_layout, collective):
                if onward != layout:
                    steps.append(_step(space, layout, onward, kind))
                    layout = onward
        if layout != target:
            raise NotJudged(f"the steps of {record.source} -> {record.target} end at {layout}")
        path, across = Path(source, tuple(steps)), 0
        if record.repeats:
            across = path.bytes
        elif record.undoes:
            across = lower_bound(space, target, source).total
        return Executed(record, path, lower_bound(space, source, target), across)

    def best(self, executed: Executed, model: AlphaBeta) -> Path | None:
        """Return the fastest path of all steps by ``model``; None if there are too many layouts to look through."""
        graph = self._graph(executed.record)
        if graph is None:
            return None
        return graph.paths(executed.path.source, graph.ways(model.seconds)).get(executed.path.target)

    def front(self, executed: Executed, model: AlphaBeta) -> list[Path]:
        """Return the fastest path, and those that are slower and need less memory; none for too many layouts."""
        graph = self._graph(executed.record)
        return [] if graph is None else graph.pareto(executed.path.source, executed.path.target, model.seconds)

    def merged(self, executed: Executed) -> list[Step]:
        """Return the steps that torch would take in place of several, if the mesh had its flattened submeshes.

        Torch merges collectives of one kind that follow one another on several mesh dims.
        """
        if MeshSpec.parse(executed.record.mesh).flat:
            return []
        space, found = self._space(executed.record), list[Step]()
        for kind, steps in itertools.groupby(executed.path.steps, key=lambda step: step.kind):
            row = list(steps)
            dims = tuple(sorted(dim for step in row for dim in step.mesh_dims))
            if len(row) > 1 and kind in _MERGED:
                merged = steps_between(space, row[0].source, row[-1].target)
                found += [step for step in merged if (step.kind, step.mesh_dims) == (kind, dims)]
        return found

    def _graph(self, record: PathRecord) -> Graph | None:
        space = self._space(record)
        return None if len(space.layouts) > _MOST_LAYOUTS else self._graphs.setdefault(space, Graph(space))

    def _space(self, record: PathRecord) -> Space:
        dtype, _, shape_text = record.tensor.partition("[")
        shape = tuple(int(size) for size in re.findall(r"\d+", shape_text))
        texts = {part for text in (record.source, record.target) for part in split_placements(text)}
        partials = {text[2:-1] for text in texts if text.startswith("P(")}
        if len(partials) > 1:
            raise NotJudged(f"{record.source} -> {record.target} mixes reductions")
        strided = tuple(sorted(text for text in texts if text.startswith("_S")))
        partial = next(iter(partials), "sum")
        key = (MeshSpec.parse(record.mesh).shape, shape, _itemsize(dtype), partial, strided)
        if key not in self._spaces:
            self._spaces[key] = Space(*key)
        return self._spaces[key]

    @staticmethod
    def _layout(text: str, space: Space) -> Layout:
        try:
            return parse_layout(text, len(space.shape), len(space.mesh_shape))
        except ValueError as error:
            raise NotJudged(str(error)) from error


def _as_plain_partials(record: PathRecord) -> PathRecord:
    """Return ``record`` with ``P(sum)`` in place of masked partials and norms: their reductions send the same bytes."""

    def plain(text: str) -> str:
        return re.sub(r"MaskP\((\w+)\)", r"P(\1)", re.sub(r"_NormP\([^()]*\)", "P(sum)", text))

    steps = [(collective, plain(target)) for collective, target in record.steps]
    return replace(record, source=plain(record.source), target=plain(record.target), steps=steps)


def _itemsize(dtype: str) -> int:
    if dtype in _ITEMSIZES:
        return _ITEMSIZES[dtype]
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _single(layout: Layout, after: Layout, collective: str) -> list[tuple[str, Layout]]:
    """Return the steps that torch takes for a planned one: to and from strided shards it goes through Replicate."""
    changed = [d for d, (a, b) in enumerate(zip(layout.placements, after.placements, strict=True)) if a != b]
    pairs = [(layout.placements[d], after.placements[d]) for d in changed]
    if not any(text.startswith("_S") for pair in pairs for text in pair) or any("R" in pair for pair in pairs):
        return [(collective, after)]
    whole = [("R" if d in changed else text) for d, text in enumerate(layout.placements)]
    reduced = any(before.startswith("P") for before, _ in pairs)
    return [("all_reduce" if reduced else "all_gather", layout.moved_to(whole)), ("", after)]


def _step(space: Space, layout: Layout, onward: Layout, kind: str) -> Step:
    if not kind and onward.partial_dims and any(layout.kind(d) == "S" for d in onward.partial_dims):
        raise NotJudged("a shard is to become Partial, which torch refuses or makes without communication")
    found = [step for step in steps_between(space, layout, onward) if step.kind == kind or (step.is_local and not kind)]
    if not found:
        raise NotJudged(f"{kind or 'a local step'} from {layout} to {onward} is not modelled")
    return min(found, key=lambda step: math.prod((*step.mesh_dims, 1)))
