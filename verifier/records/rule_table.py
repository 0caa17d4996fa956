"""The rule table: what DTensor claims of each overload, at which calls, and what came of it. Read and written as JSON.

A table has no times and no ids, so two checks of the same torch with the same options have the same table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from verifier.core.errors import ReportedError
from verifier.records.files import AS_IT_WAS, write_atomically

__all__ = ["TABLE_FORMAT", "ClaimedRule", "OverloadTable", "RuleTable", "read_table", "write_table"]

TABLE_FORMAT = 2
_Item = TypeVar("_Item")


class ClaimedRule(msgspec.Struct, omit_defaults=True):
    """One rule of an overload, as ``S(0), R -> S(0)``, with the calls at which DTensor claims it, by verdict.

    A call is a number in :attr:`OverloadTable.calls`.

    Parameters
    ----------
    confirmed
        No draw refutes the rule.
    wrong
        A draw refutes it, and ranks bear that out, or none could be asked.
    unconfirmed
        A draw accuses it, and ranks do not bear that out.
    special
        Only infinities, NaN, -0.0 or values at a threshold refute it.
    inconclusive
        Rounding hides whether it holds, or the draws' results say nothing.
    """

    confirmed: list[int] = []
    wrong: list[int] = []
    unconfirmed: list[int] = []
    special: list[int] = []
    inconclusive: list[int] = []

    @property
    def claimed(self) -> set[int]:
        """The calls at which DTensor claims the rule, whatever came of it."""
        return {*self.confirmed, *self.wrong, *self.unconfirmed, *self.special, *self.inconclusive}


class OverloadTable(msgspec.Struct):
    """One overload: how its rules are registered, the calls that were asked about, and its rules.

    Parameters
    ----------
    registered
        The kind of registration, and the function with its file.
    left_out
        The arguments by which the key of DTensor's cache does not distinguish calls, and should.
    calls
        The arguments of each call, at the smallest size, as text.
    """

    registered: str
    left_out: list[str]
    calls: list[str]
    rules: dict[str, ClaimedRule]


class RuleTable(msgspec.Struct):
    """The rules of many overloads, and the question that they answer.

    Parameters
    ----------
    registered
        How the rules of each overload are registered that has any, whether it was asked about or not.
    """

    format: int
    torch: str
    meshes: list[str]
    dtype: str
    sizes: int
    max_samples: int | None
    seed: int
    imports: list[str]
    registered: dict[str, str]
    overloads: dict[str, OverloadTable]

    def question(self) -> Mapping[str, object]:
        """What has to be equal for two tables to have the same calls."""
        return {name: getattr(self, name) for name in ("meshes", "dtype", "sizes", "max_samples", "seed")}


def write_table(table: RuleTable, path: Path) -> None:
    """Write a table with one line for each registration, call and rule, so that text tools show what differs.

    Raises
    ------
    RunStoreError
        If the file cannot be written.
    """
    write_atomically(path, ("".join(_lines(table))).encode(), AS_IT_WAS)


def _lines(table: RuleTable) -> Iterator[str]:
    fields = msgspec.to_builtins(table)
    overloads, registered = fields.pop("overloads"), fields.pop("registered")
    yield "{\n"
    yield from (f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in fields.items())
    yield ' "registered": {\n'
    for last, (op, how) in _with_last(registered.items()):
        yield f"  {json.dumps(op)}: {json.dumps(how)}{'' if last else ','}\n"
    yield " },\n"
    yield ' "overloads": {\n'
    for last_op, (op, overload) in _with_last(overloads.items()):
        yield f"  {json.dumps(op)}: {{\n"
        yield f'   "registered": {json.dumps(overload["registered"])},\n'
        yield f'   "left_out": {json.dumps(overload["left_out"])},\n'
        yield '   "calls": [\n'
        yield from (f"    {json.dumps(one)}{'' if last else ','}\n" for last, one in _with_last(overload["calls"]))
        yield '   ],\n   "rules": {\n'
        for last, (rule, calls) in _with_last(overload["rules"].items()):
            yield f"    {json.dumps(rule)}: {json.dumps(calls)}{'' if last else ','}\n"
        yield f"   }}\n  }}{'' if last_op else ','}\n"
    yield " }\n}\n"


def _with_last(items: Collection[_Item]) -> Iterator[tuple[bool, _Item]]:
    """Yield each item with whether it is the last one."""
    for number, item in enumerate(items, 1):
        yield number == len(items), item


def read_table(path: Path) -> RuleTable:
    """Return the table in a file.

    Raises
    ------
    ReportedError
        If the file cannot be read, is no table, or is one of a later version.
    """
    try:
        table = msgspec.json.decode(path.read_bytes(), type=RuleTable)
    except OSError as error:
        raise ReportedError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportedError(f"{path}: no rule table, which `rules --table FILE` writes: {error}") from error
    if table.format != TABLE_FORMAT:
        raise ReportedError(f"{path}: a rule table of format {table.format}; this version reads {TABLE_FORMAT}")
    for op, overload in table.overloads.items():
        for rule, claimed in overload.rules.items():
            if strange := [one for one in claimed.claimed if not 0 <= one < len(overload.calls)]:
                raise ReportedError(f"{path}: {op}: {rule}: there is no call {strange[0]}")
    return table
