"""The redistributions that a run executed, judged: as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import itemgetter

from verifier.core.case import MeshSpec
from verifier.core.wording import bytes_text, plural
from verifier.records.schema import PathRecord, RulesRecord, RunRecord
from verifier.redistribution.models import DEFAULT_LINK, AlphaBeta, links_for
from verifier.redistribution.recorded import Executed, NotJudged, Reader, of_the_call
from verifier.report.paths.free_rules import MissingRules
from verifier.report.paths.issued import issued_lines, measured_dict, took_text
from verifier.report.paths.words import brief, ratio_text

__all__ = [
    "JudgedRun",
    "Waste",
    "diff_text",
    "judge_run",
    "model_for",
    "run_json",
    "run_text",
    "waste_across_ops",
    "waste_without_rules",
]


_REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class JudgedRun:
    """The redistributions of a run that are judged, worst first, and the reasons why others are not, with counts.

    ``missing`` has the rules without communication that a rule check found missing.
    """

    run: str
    executed: tuple[Executed, ...]
    others: Mapping[str, int]
    reader: Reader
    missing: MissingRules = field(default_factory=MissingRules)

    def total(self, size: Callable[[Executed], int]) -> int:
        return sum(size(one) * one.record.count for one in self.executed)


def judge_run(run: RunRecord, op: str = "*", mesh: str | None = None, checked: RulesRecord | None = None) -> JudgedRun:
    """Judge what ``run`` recorded of the ops that match the glob ``op``, on ``mesh`` or all meshes.

    The redistributions in which the verifier gathers results are left out: the call did not ask for them. They are held
    against the rules that the rule check ``checked``, or the one that ``run`` is joined with, found missing.
    """
    reader, found, others = Reader(), list[Executed](), Counter[str]()
    for stored in run.graph.paths:
        record = of_the_call(stored)
        if record is None or not _matches(record.op, op) or mesh not in (None, record.mesh):
            continue
        try:
            found.append(reader.read(record))
        except NotJudged as error:
            others[str(error)] += record.count
    found.sort(key=lambda one: (-one.excess * one.record.count, -one.path.bytes, _name(one.record)))
    return JudgedRun(run.header.id, tuple(found), others, reader, MissingRules.of(checked or run.rules))


def _matches(op: str, pattern: str) -> bool:
    return any(
        fnmatchcase(name, pattern)
        for name in (op, op.removeprefix("aten."), op.split(".")[-2 if op.count(".") else -1])
    )


def _name(record: PathRecord) -> str:
    return f"{record.op} {record.mesh} {record.tensor} {record.source} -> {record.target} {record.steps}"


# --------------------------------------------------------------------------------------------------------------- text
def run_text(judged: JudgedRun, worst: int, by: str, links: Sequence[str]) -> str:
    """Return what a run redistributed: totals, a table by ``op``, ``pair`` or ``edge``, and the worst paths."""
    return "\n".join([*_lines(judged, worst, by, links), ""])


def _lines(judged: JudgedRun, worst: int, by: str, links: Sequence[str]) -> Iterator[str]:
    received, bound = judged.total(lambda one: one.path.bytes), judged.total(lambda one: one.bound.total)
    count = sum(one.record.count for one in judged.executed)
    yield (
        f"run {judged.run}: {plural(count, 'redistribution')} of {plural(len(judged.executed), 'kind')}; all ranks "
        f"received {bytes_text(received)}, the lower bound is {bytes_text(bound)}{_times(received, bound)}"
    )
    if judged.others:
        reason, _ = max(judged.others.items(), key=lambda item: item[1])
        yield f"not judged: {sum(judged.others.values()):,}, as {reason}"
    if not judged.executed:
        return
    yield ""
    yield from _table(judged, worst, by)
    ranked = [one for one in judged.executed if one.excess][:worst]
    if ranked:
        yield ""
        yield "worst, by bytes beyond the lower bound times count:"
    for one in ranked:
        yield from _one(judged, one, links)
    yield from _wastes(
        "waste across ops in a row, by bytes received in vain times count:", waste_across_ops(judged.executed), worst
    )
    yield from _wastes(
        "waste where a rule is missing that level 1 proves, and that needs no communication:",
        waste_without_rules(judged.executed, judged.missing), worst,
    )  # fmt: skip
    if flattening := list(_flattening(judged)):
        yield from ("", *flattening)


def _wastes(title: str, wastes: Sequence[Waste], worst: int) -> Iterator[str]:
    if wastes:
        yield from ("", title)
    for waste in wastes[:worst]:
        yield f"{waste.text}: {plural(waste.count, 'time')}, {bytes_text(waste.bytes)}; as {waste.example}"
    if len(wastes) > worst:
        yield f"and {len(wastes) - worst:,} more (--worst)"


@dataclass(frozen=True)
class Waste:
    """What is received in vain: ``text`` says how; the largest is at ``example``."""

    text: str
    count: int
    bytes: int
    example: str


def waste_across_ops(executed: Sequence[Executed]) -> list[Waste]:
    """Return the waste across ops in a row, most bytes first."""
    return _summed((_across_text(one.record), one, one.across_ops) for one in executed if one.across_ops)


def waste_without_rules(executed: Sequence[Executed], missing: MissingRules) -> list[Waste]:
    """Return what ops receive because a rule is missing that a rule check has proved, most bytes first."""
    rules = ((missing.at(one.record), one) for one in executed if one.path.bytes)
    return _summed((f"{one.record.op} lacks {rule}", one, one.path.bytes) for rule, one in rules if rule)


def _summed(wasted: Iterable[tuple[str, Executed, int]]) -> list[Waste]:
    """Return the waste of redistributions by what is said of it, given the bytes that each receives in vain."""
    found: dict[str, list[tuple[int, PathRecord]]] = {}
    for text, one, size in wasted:
        found.setdefault(text, []).append((size, one.record))
    wastes = []
    for text, group in found.items():
        _, largest = max(group, key=itemgetter(0))
        example = f"{largest.op} on {largest.mesh}: {largest.tensor} {largest.source} -> {largest.target}"
        times = sum(record.count for _, record in group)
        wastes.append(Waste(text, times, sum(size * record.count for size, record in group), example))
    return sorted(wastes, key=lambda one: (-one.bytes, one.text))


def _across_text(record: PathRecord) -> str:
    by = record.by or "the caller"
    if record.repeats == by:
        return f"{by} redistributes a tensor twice in the same way"
    if record.repeats:
        return f"{by} redistributes a tensor as {record.repeats} did before"
    return f"{record.undoes} gathers, and {by} shards again"


def _flattening(judged: JudgedRun) -> Iterator[str]:
    """Yield a line for each flattened submesh over which torch would merge what a run executed."""
    saved: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for one in judged.executed:
        for step in judged.reader.merged(one):
            before = [each for each in one.path.steps if set(each.mesh_dims) <= set(step.mesh_dims)]
            bytes_saved = sum(each.bytes for each in before if each.kind == step.kind) - step.bytes
            row = saved.setdefault((one.record.mesh, step.mesh_dims), [0, 0, 0])
            for position, more in enumerate((1, len(step.mesh_dims) - 1, bytes_saved)):
                row[position] += more * one.record.count
    for (mesh, dims), (count, collectives, size) in sorted(saved.items()):
        over = f"mesh dims {', '.join(map(str, dims))} of mesh {mesh}"
        bytes_too = f" and {bytes_text(size)}" if size > 0 else ""
        yield (
            f"a flattened submesh of {over} would save {plural(collectives, 'collective')}{bytes_too} in "
            f"{plural(count, 'redistribution')}"
        )


def _one(judged: JudgedRun, one: Executed, links: Sequence[str]) -> Iterator[str]:
    record, model = one.record, model_for(one.record, links)
    asked = "explicit" if record.explicit else "implicit"
    phases = ", ".join(f"{count:,} in {phase}" for phase, count in record.phases.items())
    yield (
        f"{record.op} on {record.mesh}: {record.tensor} {record.source} -> {record.target}, {asked}, {phases}; "
        f"{bytes_text(one.path.bytes)} where {bytes_text(one.bound.total)} must be"
        f"{_times(one.path.bytes, one.bound.total)}"
    )
    yield f"  ran    {brief(one.path, model.seconds)}"
    yield from (f"  issued {line}" for line in issued_lines(record))
    if took := took_text(record):
        yield f"  took   {took}"
    best = judged.reader.best(one, model)
    if best is not None:
        yield f"  best   {brief(best, model.seconds)}"
    if one.waste:
        yield f"  waste  {one.waste}"


def model_for(record: PathRecord, links: Sequence[str] = ()) -> AlphaBeta:
    """Return the alpha-beta model of the mesh of ``record``, with the given links or with the default ones."""
    ndim = MeshSpec.parse(record.mesh).ndim
    return AlphaBeta(links_for(links, ndim) if links else (DEFAULT_LINK,) * ndim)


def _times(received: int, bound: int) -> str:
    return f" ({ratio_text(received / bound)})" if bound else ""


def _table(judged: JudgedRun, worst: int, by: str) -> Iterator[str]:
    groups: dict[str, list[int]] = {}
    for one in judged.executed:
        times = one.record.count
        if by == "edge":
            for step in one.path.steps:
                dtype = f", {one.record.tensor.partition('[')[0]}" if step.kind in _REDUCTIONS else ""
                _add(groups, f"{step.source} -> {step.target} {step.kind}{dtype}", times, step.bytes * times, 0)
        else:
            name = one.record.op if by == "op" else f"{one.path.source} -> {one.path.target}"
            _add(groups, name, times, one.path.bytes * times, one.bound.total * times)
    ranked = sorted(groups.items(), key=lambda item: (item[1][2] - item[1][1], item[0]))
    width = max(len(by), *(len(name) for name, _ in ranked[: max(worst, 1)]))
    bound = "" if by == "edge" else f"  {'lower bound':>11}  {'ratio':>9}"
    yield f"{by:<{width}}  {'count':>9}  {'received':>10}{bound}"
    for name, (count, received, least) in ranked[: max(worst, 1)]:
        ratio = ratio_text(received / least) if least else ("1x" if not received else "all of it")
        bound = "" if by == "edge" else f"  {bytes_text(least):>11}  {ratio:>9}"
        yield f"{name:<{width}}  {count:>9,}  {bytes_text(received):>10}{bound}"
    if len(ranked) > max(worst, 1):
        yield f"and {len(ranked) - max(worst, 1):,} more (--worst)"


def _add(groups: dict[str, list[int]], name: str, *more: int) -> None:
    groups[name] = [a + b for a, b in zip(groups.get(name, [0] * len(more)), more, strict=True)]


# --------------------------------------------------------------------------------------------------------------- JSON
def run_json(judged: JudgedRun) -> str:
    """Return the judged redistributions as JSON."""
    document = {
        "format_version": 1,
        "run": judged.run,
        "redistributions": [
            {
                "op": one.record.op,
                "mesh": one.record.mesh,
                "tensor": one.record.tensor,
                "layouts": [str(layout) for layout in one.path.layouts],
                "steps": [step.kind for step in one.path.steps],
                "explicit": one.record.explicit,
                "count": one.record.count,
                "phases": one.record.phases,
                "bytes": one.path.bytes,
                "busiest": one.path.busiest,
                "bound": {"bytes": one.bound.total, "busiest": one.bound.busiest},
                "waste": one.waste or None,
                "by": one.record.by or None,
                "repeats": one.record.repeats or None,
                "undoes": one.record.undoes or None,
                "wasted_across_ops": one.across_ops,
                "missing_rule": judged.missing.at(one.record) or None,
                "measured": measured_dict(one.record),
            }
            for one in judged.executed
        ],
        "not_judged": dict(judged.others),
    }
    return json.dumps(document, indent=2) + "\n"


# --------------------------------------------------------------------------------------------------------------- diff
def diff_text(before: JudgedRun, after: JudgedRun) -> tuple[str, bool]:
    """Return which paths came, went, became dearer or cheaper, and whether any became dearer.

    Redistributions are compared that both runs executed: of the same op on the same mesh, of the same tensor between
    the same placements.
    """
    old, new = _by_ends(before), _by_ends(after)
    lines, dearer = [f"{before.run} -> {after.run}"], 0
    both = sorted(old.keys() & new.keys())
    for key in both:
        first, last = old[key], new[key]
        if first.path == last.path:
            continue
        verdict = "the same bytes" if first.path.bytes == last.path.bytes else "cheaper"
        if last.path.bytes > first.path.bytes:
            verdict, dearer = "DEARER", dearer + 1
        lines.append(f"{verdict}: {' '.join(key[:3])} {key[3]} -> {key[4]}")
        lines += [f"  before  {brief(first.path)}", f"  after   {brief(last.path)}"]
    gone, come = old.keys() - new.keys(), new.keys() - old.keys()
    lines.append(f"{len(both):,} in both, {dearer:,} became dearer; {len(come):,} came, {len(gone):,} went")
    for sign, keys in (("+", come), ("-", gone)):
        lines += [f"{sign} {' '.join(key[:3])} {key[3]} -> {key[4]}" for key in sorted(keys)[:10]]
        if len(keys) > 10:
            lines.append(f"{sign} and {len(keys) - 10:,} more")
    return "\n".join([*lines, ""]), dearer > 0


def _by_ends(judged: JudgedRun) -> dict[tuple[str, str, str, str, str], Executed]:
    """Return the dearest path of each redistribution."""
    found: dict[tuple[str, str, str, str, str], Executed] = {}
    for one in sorted(judged.executed, key=lambda one: one.path.bytes):
        record = one.record
        found[record.op, record.mesh, record.tensor, record.source, record.target] = one
    return found
