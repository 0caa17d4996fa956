"""What came of mutants, as text and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from verifier.core.wording import plural
from verifier.mutation.operators import OPERATORS
from verifier.mutation.outcomes import Kind, MutationRun, Outcome

__all__ = ["mutation_json", "mutation_lines"]


def mutation_lines(run: MutationRun) -> Iterator[str]:
    """Yield one line for each survivor, then the counts by operator and by file, then the score."""
    for outcome in run.outcomes:
        if outcome.kind is Kind.SURVIVED:
            yield f"{_place(outcome)}: {outcome.mutant.before}  ->  {outcome.mutant.after}"
            yield f"  survived: {outcome.why}"
            yield f"  {outcome.mutant.operator}; to tell it: {OPERATORS[outcome.mutant.operator]}{_asked(outcome)}"
    yield from _table(run, "operator", lambda one: one.mutant.operator)
    yield from _table(run, "file", lambda one: os.path.basename(one.mutant.file))
    yield ""
    yield _summary(run)


def mutation_json(run: MutationRun) -> str:
    """Return everything that is known of a run, as JSON."""
    counts = run.counts()
    return json.dumps(
        {
            "candidates": run.candidates,
            "tried": len(run.outcomes),
            "counts": {str(kind): counts[kind] for kind in Kind},
            "no_programs": [asdict(mutant) for mutant in run.no_programs],
            "mutants": [
                {**asdict(one), "kind": str(one.kind), "telling_input": OPERATORS[one.mutant.operator]}
                for one in run.outcomes
            ],
            "errors": run.errors,
        },
        indent=2,
    )


def _place(outcome: Outcome) -> str:
    mutant = outcome.mutant
    relative = os.path.relpath(mutant.file)
    file = mutant.file if relative.startswith(os.pardir) else relative
    return f"{file}:{mutant.line} {mutant.op or mutant.function}"


def _asked(outcome: Outcome) -> str:
    return f"; asked: {plural(outcome.samples, 'sample')} of {', '.join(outcome.ops)}" if outcome.ops else ""


def _table(run: MutationRun, name: str, key: object) -> Iterator[str]:
    assert callable(key)
    rows: dict[str, Counter[Kind]] = {}
    for outcome in run.outcomes:
        rows.setdefault(key(outcome), Counter())[outcome.kind] += 1
    yield ""
    yield f"{name:<24}" + "".join(f"{kind!s:>10}" for kind in Kind)
    for row, counts in sorted(rows.items()):
        yield f"{row:<24}" + "".join(f"{counts[kind]:>10}" for kind in Kind)


def _summary(run: MutationRun) -> str:
    counts = run.counts()
    told = counts[Kind.CAUGHT] + counts[Kind.FEWER] + counts[Kind.SURVIVED]
    score = f": {counts[Kind.CAUGHT] / told:.0%} of {told} that differ are caught" if told else ""
    unreached = sum(one.kind is Kind.SURVIVED and not one.samples for one in run.outcomes)
    parts = ", ".join(f"{counts[kind]} {kind}" for kind in Kind)
    parts += f" ({unreached} on lines that no sample reaches)" if unreached else ""
    left_out = f"; {plural(len(run.no_programs), 'mutant')} could not be put in" if run.no_programs else ""
    return f"{len(run.outcomes)} of {plural(run.candidates, 'mutant')} tried: {parts}{score}{left_out}"
