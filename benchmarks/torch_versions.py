"""What changed in DTensor's rules from one version of torch to the next, from their rule tables.

    python -m verifier rules --claims-only --world-size 2 --sizes 2 --max-samples 2 --table table-2.13.0.json
    python benchmarks/torch_versions.py table-2.13.0.json table-2.14.1.json table-2.15.0.json [--write PAGE]

The first command runs once under each version. The second loads no torch. It prints Markdown, or puts it into the
marked parts of a page, one for the overview and one for each step between versions.

Exit status: 0, or 2 if a table or a page cannot be read, or a page lacks a mark.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from verifier.core.errors import ReportedError
from verifier.core.wording import plural
from verifier.gate.rule_changes import Change, Changes, changes_between
from verifier.records.rule_table import RuleTable, read_table

KINDS = ("handler", "rule", "strategy", "strategy for one mesh dim")
_NAMES = 6
"""Names of overloads or rules that a cell shows; the others are counted."""
_WIDTH = 90
"""Characters of a name or rule that are shown, as of an exception that a rule raised."""
_OVERVIEW = "overview"


def kind_of(registered: str) -> str:
    """Return the kind of a registration: ``strategy softmax_strategy, _math_ops.py`` is a strategy."""
    return max((kind for kind in KINDS if f"{registered} ".startswith(f"{kind} ")), key=len)


def version(table: RuleTable) -> str:
    return table.torch.partition("+")[0]


def shown(names: Iterable[str], most: int = _NAMES) -> str:
    """Return names as code, the first ones, and how many others there are."""
    every = sorted({name if len(name) <= _WIDTH else f"{name[:_WIDTH]}…" for name in names})
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(f"`{name.removesuffix('.default')}`" for name in every[:most]) + more


def table_lines(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def overview(tables: Sequence[RuleTable]) -> Iterator[str]:
    """Yield a table with a row for each version: how rules are registered, and what came of those that were tried."""
    head = ["torch", "overloads with rules", *KINDS, "overloads tried", "calls", "rules", "of these wrong at some call"]
    rows = []
    for table in tables:
        kinds = Counter(map(kind_of, table.registered.values()))
        tried = table.overloads.values()
        rules = [rule for overload in tried for rule in overload.rules.values()]
        rows.append([
            version(table), f"{len(table.registered):,}", *(f"{kinds[kind]:,}" for kind in KINDS), f"{len(tried):,}",
            f"{sum(len(one.calls) for one in tried):,}", f"{len(rules):,}", sum(bool(rule.wrong) for rule in rules),
        ])  # fmt: skip
    return table_lines(head, rows)


def step(changes: Changes) -> Iterator[str]:
    """Yield what changed from one version to the next."""
    counts, overloads = Counter(one.kind for one in changes.rules), defaultdict[Change, set[str]](set)
    for one in changes.rules:
        overloads[one.kind].add(one.op)
    rows = [[kind, counts[kind], len(overloads[kind])] for kind in Change]
    yield from table_lines(["change", "rules", "overloads"], rows)
    yield ""
    yield from registrations(changes)
    yield from rules(changes, (Change.LOST, Change.WRONG, Change.OUTPUTS, Change.MENDED))
    yield from gained(changes)
    left_out, has = ([f"{op}: {name}" for op, name, now in changes.keys if now is wanted] for wanted in (True, False))
    if left_out:
        yield f"\nThe key of DTensor's cache has come to leave out an argument: {shown(left_out)}."
    if has:
        yield f"\nThe key of DTensor's cache has an argument that it left out: {shown(has)}."
    if changes.not_compared:
        yield f"\nNot compared, because only one table has calls: {plural(len(changes.not_compared), 'overload')}."


def registrations(changes: Changes) -> Iterator[str]:
    lost = [(op, how) for op, how in changes.unregistered]
    yield f"Overloads that have no rule any more: {shown(op for op, _ in lost) or 'none'}.\n"
    by_function = defaultdict[str, list[str]](list)
    for op, how in changes.newly_registered:
        by_function[how].append(op)
    yield f"Overloads that have a rule for the first time: {len(changes.newly_registered)}.\n"
    if by_function:
        rows = sorted(([len(ops), f"`{how}`", shown(ops)] for how, ops in by_function.items()), reverse=True)
        yield from table_lines(["overloads", "registered as", "which"], rows)
        yield ""
    otherwise = Counter((kind_of(old), kind_of(new)) for _, old, new in changes.registered if "decomposed" not in new)
    for (old, new), number in sorted(otherwise.items()):
        if old != new:
            yield f"{plural(number, 'overload')}: a {old} before, a {new} now.\n"


def rules(changes: Changes, kinds: Sequence[Change]) -> Iterator[str]:
    """Yield a table of changed rules, with overloads of which the same changed in one row."""
    of_overload = defaultdict[tuple[Change, str], list[str]](list)
    calls = Counter[tuple[Change, str]]()
    for one in changes.rules:
        if one.kind in kinds:
            of_overload[one.kind, one.op].append(one.rule)
            calls[one.kind, one.op] += len(one.calls)
    rows = defaultdict[tuple[Change, tuple[str, ...]], list[str]](list)
    for (kind, op), texts in of_overload.items():
        rows[kind, tuple(sorted(texts))].append(op)
    if rows:
        order = sorted(rows, key=lambda one: (kinds.index(one[0]), rows[one]))
        yield from table_lines(
            ["change", "overloads", "rules", "calls"],
            ([kind, shown(rows[kind, texts]), shown(texts, 4), sum(calls[kind, op] for op in rows[kind, texts])]
             for kind, texts in order),
        )  # fmt: skip
        yield ""


def gained(changes: Changes) -> Iterator[str]:
    """Yield a table of gained rules by their overloads' packet, as there are many of the same kind."""
    found = defaultdict[str, list[str]](list)
    for one in changes.rules:
        if one.kind is Change.GAINED:
            found[one.rule].append(one.op)
    if found:
        most = sorted(found, key=lambda rule: (-len(found[rule]), rule))[:20]
        yield "The rules that most overloads gained:\n"
        yield from table_lines(
            ["rule", "overloads", "which"], ([f"`{one}`", len(found[one]), shown(found[one])] for one in most)
        )


def parts(tables: Sequence[RuleTable]) -> Iterator[tuple[str, str]]:
    """Yield the name of each part of the page, and its text."""
    yield _OVERVIEW, "\n".join(overview(tables))
    for before, after in pairwise(tables):
        yield f"{version(before)} to {version(after)}", "\n".join(step(changes_between(before, after)))


def filled(page: str, name: str, text: str) -> str:
    """Return a page with ``text`` between the marks of a part.

    Raises
    ------
    ValueError
        If the page lacks them.
    """
    begin, end = f"<!-- {name}: python benchmarks/torch_versions.py -->\n", f"<!-- end of {name} -->"
    head, found, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"the page lacks the lines {begin.strip()!r} and {end!r}")
    return f"{head}{begin}\n{text.rstrip()}\n\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE", help="rule tables, from the oldest torch on")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose marked parts are written")
    given = parser.parse_args()
    try:
        made = list(parts([read_table(path) for path in given.tables]))
        if given.write is None:
            print("\n\n".join(f"## {name}\n\n{text}" for name, text in made))
            return 0
        page = given.write.read_text(encoding="utf-8")
        for name, text in made:
            page = filled(page, name, text)
        given.write.write_text(page, encoding="utf-8")
    except (ReportedError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
