"""Registers the function of the rules as a strategy, in either of DTensor's ways."""

from __future__ import annotations

import json
from collections.abc import Iterable

from verifier.deriving.writing.body import CUT_AT_MULTIPLES
from verifier.deriving.writing.subject import Subject
from verifier.torch_internals.registries import (
    IMPORTS_OF_OP_STRATEGY,
    IMPORTS_OF_SINGLE_DIM,
    places_lists_of_results,
    registries_of_rules,
    results_per_element,
    takes_filters,
)

__all__ = ["filter_of_products", "imports_of_single_dim", "registered_by_sharding", "registered_for_single_dim"]


_STAYS = """
    stay = [n for n, written in enumerate({name}_writes(*args, **kwargs)) if written]
    here = [one.strategies[0].output_spec.placements for one in tensors]
    found.strategies = [
        one for one in found.strategies if all(one.input_specs[n].placements == here[n] for n in stay)
    ]"""
_REFUSED = """
    if not found.strategies:
        raise NotImplementedError(f"{op_schema.op} is not supported where what it writes to is redistributed")"""


def registered_for_single_dim(subject: Subject, uneven: bool, plain: bool, filtered: bool) -> list[str]:
    """Return the lines that register a strategy for one mesh dim.

    ``plain`` tells whether there are rules that hold for any shards, ``filtered`` whether there are others, which ask
    for a filter of products.

    Where the torch that runs has no such filter, or takes no list of results there, it is one for all mesh dims.
    """
    if _why_for_all_dims(subject, filtered):
        return _registered_for_all_dims(subject, uneven, plain, filtered)
    if subject.per_element:
        return _registered_per_element(subject, uneven)
    return [
        "", "", "@register_single_dim_strategy(", f"    {subject.path}, schema_info={_schema_info(subject)},",
        f"    allow_uneven_sharding={uneven},",
        *([f"    full_mesh_strategy_filter={subject.name}_filter,"] if filtered else []), ")",
        f"def {subject.name}_strategy(op, args, kwargs):",
        f"    return {' + '.join(_lists_of_rules(subject, plain, filtered))}",
    ]  # fmt: skip


def _lists_of_rules(subject: Subject, plain: bool, filtered: bool) -> list[str]:
    """Return the expressions for the rules that hold for any shards, and for those that the filter judges."""
    anywhere = f"{subject.name}_rules(*args, **kwargs)"
    in_blocks = f"[row for row, *_ in {subject.name}_in_blocks(*args, **kwargs)]"
    return [*([anywhere] if plain else []), *([in_blocks] if filtered else [])]


def _why_for_all_dims(subject: Subject, filtered: bool) -> str:
    """Return why a strategy for one mesh dim would not do; empty if it would."""
    if subject.written and not subject.per_element:
        return "One for a mesh dim does not see where DTensor would write to a copy of an argument."
    if subject.returns_list and not subject.per_element and not places_lists_of_results():
        return "A strategy for one mesh dim takes no list of results before torch 2.14."
    if subject.returns_numbers:
        return "A strategy for one mesh dim places tensors alone, and the op also returns what is none."
    if filtered and not takes_filters():
        return "A strategy for one mesh dim has no filter of its products before torch 2.14."
    if filtered and not subject.op._schema.returns:
        return "A strategy for one mesh dim has no filter of its products for an op that returns nothing."
    return ""


def _registered_per_element(subject: Subject, uneven: bool) -> list[str]:
    """Return the lines that register a strategy which DTensor asks of one tensor of each list at a time.

    The op for one tensor may return what an op on lists writes to.
    """
    lists = [n for n, a in enumerate(subject.schema) if a.name in subject.lists]
    rules, said = f"{subject.name}_rules(*args, **kwargs)", ""
    if results_per_element(subject.op) > len(subject.op._schema.returns):
        written = next(a.name for a in subject.schema if a.alias_info is not None and a.name in subject.tensors)
        at = subject.tensors.index(written)
        rules, said = f"[[row[{at}], *row] for row in {rules}]", ", which is the result where it is written to"
    return f'''

@register_single_dim_strategy(
    {subject.path}, schema_info={_schema_info(subject)},
    allow_uneven_sharding={uneven},
)
def {subject.name}_strategy(op, args, kwargs):
    """Return the rules for one tensor of each list, as DTensor asks for them{said}."""
    args = [[one] if n in {lists} else one for n, one in enumerate(args)]
    return {rules}'''.split("\n")


def _registered_for_all_dims(subject: Subject, uneven: bool, plain: bool, filtered: bool) -> list[str]:
    """Return the lines that register a strategy for all mesh dims."""
    returns, written = subject.returns_list, subject.written
    counted = f"_number_of_results({subject.path}, *args, **kwargs)"
    results = counted if returns else str(len(subject.op._schema.returns))
    lists = {"anywhere": "rules"} if plain else {}
    lists |= {"in_blocks": "in_blocks"} if filtered else {}
    listing = [f"    {name} = {subject.name}_{of}(*args, **kwargs)\n" for name, of in lists.items()]
    every = ["*anywhere"] * plain + ["*(row for row, *_ in in_blocks)"] * filtered
    asking, keeping = _kept(subject, lists) if filtered else ("", "")
    replicated = "[Replicate()] * count"
    if any(call.absent for call in subject.calls):
        replicated = f"[one and Replicate() for one in rules[0]] if rules else {replicated}  # a result may be None"
    as_list = """
    for one in found.strategies:  # the only one of a list comes without a tuple
        one.output_specs = tuple(tree_leaves(one.output_specs))[:results]"""
    writes = any(argument.alias_info is not None for argument in subject.schema)
    guard = (_STAYS.format(name=subject.name) if written else "") + (_REFUSED if writes else "")
    return f'''{_marks_of_written(subject) if written else ""}
{_asked_before(subject)}
@register_op_strategy({subject.path}, schema_info={_schema_info(subject)})
def {subject.name}_strategy(op_schema):
    """Return the products of the rules{" that are kept" if filtered else ""}.

    {_why_for_all_dims(subject, filtered)}
    """
    args, kwargs = op_schema.args_meta, op_schema.kwargs_meta
    results = {results}
{"".join(listing)}    rules = [{", ".join(every)}]
    tensors = [*op_schema.args_strategy, *op_schema.kwargs_strategy]
    count = results + len(tensors)
    replicated = {replicated}
    given = [*zip(*(one.strategies[0].output_spec.placements for one in tensors), strict=True)]
    as_given = [row for row in rules if tuple(row[results:]) in given]
    for some in (as_given, rules) if as_given else (rules,):  # of many products, those that fit are tried first
        found = expand_to_full_mesh_op_strategy(
            op_schema.get_mesh_from_args(), op_schema, [replicated, *some], input_index=results,
            inplace_op=op_schema.is_inplace_op(), allow_uneven_sharding={uneven},{asking}
        ){keeping}
        inputs = [one.input_specs for one in found.strategies]
        if any([*zip(*(spec.placements for spec in specs), strict=True)] == given for specs in inputs):
            break{guard}{as_list if returns else ""}
    return found'''.split("\n")


def _kept(subject: Subject, lists: Iterable[str]) -> tuple[str, str]:
    """Return the argument that has torch keep products, and the lines that do so where torch does not ask.

    It asks nothing about an op that returns nothing.
    """
    keeps, known = f"{subject.name}_keeps", ", ".join(lists)
    if subject.op._schema.returns:
        return f"\n            is_valid_strategy_cb=functools.partial({keeps}, {known}),", ""
    kept = f"one for one in found.strategies if {keeps}({known}, one.input_specs, None)"
    return "", f"\n        found.strategies = [\n            {kept}\n        ]"


def _marks_of_written(subject: Subject) -> str:
    """Return the function that tells which tensors of a call the op writes to."""
    written = {name: name in subject.written for name in subject.tensors}
    marks = ", ".join(
        f"*[{mark}] * len({name})" if name in subject.lists
        else f"*[{mark}] * ({there})" if (there := subject.is_there(name)) else str(mark)
        for name, mark in written.items()
    )  # fmt: skip
    return f'''

def {subject.name}_writes({subject.parameters()}):
    """Return for each tensor whether the op writes to it, and DTensor may redistribute it all the same."""
    return [{marks}]
'''


def _asked_before(subject: Subject) -> str:
    """Return the line that takes back torch's own strategy for one mesh dim, which DTensor asks before this one."""
    if subject.op not in registries_of_rules()[-1]:
        return ""
    return f"\nDTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.pop({subject.path}, None)\n"


def registered_by_sharding(subject: Subject) -> list[str]:
    """Return the lines that use ``register_sharding``, which lists what is replicated as well."""
    whole = ", ".join("Replicate()" if a.name in subject.tensors else "None" for a in subject.schema)
    outputs = ", ".join("Replicate()" for _ in subject.op._schema.returns)
    absent = [name for name in subject.tensors if name in subject.optional]
    if absent:
        whole = ", ".join(
            f"None if {a.name} is None else Replicate()" if a.name in absent
            else "Replicate()" if a.name in subject.tensors else "None"
            for a in subject.schema
        )  # fmt: skip
    return [
        "", "", f"@register_sharding({subject.path})", f"def {subject.name}_strategy({subject.parameters()}):",
        f"    return [([{outputs}], [{whole}]), *{subject.name}_rules({subject.given()})]",
    ]  # fmt: skip


def imports_of_single_dim(subject: Subject, filtered: bool) -> list[str]:
    """Return the lines that import what a strategy for one mesh dim is made of."""
    whole = bool(_why_for_all_dims(subject, filtered))
    lines = (IMPORTS_OF_OP_STRATEGY if whole else IMPORTS_OF_SINGLE_DIM).splitlines()
    if filtered and not whole:
        lines = [line.replace("import RuntimeSchemaInfo", "import OpStrategy, RuntimeSchemaInfo") for line in lines]
    return lines


def filter_of_products(subject: Subject, plain: bool) -> list[str]:
    """Return the lines of the function that keeps products of which the shards begin at multiples of a block.

    ``plain`` tells whether there are other rules, too. For a strategy for one mesh dim, which torch takes with a filter
    from 2.14 on, one is added.
    """
    given = "anywhere, in_blocks" if plain else "in_blocks"
    allowed = "placed in anywhere or " if plain else ""
    returned = "*(outputs if isinstance(outputs, tuple) else [outputs]), " * bool(subject.op._schema.returns)
    specs = f"[{returned}*inputs]"
    lines = f'''

def {subject.name}_keeps({given}, inputs, outputs):
    """Return whether shards begin at multiples of the blocks of the rules that ask for that."""
    specs = {specs}
    for n in range(inputs[0].mesh.ndim):
        placed = [None if spec is None else spec.placements[n] for spec in specs]
        if {allowed}all(placement is None or placement.is_replicate() for placement in placed):
            continue
        cuts = [(inputs[number], dim, block) for row, number, dim, block in in_blocks if row == placed]
        if cuts and not any({CUT_AT_MULTIPLES}(*cut) for cut in cuts):
            return False
    return True'''.split("\n")
    if _why_for_all_dims(subject, filtered=True):
        return lines
    lists = [f"{subject.name}_rules(*args, **kwargs)"] * plain + [f"{subject.name}_in_blocks(*args, **kwargs)"]
    return (
        lines
        + f'''

def {subject.name}_filter(mesh, op_schema, inputs, outputs):
    """Return whether DTensor may use a product of the rules."""
    rest = iter(inputs)
    given = (op_schema.args_schema, op_schema.kwargs_schema)
    args, kwargs = tree_map(lambda one: next(rest).tensor_meta if isinstance(one, OpStrategy) else one, given)
    return {subject.name}_keeps({", ".join(lists)}, inputs, outputs)'''.split("\n")
    )


def _schema_info(subject: Subject) -> str:
    static = [n for n, a in enumerate(subject.schema) if a.name not in subject.tensors and not a.kwarg_only]
    parts = [str(static[0])] if static else []
    keys = [a.name for a in subject.schema if a.kwarg_only and a.name not in subject.tensors]
    parts += [f"static_kwargkey={json.dumps(keys)}"] if keys else []
    parts += ["needs_pytree=True"] if subject.lists else []
    return f"RuntimeSchemaInfo({', '.join(parts)})"
