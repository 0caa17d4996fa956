"""The function that lists derived rules, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from verifier.deriving.learning.generalise import Cut, DerivedRule, Part
from verifier.deriving.learning.language import Dim, dim_sets
from verifier.deriving.writing.subject import CannotWriteError, Subject, Target

__all__ = ["Body", "helpers", "in_groups"]


class Body:
    """Writes the function of the rules of a subject."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @property
    def head(self) -> list[str]:
        return [
            f"def {self.subject.name}_rules({self.subject.parameters()}):",
            f'    """{self._described}"""',
        ]

    @property
    def _described(self) -> str:
        if self.subject.target is Target.LOCAL_MAP:
            what = "placements of results, tensors, and their gradients"
            return f"Return the rules of {self.subject.path} on one mesh dim: {what}."
        return f"Return the rules of {self.subject.op} on one mesh dim."

    def prepared(self, body: Sequence[str]) -> list[str]:
        """Return the lines that define what the rules mention."""
        text, lines = "\n".join(body), []
        known = dim_sets(self.subject.calls, self.subject.tensors[0]) if self.subject.calls else ()
        named = [some for some in known if re.search(rf"\b{some.name}\b", text)]
        for name in self.subject.tensors:
            if re.search(rf"\b{name}_ndim\b", text) or (name == self.subject.tensors[0] and named):
                one = f"{name}[0]" if name in self.subject.lists else name
                value = f"len({one}.shape)"
                there = self.subject.is_there(name)
                lines.append(f"    {name}_ndim = {value}" + (f" if {there} else 0" if there else ""))
        lines += [f"    {some.name} = {some.text}" for some in named]
        return [*lines, f"    rules = [{self._replicated()}]"]

    def _replicated(self) -> str:
        """Return the rule without shards where DTensor does not add it."""
        if self.subject.target is not Target.LOCAL_MAP:
            return ""
        kinds = {(len(call.results) - len(call.gradients), call.absent) for call in self.subject.calls if call.rules}
        if len(kinds) > 1:
            raise CannotWriteError(
                f"{self.subject.op}: which results it has depends on its arguments, which local_map cannot say"
            )
        ((count, absent),) = kinds
        results = ["Replicate()"] * count
        for place in absent:
            results.insert(place, "None")
        whole = ", ".join(f"*{name}" if name in self.subject.lists else name for name in self.subject.tensors)
        inputs = f'[Replicate() for one in [{whole}] if hasattr(one, "shape")]'
        return f"({_listed(results)}, {inputs}, {inputs})"

    def rules(self, rules: Sequence[DerivedRule], in_blocks: bool = False) -> list[str]:
        """Return the lines that add ``rules``, which are for the same points, to the list.

        With ``in_blocks`` each is added with the tensor that has to be cut at multiples of a block, its dim, and the
        block.
        """
        rule = rules[0]
        tests = [self._of_first(test.text) for test in rule.tests if not test.of_call]
        outer = [self._of_first(test.text) for test in rule.tests if test.of_call]
        for name in self.subject.tensors:
            if there := self.subject.is_there(name):
                outer.append(
                    there
                    if name in rule.slots
                    else there.replace("is not None", "is None")
                    if " is " in there
                    else f"not {there}"
                )
        lines, indent = [], "    "
        if outer:
            lines.append(f"{indent}if {' and '.join(outer)}:")
            indent += "    "
        if rule.pivot is not None:
            lines.append(f"{indent}for d in range({rule.slots[rule.pivot]}_ndim):")
            indent += "    "
            texts = list(tests)
            if rule.cut is not None and not in_blocks:
                texts.append(self._begins_at_multiples(rule, rule.cut))
            if texts:
                lines.append(f"{indent}if {' and '.join(texts)}:")
                indent += "    "
        return [
            *lines,
            *(f"{indent}rules.append({self._in_blocks(one) if in_blocks else self._row(one)})" for one in rules),
        ]

    def _of_first(self, condition: str) -> str:
        """Return a condition on a slot as code: of a list it is one on its first tensor."""
        for name in self.subject.lists:
            condition = re.sub(rf"\b{name}\.(shape|dtype)\b", rf"{name}[0].\1", condition)
        return condition

    def _in_blocks(self, rule: DerivedRule) -> str:
        """Return a rule with the number of the tensor that is cut at multiples of a block, its dim, and the block."""
        assert rule.cut is not None
        dim = rule.inputs[rule.cut.slot]
        assert isinstance(dim, Dim)
        before = [f"len({name})" if name in self.subject.lists else "1" for name in rule.slots[: rule.cut.slot]]
        place = " + ".join(before) if any(name in self.subject.lists for name in rule.slots) else str(len(before))
        return f"({self._row(rule)}, {place or 0}, {dim.text}, {rule.cut.text})"

    def _begins_at_multiples(self, rule: DerivedRule, cut: Cut) -> str:
        """Return the condition that shards begin at multiples of a block, and that each rank has elements."""
        name, dim = rule.slots[cut.slot], rule.inputs[cut.slot]
        assert isinstance(dim, Dim)
        one = f"{name}[0]" if name in self.subject.lists else name
        if cut.in_ones:
            return f"{_HAS_ELEMENTS}({one}, {dim.text})"
        return f"{_BEGIN_AT_MULTIPLES}({one}, {dim.text}, {cut.text})"

    def _row(self, rule: DerivedRule) -> str:
        placed = dict(zip(rule.slots, rule.inputs, strict=True))
        count = len(rule.outputs) - len(rule.gradients)
        outputs = [_part(part) for part in rule.outputs[:count]]
        for place in rule.absent:
            outputs.insert(place, "None")
        if self.subject.target is Target.LOCAL_MAP:
            gradients = {**placed, **dict(zip(rule.gradients, rule.outputs[count:], strict=True))}
            parts = [_listed(outputs), self._of_tensors(placed), self._of_tensors(gradients)]
            return f"({', '.join(parts)})"
        outputs = outputs[: self._returned(rule)]
        if self.subject.target is Target.REGISTER_SHARDING:
            inputs = [_part(placed[a.name]) if a.name in placed else "None" for a in self.subject.schema]
            return f"([{', '.join(outputs)}], [{', '.join(inputs)}])"
        return f"[{', '.join([*outputs, *self._inputs(placed)])}]"

    def _inputs(self, placed: Mapping[str, Part]) -> list[str]:
        return [
            f"*[{_part(placed[name])}] * len({name})" if name in self.subject.lists else _part(placed[name])
            for name in self.subject.tensors if name in placed
        ]  # fmt: skip

    def _of_tensors(self, placed: Mapping[str, Part]) -> str:
        return _listed(self._inputs(placed))

    def _returned(self, rule: DerivedRule) -> int:
        """Return how many results come back; what is only written to has no placement in a strategy."""
        returns = self.subject.op._schema.returns
        lists = any("List" in str(one.type) for one in returns)
        return len(rule.outputs) + len(rule.absent) if lists else len(returns)

    @property
    def head_of_blocks(self) -> list[str]:
        said = "Return the rules for shards that begin at multiples of a block, with the tensor, the dim and the block."
        return ["", "", f"def {self.subject.name}_in_blocks({self.subject.parameters()}):", f'    """{said}"""']


def in_groups(rules: Sequence[DerivedRule]) -> list[list[DerivedRule]]:
    """Return the rules in groups of those for the same points."""
    groups: dict[object, list[DerivedRule]] = {}
    for rule in rules:
        pivot = None if rule.pivot is None else rule.slots[rule.pivot]
        cut = None if rule.cut is None else (rule.cut.slot, rule.cut.text, rule.inputs[rule.cut.slot])
        groups.setdefault((rule.slots, pivot, cut, tuple(test.text for test in rule.tests)), []).append(rule)
    return list(groups.values())


_HAS_ELEMENTS, _BEGIN_AT_MULTIPLES = "_each_rank_has_elements", "_begin_at_multiples"
_HELPERS = {
    _HAS_ELEMENTS: f'''\
def {_HAS_ELEMENTS}(spec, dim):
    """Return whether each rank has elements of a tensor dim, whichever mesh dims shard it."""
    sizes, extent = spec.mesh.shape, spec.shape[dim]
    if len(sizes) > 1:
        return extent % math.prod(sizes) == 0
    return -(-extent // sizes[0]) * (sizes[0] - 1) < extent


'''.split("\n")[:-1],
    _BEGIN_AT_MULTIPLES: f'''\
def {_BEGIN_AT_MULTIPLES}(spec, dim, block):
    """Return whether the shards of a tensor dim begin at multiples of ``block``, whichever mesh dims shard it."""
    sizes, extent = spec.mesh.shape, spec.shape[dim]
    if len(sizes) > 1:
        return extent % (block * math.prod(sizes)) == 0
    length = -(-extent // sizes[0])
    return length % block == 0 and length * (sizes[0] - 1) < extent  # each rank has elements


'''.split("\n")[:-1],
}
"""Functions that conditions of rules call, by name."""


def helpers(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the functions that ``lines`` call."""
    text = "\n".join(lines)
    for name, function in _HELPERS.items():
        yield from function if name in text else ()


def _listed(parts: Iterable[str]) -> str:
    return f"[{', '.join(parts)}]"


def _part(part: Part) -> str:
    if isinstance(part, Dim):
        return f"Shard({part.text})"
    return _placement(part)


def _placement(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduce_op == "sum" else f'Partial("{placement.reduce_op}")'
    return "Replicate()"
