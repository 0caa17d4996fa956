"""Judges the redistributions that ops asked for before they ran, by the budgets of the baseline."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from verifier.core.case import MeshSpec
from verifier.core.wording import bytes_text, plural
from verifier.gate.budgets import Budget
from verifier.gate.question import Question, imports_text
from verifier.records.schema import OUT_OF_TIME, PathRecord, RunRecord
from verifier.redistribution.models import DEFAULT_LINK, AlphaBeta
from verifier.redistribution.recorded import Executed, NotJudged, Reader
from verifier.report.paths.words import brief

__all__ = ["OverBudget", "RegretDecision", "over_budget", "updated_budgets"]

Cell = tuple[str, str, tuple[str, ...]]
"""An op, a mesh, and the imports that register the rules of the op."""


@dataclass
class _Ran:
    """What was run of a cell: the combinations of placements of calls that passed, and what the op asked for.

    ``drawn`` says how the calls were drawn, and is empty if some were not reached.
    """

    drawn: str
    calls: set[str] = field(default_factory=set)
    paths: list[PathRecord] = field(default_factory=list)


@dataclass(frozen=True)
class OverBudget:
    """A redistribution of an argument in which ranks received more bytes than its budget allows.

    Of those between the same placements it is the one with the most bytes beyond the budget.

    Parameters
    ----------
    tensor
        Dtype and global shape.
    count
        How often it was executed.
    ran, allowed, best
        The path that ran, the dearest that the budget allows, and the fastest of all steps, as text. ``allowed`` is
        empty if the budget allows none, and ``best`` if there are too many layouts to look through.
    given
        The placements of the call's tensor arguments.
    received, budget, bound
        Bytes that all ranks receive: on the path, at most by the budget, and at least on any path.
    """

    op: str
    mesh: str
    tensor: str
    source: str
    target: str
    count: int
    ran: str
    received: int
    allowed: str
    budget: int
    best: str
    bound: int
    given: str = ""
    imports: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The redistribution on one line, with its bytes and its budget."""
        return (
            f"{self.op}({self.given}) on mesh {self.mesh}: {self.tensor} {self.source} -> {self.target}, "
            f"{plural(self.count, 'time')}: {bytes_text(self.received)} received, {bytes_text(self.budget)} allowed"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """The path that ran, those that the budget allows, and the best."""
        own = f" of {imports_text(self.imports)}" if self.imports else ""
        none = f"none: the budget{own} has no path from {self.source} for this call"
        best = (f"best     {self.best}",) if self.best else ()
        bound = f"bound    {bytes_text(self.bound)}, which no path can beat"
        return (f"ran      {self.ran}", f"allowed  {self.allowed or none}", *best, bound)


@dataclass(frozen=True)
class RegretDecision:
    """What is ``over`` budget, most bytes first; ``within`` counts the kinds of redistributions that are not.

    ``not_judged`` says on a line each of what was not judged, and why. ``cells`` counts the ops on meshes that were
    judged.
    """

    over: tuple[OverBudget, ...]
    within: int
    cells: int
    not_judged: tuple[str, ...]


def updated_budgets(runs: Sequence[RunRecord], question: Question, budgets: Sequence[Budget]) -> tuple[Budget, ...]:
    """Return the budgets that allow what ``runs`` executed of what the question is about, and no more.

    A budget of an op that was not run stays as it is; see :meth:`Budget.updated`.
    """
    known = {budget.cell: budget for budget in budgets}
    for cell, ran in _executed(runs, question).items():
        passed = [one for one in ran.paths if one.given in ran.calls]
        known[cell] = known.get(cell, Budget(*cell)).updated(ran.drawn, ran.calls, passed)
    return tuple(sorted(known.values()))


def over_budget(runs: Sequence[RunRecord], question: Question, budgets: Sequence[Budget]) -> RegretDecision:
    """Judge what ``runs`` executed, the newest first, of what the question is about.

    - A redistribution is over budget if it received more bytes than each path between the same placements that the
      budget has for calls with the same placements of arguments. If there is none, paths from the same placements to
      others count; if there is none of these either, it may receive nothing.
    - A call with placements that the budget does not know is not judged: no run has tried them before.
    - If the calls were drawn otherwise than those of the budget, a redistribution for which the budget has no path is
      not judged: it may be that of another call.
    - An op without a budget is not judged, and neither is a budget whose op was not run.
    """
    executed, known = _executed(runs, question), {budget.cell: budget for budget in budgets}
    reader, worst, within, skipped = Reader(), dict[tuple[object, ...], OverBudget](), 0, Counter[str]()
    reasons: dict[str, None] = {}
    for cell, ran in executed.items():
        for record in ran.paths if cell in known else ():
            allowed = known[cell].allowed(record)
            drawn = known[cell].drawn
            if not allowed and (not drawn or drawn != ran.drawn or not known[cell].knows(record)):
                skipped[_UNKNOWN if not known[cell].knows(record) else _OTHERS] += 1
                continue
            try:
                found = _judged(reader, record, allowed, cell)
            except NotJudged as error:
                reasons.setdefault(str(error))
                skipped[_NO_MODEL] += 1
                continue
            if found is None:
                within += 1
                continue
            key = (*cell, record.source, record.target)
            if key not in worst or _excess(found) > _excess(worst[key]):
                worst[key] = found
    over = sorted(worst.values(), key=lambda one: (-_excess(one), one.title))
    told = [*_without_budget(executed, known), *_not_run(executed, known, question)]
    told += [
        f"{plural(count, 'redistribution')} {why}" + (f", as {next(iter(reasons))}" if why == _NO_MODEL else "")
        for why, count in skipped.most_common()
    ]
    return RegretDecision(tuple(over), within, len(executed.keys() & known.keys()), tuple(told))


_NO_MODEL = "without a model"
_UNKNOWN = "of calls with placements that the budget does not have"
_OTHERS = "that no budget has, of calls that were drawn otherwise than those of the budget"


def _excess(one: OverBudget) -> int:
    return one.received - one.budget


def _judged(reader: Reader, record: PathRecord, allowed: Sequence[PathRecord], cell: Cell) -> OverBudget | None:
    found = reader.read(record)
    dearest = max(_possible(reader, allowed), key=lambda one: one.path.bytes, default=None)
    budget = dearest.path.bytes if dearest else 0
    if found.path.bytes <= budget:
        return None
    model = AlphaBeta((DEFAULT_LINK,) * MeshSpec.parse(record.mesh).ndim)
    best = reader.best(found, model)
    return OverBudget(
        op=record.op, mesh=record.mesh, tensor=record.tensor, source=record.source, target=record.target,
        count=record.count, ran=brief(found.path), received=found.path.bytes,
        allowed=_text(dearest), budget=budget, best=brief(best) if best else "", bound=found.bound.total,
        given=record.given, imports=cell[2],
    )  # fmt: skip


def _possible(reader: Reader, allowed: Sequence[PathRecord]) -> Iterator[Executed]:
    """Yield the paths that the tensor can take: a path from the same placements may lead to a dim that it lacks."""
    for record in allowed:
        with contextlib.suppress(NotJudged):
            yield reader.read(record)


def _text(executed: Executed | None) -> str:
    return brief(executed.path) if executed else ""


def _executed(runs: Sequence[RunRecord], question: Question) -> dict[Cell, _Ran]:
    """Return what the newest run of each op on each mesh executed; nothing for an op that redistributed nothing."""
    found: dict[Cell, _Ran] = {}
    for run in runs:
        here: dict[Cell, _Ran] = {}
        for call in run.graph.calls:
            if question.asks_op(call.op) and _asks_mesh(question, call.mesh):
                here.setdefault(_cell(run, call.op, call.mesh), _Ran(_drawn(run))).calls.add(call.given)
        for record in run.graph.paths:
            if not record.given or not any(collective for collective, _ in record.steps):
                continue  # it is nothing that the op itself asked for, or it receives nothing
            if (cell := _cell(run, record.op, record.mesh)) in here:
                here[cell].paths.append(record)
        found = here | found
    return found


def _drawn(run: RunRecord) -> str:
    header = run.header
    if not run.complete or any(one.reason == OUT_OF_TIME for one in run.untested):
        return ""
    dtypes = " ".join(header.dtypes) or "default dtypes"
    return f"profile {header.profile}, {plural(header.max_examples, 'example')}, seed {header.seed}, {dtypes}"


def _asks_mesh(question: Question, mesh: str) -> bool:
    """Return whether a mesh is asked about, whatever its backend."""
    return not question.meshes or _shape(mesh) in map(_shape, question.meshes)


def _shape(mesh: str) -> str:
    spec = MeshSpec.parse(mesh)
    return spec.shape_text + spec.suffix


def _cell(run: RunRecord, op: str, mesh: str) -> Cell:
    own = op in run.header.own_rules
    return op, _shape(mesh), tuple(sorted(run.header.imports)) if own else ()


def _without_budget(executed: dict[Cell, _Ran], known: dict[Cell, Budget]) -> Iterator[str]:
    for op in sorted({cell[0] for cell in executed.keys() - known.keys()}):
        meshes = sorted(mesh for name, mesh, imports in executed if name == op and (op, mesh, imports) not in known)
        yield f"{op} on mesh {' '.join(meshes)}: no budget"


def _not_run(executed: dict[Cell, _Ran], known: dict[Cell, Budget], question: Question) -> Iterator[str]:
    left = [
        cell for cell in known.keys() - executed.keys() if question.asks_op(cell[0]) and _asks_mesh(question, cell[1])
    ]
    for op in sorted({cell[0] for cell in left}):
        meshes = sorted({mesh for name, mesh, _ in left if name == op})
        yield f"budget of {op} on mesh {' '.join(meshes)}: not run"
