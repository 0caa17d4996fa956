"""What torch has, plans and predicts, in terms of our layouts and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from verifier.placements.parsing import parse_placement
from verifier.redistribution.graph import Path
from verifier.redistribution.layouts import Layout, Space
from verifier.redistribution.steps import LOCAL_KINDS, Step, steps_between
from verifier.torch_internals.redistributing.planners import Ordered, PlannedStep, Planner, PlannerName, Refused

__all__ = ["NoSuchStep", "PlannedStep", "PlannerName", "Refused", "TorchSide"]


class NoSuchStep(Exception):  # noqa: N818 - what is wrong with the plan
    """Torch plans a step in which a rank cannot get what its new layout asks for."""


class TorchSide:
    """Torch's planners and cost model for the tensor and mesh of ``space``.

    Parameters
    ----------
    flattened
        Whether the mesh has all its flattened submeshes, so that torch merges collectives.
    """

    def __init__(self, space: Space, dtype: torch.dtype = torch.float32, flattened: bool = False) -> None:
        assert space.itemsize == dtype.itemsize
        self.space, self.flattened, self._dtype = space, flattened, dtype
        self._planner = Planner(space.mesh_shape, space.shape, dtype, flattened)
        self._ordered: dict[Layout, Ordered] = {}
        self._steps: dict[tuple[Layout, Layout], tuple[Step, ...]] = {}

    def without_submeshes(self) -> TorchSide:
        """Return the same on a mesh without flattened submeshes."""
        return TorchSide(self.space, self._dtype)

    def link(self, mesh_dim: int) -> tuple[float, float]:
        """Return the latency in seconds and the bandwidth in bytes a second that torch assumes for a mesh dim."""
        return self._planner.link(mesh_dim)

    def plan(self, source: Layout, target: Layout, planner: PlannerName = "default") -> Path:
        """Return the path that torch takes.

        Raises
        ------
        Refused
            If torch's planner raises an exception.
        NoSuchStep
            If a planned step cannot be.
        """
        steps: list[Step] = []
        layout = source
        for planned in self._planner.plan(self._of(source), self._of(target), planner):
            if not planned.executed:
                raise Refused(f"torch plans {planned.before} -> {planned.after} as one step, which it does not execute")
            for one in _single(planned):
                after = _after(layout, one)
                if after != layout:
                    steps.append(self._step(layout, after, one))
                    layout = after
        if layout != target:
            raise NoSuchStep(f"torch's plan from {source} to {target} ends at {layout}")
        return Path(source, tuple(steps))

    def graph_planner(
        self, history: Sequence[tuple[Layout, Layout]] = (), backwards: bool = False
    ) -> Callable[[Layout, Layout], tuple[PlannedStep, ...]]:
        """Return a new graph planner of torch that has planned ``history``; see :meth:`Planner.graph_planner`."""
        plan = self._planner.graph_planner([(self._of(a), self._of(b)) for a, b in history], backwards)
        return lambda source, target: plan(self._of(source), self._of(target))

    def move_seconds(self, source: Layout) -> dict[Layout, float]:
        """Return the seconds of each step that the graph planner takes from ``source``, by where it leads."""
        layouts = {self._of(layout): layout for layout in self.space.layouts}
        moves = self._planner.moves(self._of(source), [*layouts])
        return {layouts[ordered]: seconds for ordered, seconds in moves.items() if ordered in layouts}

    def predicted(self, source: Layout, target: Layout) -> float:
        """Return the seconds that torch predicts for the redistribution as a whole."""
        return self._planner.predicted(self._of(source), self._of(target))

    def seconds(self, step: Step) -> float:
        """Return the seconds that torch's cost model gives for ``step``."""
        if step.is_local:
            return 0.0
        source, target = step.source, step.target
        changed = [d for d in step.mesh_dims if source.placements[d] != target.placements[d]]
        first = (changed or step.mesh_dims)[0]
        shards = math.prod(n for d, n in enumerate(self.space.mesh_shape) if source.kind(d) == "S")
        before, after = (parse_placement(layout.placements[first]) for layout in (source, target))
        return self._planner.step_cost(step.kind, step.mesh_dims, before, after, shards)

    # ------------------------------------------------------------------------------------------------- torch's moves
    def available(self, step: Step) -> tuple[str, ...]:
        """Return who in torch has ``step``: ``greedy``, ``graph``, ``merged``; nobody if empty."""
        names = []
        if step.kind == "permute" or step.kind != _torch_kind(step):
            return ()
        if len(_changed(step)) == 1:
            if step.source.default_order and step.target.default_order and self._is_planned(step, "greedy"):
                names.append("greedy")
            if self._of(step.target) in self._moves(step.source):
                names.append("graph")
        elif len(step.mesh_dims) > 1 and self._is_merged(step):
            names.append("merged")
        return tuple(names)

    def _is_planned(self, step: Step, planner: PlannerName) -> bool:
        try:
            plan = self._planner.plan(self._of(step.source), self._of(step.target), planner)
        except Refused:
            return False
        return len(plan) == 1 and plan[0].executed

    def _is_merged(self, step: Step) -> bool:
        try:
            plan = self._with_submeshes.plan(self._of(step.source), self._of(step.target))
        except Refused:
            return False
        return len(plan) == 1 and plan[0].mesh_dims == step.mesh_dims

    @cached_property
    def _with_submeshes(self) -> Planner:
        return self._planner if self.flattened else Planner(self.space.mesh_shape, self.space.shape, self._dtype, True)

    def _moves(self, source: Layout) -> frozenset[Ordered]:
        if source not in self._moves_from:
            every = [self._of(layout) for layout in self.space.layouts]
            self._moves_from[source] = frozenset(self._planner.moves(self._of(source), every))
        return self._moves_from[source]

    @cached_property
    def _moves_from(self) -> dict[Layout, frozenset[Ordered]]:
        return {}

    # -------------------------------------------------------------------------------------------------- translations
    def _of(self, layout: Layout) -> Ordered:
        if layout not in self._ordered:
            placements = tuple(map(parse_placement, layout.placements))
            orders = ((dim, tuple(layout.order(dim))) for dim in range(len(self.space.shape)))
            self._ordered[layout] = (placements, tuple((dim, dims) for dim, dims in orders if dims))
        return self._ordered[layout]

    def _step(self, source: Layout, target: Layout, planned: PlannedStep) -> Step:
        if (source, target) not in self._steps:
            self._steps[source, target] = tuple(steps_between(self.space, source, target))
        kinds = LOCAL_KINDS if planned.collective is None else (planned.collective,)
        for step in self._steps[source, target]:
            if step.kind in kinds and (step.is_local or step.mesh_dims == planned.mesh_dims):
                return step
        dims = ", ".join(map(str, planned.mesh_dims))
        raise NoSuchStep(
            f"torch plans {planned.collective or 'a local step'} over mesh dim {dims} from {source} to {target}, in "
            "which a rank cannot get what it is to hold"
        )


def _changed(step: Step) -> list[int]:
    ends = zip(step.source.placements, step.target.placements, strict=True)
    return [d for d, (a, b) in enumerate(ends) if a != b]


def _torch_kind(step: Step) -> str:
    """Return the kind that torch's step between the same placements would have."""
    kinds = {(step.source.kind(d), step.target.kind(d)) for d in _changed(step)}
    names = {("S", "R"): "all_gather", ("P", "R"): "all_reduce", ("P", "S"): "reduce_scatter", ("S", "S"): "all_to_all",
             ("R", "S"): "slice", ("R", "P"): "split", ("S", "P"): "pad"}  # fmt: skip
    return names.get(next(iter(kinds)), "") if len(kinds) == 1 else ""


def _single(planned: PlannedStep) -> Sequence[PlannedStep]:
    """Return the steps that torch takes for a planned one: to and from strided shards it goes through Replicate."""
    before, after = str(planned.before), str(planned.after)
    if "R" in (before, after) or not (before.startswith("_S") or after.startswith("_S")):
        return (planned,)
    whole = parse_placement("R")
    collective = "all_reduce" if before.startswith("P") else "all_gather"
    return (
        PlannedStep(planned.mesh_dims, planned.before, whole, collective),
        PlannedStep(planned.mesh_dims, whole, planned.after, None),
    )


def _after(layout: Layout, planned: PlannedStep) -> Layout:
    """Return the layout after a step."""
    placements = list(layout.placements)
    for mesh_dim in planned.mesh_dims:
        placements[mesh_dim] = str(planned.after)
    return layout.moved_to(placements)
