"""Writes derived rules as a strategy that DTensor registers, or as a function of DTensors, and a test of it."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from verifier.core.wording import plural
from verifier.deriving.evidence import CallEvidence
from verifier.deriving.generalise import Cut, Derivation, DerivedRule, Part
from verifier.deriving.language import Dim, dim_sets
from verifier.planning.own_samples import callable_of
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.registries import IMPORTS_OF_SINGLE_DIM, takes_filters

__all__ = ["CannotWriteError", "Provenance", "Target", "strategy_name", "strategy_text"]


class Target(StrEnum):
    """In which of DTensor's ways a strategy is registered; or the function that runs ``local_map`` by the rules."""

    SINGLE_DIM = "single-dim"
    REGISTER_SHARDING = "register-sharding"
    LOCAL_MAP = "local-map"


class CannotWriteError(ValueError):
    """A strategy cannot be registered in this way."""


@dataclass(frozen=True)
class Provenance:
    """What a derivation rests on, for the comment of the code."""

    torch: str
    verifier: str
    meshes: str
    dtype: str
    seed: int
    command: str


_IMPORTS = {
    Target.SINGLE_DIM: IMPORTS_OF_SINGLE_DIM.rstrip("\n"),
    Target.REGISTER_SHARDING: "from torch.distributed.tensor.experimental import register_sharding",
    Target.LOCAL_MAP: "from torch.distributed.tensor.experimental import local_map",
}


def strategy_text(
    op: OpOverload,
    calls: Sequence[CallEvidence],
    made: Derivation,
    target: Target,
    given: Provenance,
    uneven: bool = True,
    filters: bool | None = None,
) -> str:
    """Return a module that registers the derived rules as the strategy of ``op``.

    Parameters
    ----------
    uneven
        Whether the rules may be used where a rank has no elements.
    filters
        Whether a strategy for one mesh dim can have a filter; if None, whether it can in the torch that runs.

    Raises
    ------
    CannotWriteError
        If ``target`` cannot have such rules, with the reason.
    """
    writer = _Writer(op, calls, target, uneven)
    in_blocks = [rule for rule in made.rules if rule.cut is not None]
    filtered = in_blocks if target is Target.SINGLE_DIM and (takes_filters() if filters is None else filters) else []
    left_out = [] if filtered or writer.sees_mesh else in_blocks
    written = [rule for rule in made.rules if rule not in left_out and rule not in filtered]
    if not written and not filtered:
        raise CannotWriteError(f"{op}: {_left_out(op, left_out[0])}")
    body = [line for rules in _alike(written) for line in writer.rules(rules)]
    blocks = [line for rules in _alike(filtered) for line in writer.rules(rules, in_blocks=True)]
    writer.filters = bool(blocks)
    header = "\n".join(f"# {line}" for line in _comment(op, calls, made, given, left_out))
    used = [
        name
        for name in ("DTensor", "Partial", "Replicate", "Shard")
        if any(re.search(rf"\b{name}\b", line) for line in (*body, *blocks, *writer.filter, *writer.tail))
    ]
    helper = [line for name, lines in _HELPERS.items() if any(name in line for line in body) for line in lines]
    function = [*helper, *writer.head, *writer.prepared(body), *body, "    return rules"]
    if blocks:
        function += [*writer.head_of_blocks, *writer.prepared(blocks), *blocks, "    return rules", *writer.filter]
    text = "\n".join(function)
    hidden = [argument.name for argument in op._schema.arguments if hasattr(builtins, argument.name)]
    for name in hidden:  # such as topk's argument sorted
        text = re.sub(rf"(?<![\w.]){name}\(", f"builtins.{name}(", text)
    whole = "\n".join([text, *writer.tail])
    lines = [
        header, *(f"import {name}" for name in ("builtins", "math") if f"{name}." in whole), "",
        "import torch", f"from torch.distributed.tensor import {', '.join(used)}" if used else "",
        _IMPORTS[target], *writer.imports, "", "", text, *writer.tail,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _alike(rules: Sequence[DerivedRule]) -> list[list[DerivedRule]]:
    """Return the rules in groups of those for the same points."""
    groups: dict[object, list[DerivedRule]] = {}
    for rule in rules:
        pivot = None if rule.pivot is None else rule.slots[rule.pivot]
        cut = None if rule.cut is None else (rule.cut.slot, rule.cut.text, rule.inputs[rule.cut.slot])
        groups.setdefault((rule.slots, pivot, cut, tuple(test.text for test in rule.tests)), []).append(rule)
    return list(groups.values())


def _left_out(op: OpOverload, rule: DerivedRule) -> str:
    """Return why a rule with a cut is not written."""
    assert rule.cut is not None
    inputs, outputs = (", ".join(f"S({p.text})" if isinstance(p, Dim) else str(p) for p in some)
                       for some in (rule.inputs, rule.outputs))  # fmt: skip
    slot = rule.slots[rule.cut.slot]
    return (
        f"{inputs} -> {outputs} holds where "
        + (
            f"each rank has elements of {slot}" if rule.cut.in_ones
            else f"the shards of {slot} begin at multiples of {rule.cut.text}"
        )
        + f"; a strategy for one mesh dim does not see the number of ranks ({_way_out(op)} does)"
    )  # fmt: skip


def _way_out(op: OpOverload) -> str:
    """Return what sees the number of ranks."""
    arguments = [argument for argument in op._schema.arguments if "Tensor" in str(argument.type)]
    beyond = any(argument.kwarg_only or "List[" in str(argument.type) for argument in arguments)
    lists = any("List[" in str(result.type) for result in op._schema.returns)
    return (
        "its filter from torch 2.14 on" if beyond or lists or op.namespace == "aten" else "--target register-sharding"
    )


def _comment(
    op: OpOverload, calls: Sequence[CallEvidence], made: Derivation, given: Provenance, left_out: Sequence[DerivedRule]
) -> list[str]:
    holding = [call for call in calls if call.holding and not call.rare]
    draws, sizes = min((call.draws for call in holding), default=0), min((call.sizes for call in holding), default=0)
    ndims = sorted({call.ndims for call in holding})
    lines = [
        f"Sharding rules of {callable_of(str(op)) or op}, derived by `{given.command}`.",
        f"Each held in every draw of {plural(len(holding), 'call')}, in at least {draws} draws and {sizes} sizes, "
        f"uneven ones too, on meshes {given.meshes}. {plural(len(calls) - len(holding), 'call')} of rare classes "
        "contradict none.",
        f"Dims of the tensors: {', '.join(map(str, ndims[:6]))}{' ...' if len(ndims) > 6 else ''}; {given.dtype}, "
        f"seed {given.seed}; torch {given.torch}, dtensor-verifier {given.verifier}.",
        f"They explain {made.explained} of {made.explained + len(made.unexplained)} placements that hold.",
    ]
    cuts = {rule.cut.text: rule.cut for rule in made.rules if rule.cut is not None and rule not in left_out}
    lines += [
        f"Where {'each rank has elements' if cut.in_ones else f'shards begin at multiples of {cut.text}'}, what does "
        f"not hold elsewhere held for {cut.held} pairs of an extent and a number of ranks; for {cut.failed} others it "
        "did not."
        for cut in cuts.values()
    ]
    lines += [f"Left out: {_left_out(op, rule)}." for rule in left_out[:2]]
    for call, inputs in made.unexplained[: 3 - min(2, len(left_out))]:
        lines.append(f"Left out: {', '.join(map(str, inputs))} of {call.origin}, dims {list(call.ndims)}.")
    if len(made.unexplained) > 3:
        lines.append(f"Left out, too: {len(made.unexplained) - 3} more placements.")
    return [piece for line in lines for piece in _wrapped(line)][:10]


def _wrapped(line: str, width: int = 116) -> list[str]:
    words, lines = line.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


class _Writer:
    """Writes the function of one op."""

    def __init__(self, op: OpOverload, calls: Sequence[CallEvidence], target: Target, uneven: bool) -> None:
        self.op, self.calls, self.target, self.uneven = op, calls, target, uneven
        self.schema = op._schema.arguments
        self.tensors = [a.name for a in self.schema if "Tensor" in str(a.type)]
        self.lists = {a.name for a in self.schema if "List[" in str(a.type) and "Tensor" in str(a.type)}
        self.optional = {a.name for a in self.schema if str(a.type).startswith("Optional[") and "Tensor" in str(a.type)}
        absent = {name for call in calls for name in self.tensors if name not in call.slots}
        self.numbers = absent - self.optional - self.lists
        """Parameters for which some call has a number in the place of a tensor."""
        self.path = callable_of(str(op)) or f"torch.ops.{op}"
        self.name = strategy_name(op)
        self.filters = False
        """Whether the strategy has a filter."""
        self._check()

    def _check(self) -> None:
        if any(argument.is_out for argument in self.schema):
            raise CannotWriteError(
                f"{self.op}: DTensor makes the strategy of an overload with out= from its base overload"
            )
        results = self.op._schema.returns
        if any("List" in str(result.type) for result in results) and len({call.results for call in self.calls}) > 1:
            counts = {len(call.results) for call in self.calls if call.rules}
            if len(counts) > 1:
                raise CannotWriteError(f"{self.op}: its number of results depends on its arguments ({sorted(counts)})")
        if callable_of(str(self.op)) and self.target is not Target.LOCAL_MAP:
            raise CannotWriteError(
                f"{self.path} is a function and no op, so it has no strategy; use --target local-map"
            )
        if self.target is Target.LOCAL_MAP and any(argument.alias_info is not None for argument in self.schema):
            raise CannotWriteError(f"{self.op}: it returns or writes to its arguments, which local_map cannot do")
        if self.target is Target.REGISTER_SHARDING:
            keyword = [a.name for a in self.schema if a.kwarg_only and a.name in self.tensors]
            problem = (
                f"the list {min(self.lists)}" if self.lists else f"the keyword {keyword[0]}" if keyword
                else "a list of results" if any("List" in str(result.type) for result in results)
                else "None for a result" if any(call.absent for call in self.calls) else ""
            )  # fmt: skip
            if problem:
                raise CannotWriteError(f"{self.op}: register_sharding cannot place {problem}; use --target single-dim")

    def _is_there(self, name: str) -> str:
        """Return the condition that a call has a tensor for a parameter; empty if it always has."""
        return (
            f"{name} is not None"
            if name in self.optional
            else f'hasattr({name}, "shape")'
            if name in self.numbers
            else ""
        )

    @property
    def sees_mesh(self) -> bool:
        """Whether the function of the rules is told on which mesh its tensors are."""
        return self.target is Target.REGISTER_SHARDING

    @property
    def head(self) -> list[str]:
        return [
            f"def {self.name}_rules({self._parameters()}):",
            f'    """{self._described}"""',
        ]

    @property
    def _described(self) -> str:
        if self.target is Target.LOCAL_MAP:
            return (
                f"Return the rules of {self.path} on one mesh dim: placements of results, tensors, and their gradients."
            )
        return f"Return the rules of {self.op} on one mesh dim."

    def prepared(self, body: Sequence[str]) -> list[str]:
        """Return the lines that define what the rules mention."""
        text, lines = "\n".join(body), []
        known = dim_sets(self.calls, self.tensors[0]) if self.calls else ()
        named = [some for some in known if re.search(rf"\b{some.name}\b", text)]
        for name in self.tensors:
            if re.search(rf"\b{name}_ndim\b", text) or (name == self.tensors[0] and named):
                one = f"{name}[0]" if name in self.lists else name
                value = f"len({one}.shape)"
                there = self._is_there(name)
                lines.append(f"    {name}_ndim = {value}" + (f" if {there} else 0" if there else ""))
        lines += [f"    {some.name} = {some.text}" for some in named]
        return [*lines, f"    rules = [{self._replicated()}]"]

    def _replicated(self) -> str:
        """Return the rule without shards where DTensor does not add it."""
        if self.target is not Target.LOCAL_MAP:
            return ""
        kinds = {(len(call.results) - len(call.gradients), call.absent) for call in self.calls if call.rules}
        if len(kinds) > 1:
            raise CannotWriteError(
                f"{self.op}: which results it has depends on its arguments, which local_map cannot say"
            )
        ((count, absent),) = kinds
        results = ["Replicate()"] * count
        for place in absent:
            results.insert(place, "None")
        whole = ", ".join(f"*{name}" if name in self.lists else name for name in self.tensors)
        inputs = f'[Replicate() for one in [{whole}] if hasattr(one, "shape")]'
        return f"({_listed(results)}, {inputs}, {inputs})"

    def rules(self, rules: Sequence[DerivedRule], in_blocks: bool = False) -> list[str]:
        """Return the lines that add ``rules``, which are for the same points, to the list.

        With ``in_blocks`` each is added with the tensor that has to be cut at multiples of a block, its dim, and the
        block.
        """
        rule = rules[0]
        tests = [test for test in rule.tests if not test.of_call]
        outer = [test.text for test in rule.tests if test.of_call]
        for name in self.tensors:
            if there := self._is_there(name):
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
            texts = [test.text for test in tests]
            if rule.cut is not None and not in_blocks:
                texts.append(self._begins_at_multiples(rule, rule.cut))
            if texts:
                lines.append(f"{indent}if {' and '.join(texts)}:")
                indent += "    "
        return [
            *lines,
            *(f"{indent}rules.append({self._in_blocks(one) if in_blocks else self._row(one)})" for one in rules),
        ]

    def _in_blocks(self, rule: DerivedRule) -> str:
        """Return a rule with the number of the tensor that is cut at multiples of a block, its dim, and the block."""
        assert rule.cut is not None
        dim = rule.inputs[rule.cut.slot]
        assert isinstance(dim, Dim)
        before = [f"len({name})" if name in self.lists else "1" for name in rule.slots[: rule.cut.slot]]
        place = " + ".join(before) if any(name in self.lists for name in rule.slots) else str(len(before))
        return f"({self._row(rule)}, {place or 0}, {dim.text}, {rule.cut.text})"

    @property
    def head_of_blocks(self) -> list[str]:
        said = "Return the rules for shards that begin at multiples of a block, with the tensor, the dim and the block."
        return ["", "", f"def {self.name}_in_blocks({self._parameters()}):", f'    """{said}"""']

    @property
    def filter(self) -> list[str]:
        """The filter of products, if there is one."""
        if not self.filters:
            return []
        return f'''

def {self.name}_filter(mesh, op_schema, inputs, outputs):
    """Return whether the shards begin at multiples of the blocks of the rules that ask for that."""
    rest = iter(inputs)
    given = (op_schema.args_schema, op_schema.kwargs_schema)
    args, kwargs = tree_map(lambda one: next(rest).tensor_meta if isinstance(one, OpStrategy) else one, given)
    anywhere = [row[-len(inputs) :] for row in {self.name}_rules(*args, **kwargs)]
    for n in range(mesh.ndim):
        placed = [spec.placements[n] for spec in inputs]
        if placed in anywhere or all(placement.is_replicate() for placement in placed):
            continue
        for row, number, dim, block in {self.name}_in_blocks(*args, **kwargs):
            if row[-len(inputs) :] == placed:
                spec = inputs[number]
                parts = math.prod(mesh.size(m) for m in range(mesh.ndim) if spec.placements[m].is_shard(dim))
                if spec.shape[dim] % (parts * block):
                    return False
    return True'''.split("\n")

    def _begins_at_multiples(self, rule: DerivedRule, cut: Cut) -> str:
        """Return the condition that shards begin at multiples of a block, and that each rank has elements."""
        name, dim = rule.slots[cut.slot], rule.inputs[cut.slot]
        assert isinstance(dim, Dim)
        one = f"{name}[0]" if name in self.lists else name
        if cut.in_ones:
            return f"{_HAS_ELEMENTS}({one}, {dim.text})"
        return f"{_BEGIN_AT_MULTIPLES}({one}, {dim.text}, {cut.text})"

    def _row(self, rule: DerivedRule) -> str:
        placed = dict(zip(rule.slots, rule.inputs, strict=True))
        count = len(rule.outputs) - len(rule.gradients)
        outputs = [_part(part) for part in rule.outputs[:count]]
        for place in rule.absent:
            outputs.insert(place, "None")
        if self.target is Target.LOCAL_MAP:
            gradients = {**placed, **dict(zip(rule.gradients, rule.outputs[count:], strict=True))}
            parts = [_listed(outputs), self._of_tensors(placed), self._of_tensors(gradients)]
            return f"({', '.join(parts)})"
        outputs = outputs[: self._returned(rule)]
        if self.target is Target.REGISTER_SHARDING:
            inputs = [_part(placed[a.name]) if a.name in placed else "None" for a in self.schema]
            return f"([{', '.join(outputs)}], [{', '.join(inputs)}])"
        return f"[{', '.join([*outputs, *self._inputs(placed)])}]"

    def _inputs(self, placed: Mapping[str, Part]) -> list[str]:
        return [
            f"*[{_part(placed[name])}] * len({name})" if name in self.lists else _part(placed[name])
            for name in self.tensors if name in placed
        ]  # fmt: skip

    def _of_tensors(self, placed: Mapping[str, Part]) -> str:
        return _listed(self._inputs(placed))

    def _returned(self, rule: DerivedRule) -> int:
        """Return how many results come back; what is only written to has no placement in a strategy."""
        returns = self.op._schema.returns
        lists = any("List" in str(one.type) for one in returns)
        return len(rule.outputs) + len(rule.absent) if lists else len(returns)

    @property
    def imports(self) -> list[str]:
        """The imports of the filter, and of the module of a function that is no op."""
        if self.filters:
            return [
                "from torch.distributed.tensor._op_schema import OpStrategy",
                "from torch.utils._pytree import tree_map",
            ]
        return [] if self.path.startswith("torch.ops.") else [f"import {self.path.rpartition('.')[0]}"]

    @property
    def _sharded(self) -> list[str]:
        """The function that runs the op on local tensors."""
        given = ", ".join(_given(a.name, a.kwarg_only) for a in self.schema)
        tensors = ", ".join(f"*{name}" if name in self.lists else name for name in self.tensors)
        local = ", ".join(_given_as(a.name, self._local(a.name), a.kwarg_only) for a in self.schema)
        return f'''

def {self.name}_sharded({self._parameters()}):
    """Run {self.path} on the local tensors of DTensors, under the rule for their placements on each mesh dim.

    Raises NotImplementedError where there is no rule, or shards are uneven: redistribute the tensors first.
    """
    tensors = [one for one in [{tensors}] if hasattr(one, "shape")]
    if not any(isinstance(one, DTensor) for one in tensors):
        return {self.path}({given})
    if not all(isinstance(one, DTensor) for one in tensors):
        raise NotImplementedError("{self.name}_sharded: some tensors are DTensors and others are not")
    mesh = tensors[0].device_mesh
    for one in tensors:
        for dim in range(one.ndim):
            parts = math.prod(mesh.size(n) for n, placement in enumerate(one.placements) if placement.is_shard(dim))
            if one.shape[dim] % parts:
                raise NotImplementedError("{self.name}_sharded: local_map cannot place uneven shards")
    rules = {self.name}_rules({given})
    chosen = []
    for n in range(mesh.ndim):
        placed = [one.placements[n] for one in tensors]
        rule = next((rule for rule in rules if rule[1] == placed), None)
        if rule is None:
            raise NotImplementedError(f"{self.name}_sharded: there is no rule for {{placed}} on mesh dim {{n}}")
        chosen.append(rule)
    outputs, inputs, gradients = (tuple(zip(*part, strict=True)) for part in zip(*chosen, strict=True))

    def on_locals(*local_tensors):
        rest = iter(local_tensors)
        return {self.path}({local})

    return local_map(on_locals, outputs, inputs, gradients, mesh)(*tensors)'''.split("\n")

    def _local(self, name: str) -> str:
        """Return what the op gets for a parameter in the local call."""
        if name in self.lists:
            return f"[next(rest) for _ in {name}]"
        if name not in self.tensors:
            return name
        there = self._is_there(name)
        return f"next(rest) if {there} else {name}" if there else "next(rest)"

    @property
    def tail(self) -> list[str]:
        if self.target is Target.LOCAL_MAP:
            return self._sharded
        path = self.path
        if self.target is Target.REGISTER_SHARDING:
            whole = ", ".join("Replicate()" if a.name in self.tensors else "None" for a in self.schema)
            outputs = ", ".join("Replicate()" for _ in self.op._schema.returns)
            names = ", ".join(_given(a.name, a.kwarg_only) for a in self.schema)
            absent = [name for name in self.tensors if name in self.optional]
            if absent:
                whole = ", ".join(
                    f"None if {a.name} is None else Replicate()" if a.name in absent
                    else "Replicate()" if a.name in self.tensors else "None"
                    for a in self.schema
                )  # fmt: skip
            return [
                "", "", f"@register_sharding({path})", f"def {self.name}_strategy({self._parameters()}):",
                f"    return [([{outputs}], [{whole}]), *{self.name}_rules({names})]",
            ]  # fmt: skip
        return [
            "", "", "@register_single_dim_strategy(", f"    {path}, schema_info={self._schema_info()},",
            f"    allow_uneven_sharding={self.uneven},",
            *([f"    full_mesh_strategy_filter={self.name}_filter,"] if self.filters else []), ")",
            f"def {self.name}_strategy(op, args, kwargs):",
            f"    return {self.name}_rules(*args, **kwargs)"
            + (f" + [row for row, *_ in {self.name}_in_blocks(*args, **kwargs)]" if self.filters else ""),
        ]  # fmt: skip

    def _schema_info(self) -> str:
        static = [n for n, a in enumerate(self.schema) if a.name not in self.tensors and not a.kwarg_only]
        parts = [str(static[0])] if static else []
        keys = [a.name for a in self.schema if a.kwarg_only and a.name not in self.tensors]
        parts += [f"static_kwargkey={json.dumps(keys)}"] if keys else []
        parts += ["needs_pytree=True"] if self.lists else []
        return f"RuntimeSchemaInfo({', '.join(parts)})"

    def _parameters(self) -> str:
        texts, keyword = [], False
        for argument in self.schema:
            if argument.kwarg_only and not keyword:
                keyword = True
                texts.append("*")
            default = argument.default_value if argument.has_default_value() else None
            optional = argument.has_default_value()
            texts.append(argument.name + (f"={_literal(default)}" if optional else ""))
        return ", ".join(texts)


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


def _given(name: str, keyword: bool) -> str:
    return _given_as(name, name, keyword)


def _given_as(name: str, value: str, keyword: bool) -> str:
    return f"{name}={value}" if keyword else value


def _listed(parts: Iterable[str]) -> str:
    return f"[{', '.join(parts)}]"


def strategy_name(op: OpOverload) -> str:
    """Return what the functions of a derived strategy begin with."""
    return re.sub(r"\W", "_", callable_of(str(op)) or str(op).removesuffix(".default"))


def _literal(value: object) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | list)
    return repr(value) if plain else "None"


def _part(part: Part) -> str:
    if isinstance(part, Dim):
        return f"Shard({part.text})"
    return _placement(part)


def _placement(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduce_op == "sum" else f'Partial("{placement.reduce_op}")'
    return "Replicate()"
