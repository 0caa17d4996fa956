"""The function that lists derived rules, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.deriving.learning.generalise import Cut, DerivedRule, Part
from verifier.deriving.learning.language import Dim, dim_sets
from verifier.deriving.writing.subject import CannotWriteError, Subject, Target

__all__ = ["CUT_AT_MULTIPLES", "Body", "helpers"]


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
        first = self._replicated()
        if re.search(r"\bcount_of_results\b", f"{text}\n{first}"):
            given = ", ".join([self.subject.path, self.subject.given()])
            lines.append(f"    count_of_results = {_COUNTED}({given})")
        return [*lines, f"    rules = [{first}]"]

    def _replicated(self) -> str:
        """Return the rule without shards where DTensor does not add it."""
        if self.subject.target is not Target.LOCAL_MAP:
            return ""
        kinds = {(len(call.results) - len(call.gradients), call.absent) for call in self.subject.calls if call.rules}
        if len(kinds) > 1 and not self.subject.alike:
            raise CannotWriteError(
                f"{self.subject.op}: which results it has depends on its arguments, which local_map cannot say"
            )
        count, absent = min(kinds)
        results = ["Replicate()"] * count
        if self.subject.alike:
            results = [f"*[Replicate()] * {self.subject.count_of_results}"]
        for place in absent:
            results.insert(place, "None")
        inputs = f"[Replicate() for one in {self.subject.given_tensors()}]"
        if not self.subject.may_lack_tensors:
            inputs = self._of_tensors({name: Replicate() for name in self.subject.tensors})
        return f"({_listed(results)}, {inputs}, {inputs})"

    def rules(self, rules: Sequence[DerivedRule], in_blocks: bool = False) -> list[str]:
        """Return the lines that add ``rules`` to the list, those for the same calls and tensor dims together.

        With ``in_blocks`` each is added with the tensor that has to be cut at multiples of a block, its dim, and the
        block.
        """
        blocks: dict[str, dict[str, dict[str, list[str]]]] = {}
        for rule in rules:
            row = self._in_blocks(rule) if in_blocks else self._row(rule)
            loop = "" if rule.pivot is None else f"for d in range({rule.slots[rule.pivot]}_ndim):"
            conditions = [self._of_first(test.text) for test in rule.tests if not test.of_call]
            if rule.cut is not None and not in_blocks:
                conditions.append(self._begins_at_multiples(rule, rule.cut))
            of_loop = blocks.setdefault(" and ".join(self._of_call(rule)), {}).setdefault(loop, {})
            of_loop.setdefault(" and ".join(conditions), []).append(f"rules.append({row})")
        lines: list[str] = []
        for of_call, loops in blocks.items():
            inner: list[str] = []
            for loop, rows in loops.items():
                inner += _under(loop, [line for of_dim, some in rows.items() for line in _under(_if(of_dim), some)])
            lines += _under(_if(of_call), inner)
        return [f"    {line}" for line in lines]

    def _of_call(self, rule: DerivedRule) -> list[str]:
        """Return the conditions of a rule on the call, and which tensors the call has."""
        found = [self._of_first(test.text) for test in rule.tests if test.of_call]
        for name in self.subject.tensors:
            if there := self.subject.is_there(name):
                absent = there.replace("is not None", "is None") if " is " in there else f"not {there}"
                found.append(there if name in rule.slots else absent)
        return found

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
        if rule.alike:
            outputs = [f"*{_listed(outputs)} * {self.subject.count_of_results}"]
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
        return [f"def {self.subject.name}_in_blocks({self.subject.parameters()}):", f'    """{said}"""']


_HAS_ELEMENTS, _BEGIN_AT_MULTIPLES = "_each_rank_has_elements", "_begin_at_multiples"
CUT_AT_MULTIPLES = "_cut_at_multiples"
_COUNTED = "_number_of_results"
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
    CUT_AT_MULTIPLES: f'''\
def {CUT_AT_MULTIPLES}(spec, dim, block):
    """Return whether the shards of a tensor dim begin at multiples of ``block``, and each rank has elements."""
    sizes = [spec.mesh.size(n) for n, placement in enumerate(spec.placements) if placement.is_shard(dim)]
    parts, extent = math.prod(sizes), spec.shape[dim]
    length = -(-extent // parts)
    return length % block == 0 and length * (parts - 1) < extent and (len(sizes) < 2 or extent % parts == 0)


'''.split("\n")[:-1],
    _COUNTED: f'''\
def {_COUNTED}(op, *args, **kwargs):
    """Return how many tensors an op returns: as many as on the device meta."""

    def on_meta(one):
        return torch.empty(one.shape, dtype=one.dtype, device="meta") if hasattr(one, "shape") else one

    args, kwargs = tree_map(on_meta, (args, kwargs), is_leaf=lambda one: hasattr(one, "shape"))
    return len(op(*args, **kwargs))


'''.split("\n")[:-1],
}
"""Functions that conditions of rules call, by name."""


def helpers(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the functions that ``lines`` call."""
    text = "\n".join(lines)
    for name, function in _HELPERS.items():
        yield from function if name in text else ()


def _if(condition: str) -> str:
    return f"if {condition}:" if condition else ""


def _under(head: str, lines: Sequence[str]) -> list[str]:
    """Return lines below the head of a block; as they are if there is none."""
    return [head, *(f"    {line}" for line in lines)] if head else list(lines)


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
