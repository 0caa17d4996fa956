"""Budgets: the redistributions that calls of an op may do on a mesh, each with the path that it may take.

A path has other bytes for each tensor, so a budget is a path and no number: the bytes that it allows are those of this
path for the tensor at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from verifier.core.case import MeshSpec
from verifier.core.placement_text import split_placements
from verifier.core.wording import did_you_mean, plural
from verifier.records.schema import PathRecord

__all__ = ["Budget", "path_text", "read_budget"]

_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
_ARROW = re.compile(r" -(?:(\w+)-)?> ")
_PLACEMENT = re.compile(r"R|S\(\d\d?\)|_S\(\d\d?, \d{1,9}\)|(Mask)?P\([^()]*\)|_NormP\([^()]*\)")
_FIELDS = ("op", "mesh", "imports", "drawn", "calls")


def path_text(record: PathRecord) -> str:
    """Return a recorded path on one line, as budgets have it; a local step has a bare arrow.

    >>> steps = [("all_gather", "(R, R)"), ("", "(R, S(0))")]
    >>> path_text(PathRecord("aten.add.Tensor", "2x2", "float32[4, 4]", "(R, S(1))", "(R, S(0))", steps, False, 1, {}))
    '(R, S(1)) -all_gather-> (R, R) -> (R, S(0))'
    """
    return record.source + "".join(f" -{name}-> {after}" if name else f" -> {after}" for name, after in record.steps)


@dataclass(frozen=True, order=True)
class Budget:
    """The redistributions that ``op`` may ask for on ``mesh``, for each combination of placements of its arguments.

    Parameters
    ----------
    mesh
        A shape, as ``2x4`` or ``2x4+flat``.
    imports
        What registered the rules of the op; empty for torch's own.
    drawn
        How the calls were drawn; empty if they were not all tried.
    calls
        For each combination, the placements of the tensor arguments and a path that a redistribution may take, as
        ``S(0); R: S(0) -all_gather-> R``; the placements alone if the call may redistribute nothing. ``small`` after
        placements means that a tensor dim has fewer indices than shards.
    """

    op: str
    mesh: str
    imports: tuple[str, ...] = ()
    drawn: str = ""
    calls: tuple[str, ...] = ()

    @property
    def cell(self) -> tuple[str, str, tuple[str, ...]]:
        """What the budget is about."""
        return self.op, self.mesh, self.imports

    @cached_property
    def _paths(self) -> dict[str, list[str]]:
        """The paths by combination."""
        found: dict[str, list[str]] = {}
        for line in self.calls:
            given, path = _split(line)
            found.setdefault(given, []).extend([path] if path else [])
        return found

    def knows(self, record: PathRecord) -> bool:
        """Return whether the budget is for the combination of a recorded redistribution."""
        return record.given in self._paths

    def allowed(self, record: PathRecord) -> list[PathRecord]:
        """Return the paths whose bytes a recorded redistribution may receive, for its tensor.

        They are those with its ends, or else all that begin as it does: which result an op asks for is no matter of
        bytes.
        """
        ends = [(text, *_ends(text)) for text in self._paths.get(record.given, ())]
        same = [one for one in ends if one[1:] == (record.source, record.target)]
        return [
            replace(record, source=source, target=target, steps=_steps(text))
            for text, source, target in same or [one for one in ends if one[1] == record.source]
        ]

    def updated(self, drawn: str, calls: Iterable[str], paths: Iterable[PathRecord]) -> Budget:
        """Return the budget after a run of ``calls`` that took ``paths``.

        Combinations that were not run stay as they are. If the run was cut short, so that ``drawn`` is empty, paths
        that it did not take stay as well: what was not observed is not gone.
        """
        ran = dict.fromkeys(calls)
        known = {given: [] if drawn and given in ran else list(texts) for given, texts in self._paths.items()}
        known |= {given: [] for given in ran if given not in known}
        for record in paths:
            known.setdefault(record.given, []).append(path_text(record))
        lines = {f"{given}: {text}" if text else given for given, texts in known.items() for text in texts or [""]}
        return Budget(self.op, self.mesh, self.imports, drawn, tuple(sorted(lines)))

    def to_toml(self) -> str:
        """Return the table of the file; each call is a line, so that a new one is a line of a diff."""
        imports = f"imports = [{', '.join(map(_quoted, self.imports))}]\n" if self.imports else ""
        drawn = f"drawn = {_quoted(self.drawn)}\n" if self.drawn else ""
        lines = "".join(f"    {_quoted(text)},\n" for text in self.calls)
        listed = f"calls = [\n{lines}]\n" if lines else "calls = []\n"
        return f"\n[[budget]]\nop = {_quoted(self.op)}\nmesh = {_quoted(self.mesh)}\n{imports}{drawn}{listed}"


def _split(line: str) -> tuple[str, str]:
    """Return the combination and the path of a line."""
    given, _, path = line.partition(": ")
    return given, path


def _quoted(text: str) -> str:
    import tomli_w

    return tomli_w.dumps({"v": text}).removeprefix("v = ").strip()


def _ends(text: str) -> tuple[str, str]:
    source, *_, target = _ARROW.split(text)
    return source, target


def _steps(text: str) -> list[tuple[str, str]]:
    _, *rest = _ARROW.split(text)
    return [(name or "", after) for name, after in zip(rest[::2], rest[1::2], strict=True)]


def read_budget(values: Mapping[str, Any]) -> Budget:
    """Return the budget of a table of the file.

    Raises
    ------
    ValueError
        If a field is missing, unknown or malformed, or a path is no path on the mesh.
    """
    for name in values:
        if name not in _FIELDS:
            raise ValueError(f"unknown field {name!r}{did_you_mean(name, _FIELDS)}")
    if missing := [name for name in ("op", "mesh", "calls") if name not in values]:
        raise ValueError(f"has no {', '.join(missing)}")
    op, mesh, drawn = values["op"], values["mesh"], values.get("drawn", "")
    for name, value in (("op", op), ("mesh", mesh), ("drawn", drawn)):
        if not isinstance(value, str) or not (value or name == "drawn"):
            raise ValueError(f"{name} is {value!r}, but has to be a string")
    for name in ("imports", "calls"):
        texts = values.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} is {texts!r}, but has to be a list of strings")
    spec = MeshSpec.parse(mesh)
    for line in values["calls"]:
        given, path = _split(line)
        for placements in filter(None, given.split("; ")):
            _check_placements(line, placements.removesuffix(" small"), spec.ndim)
        if path or line.endswith(":"):
            _check_path(line, path, spec.ndim)
    named = f"{spec.shape_text}{spec.suffix}"
    return Budget(op, named, tuple(sorted(values.get("imports", []))), drawn, tuple(sorted({*values["calls"]})))


def _check_path(line: str, path: str, mesh_ndim: int) -> None:
    first, *rest = _ARROW.split(path)
    names: Sequence[str | None] = rest[::2]
    if not names:
        raise ValueError(f"call {line[:80]!r} has a path without steps; write it as 'S(0) -all_gather-> R'")
    for name in names:
        if name is not None and name not in _COLLECTIVES:
            raise ValueError(f"call {line[:80]!r}: {name!r} is no collective{did_you_mean(name, _COLLECTIVES, 0.0)}")
    for placements in (first, *rest[1::2]):
        _check_placements(line, placements, mesh_ndim)


def _check_placements(line: str, placements: str, mesh_ndim: int) -> None:
    parts = split_placements(placements)
    if len(parts) != mesh_ndim:
        many = f"{plural(len(parts), 'placement')} for {plural(mesh_ndim, 'mesh dim')}"
        raise ValueError(f"call {line[:80]!r}: {placements[:40]!r} has {many}")
    for part in parts:
        if not _PLACEMENT.fullmatch(part):
            raise ValueError(f"call {line[:80]!r}: {part[:40]!r} is no placement, as R, S(0) or P(sum)")
