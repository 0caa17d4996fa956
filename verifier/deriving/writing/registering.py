"""Registers the function of the rules as a strategy, in either of DTensor's ways."""

from __future__ import annotations

import json

from verifier.deriving.writing.subject import Subject
from verifier.torch_internals.registries import (
    IMPORTS_OF_OP_STRATEGY,
    IMPORTS_OF_SINGLE_DIM,
    places_lists_of_results,
    results_per_element,
)

__all__ = ["filter_of_products", "imports_of_single_dim", "registered_by_sharding", "registered_for_single_dim"]


_FOR_LISTS = "a strategy for one mesh dim takes no list of results in this torch"


def registered_for_single_dim(subject: Subject, uneven: bool, filtered: bool) -> list[str]:
    """Return the lines that register a strategy for one mesh dim, with a filter of products if ``filtered``."""
    if _is_for_all_dims(subject):
        return _registered_for_all_dims(subject, uneven)
    if subject.per_element:
        return _registered_per_element(subject, uneven)
    return [
        "", "", "@register_single_dim_strategy(", f"    {subject.path}, schema_info={_schema_info(subject)},",
        f"    allow_uneven_sharding={uneven},",
        *([f"    full_mesh_strategy_filter={subject.name}_filter,"] if filtered else []), ")",
        f"def {subject.name}_strategy(op, args, kwargs):",
        f"    return {subject.name}_rules(*args, **kwargs)"
        + (f" + [row for row, *_ in {subject.name}_in_blocks(*args, **kwargs)]" if filtered else ""),
    ]  # fmt: skip


def _is_for_all_dims(subject: Subject) -> bool:
    return subject.returns_list and not subject.per_element and not places_lists_of_results()


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


def _registered_for_all_dims(subject: Subject, uneven: bool) -> list[str]:
    """Return the lines that register a strategy for all mesh dims: one for a single dim counts a list as one result."""
    return f'''

@register_op_strategy({subject.path}, schema_info={_schema_info(subject)})
def {subject.name}_strategy(op_schema):
    """Return the products of the rules; {_FOR_LISTS}."""
    args, kwargs = op_schema.args_meta, op_schema.kwargs_meta
    results = _number_of_results({subject.path}, *args, **kwargs)
    replicated = [Replicate()] * (results + len(op_schema.args_strategy) + len(op_schema.kwargs_strategy))
    found = expand_to_full_mesh_op_strategy(
        op_schema.get_mesh_from_args(), op_schema, [replicated, *{subject.name}_rules(*args, **kwargs)],
        input_index=results, allow_uneven_sharding={uneven},
    )
    for one in found.strategies if results == 1 else ():
        one.output_specs = (one.output_specs,)
    return found'''.split("\n")


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
    lines = IMPORTS_OF_SINGLE_DIM.splitlines()
    if _is_for_all_dims(subject):
        lines = IMPORTS_OF_OP_STRATEGY.splitlines()
    if filtered:
        lines += [
            "from torch.distributed.tensor._op_schema import OpStrategy",
            "from torch.utils._pytree import tree_map",
        ]
    return lines


def filter_of_products(subject: Subject) -> list[str]:
    """Return the lines of a filter that keeps shards which begin at multiples of a block."""
    return f'''

def {subject.name}_filter(mesh, op_schema, inputs, outputs):
    """Return whether the shards begin at multiples of the blocks of the rules that ask for that."""
    rest = iter(inputs)
    given = (op_schema.args_schema, op_schema.kwargs_schema)
    args, kwargs = tree_map(lambda one: next(rest).tensor_meta if isinstance(one, OpStrategy) else one, given)
    anywhere = [row[-len(inputs) :] for row in {subject.name}_rules(*args, **kwargs)]
    for n in range(mesh.ndim):
        placed = [spec.placements[n] for spec in inputs]
        if placed in anywhere or all(placement.is_replicate() for placement in placed):
            continue
        for row, number, dim, block in {subject.name}_in_blocks(*args, **kwargs):
            if row[-len(inputs) :] == placed:
                spec = inputs[number]
                parts = math.prod(mesh.size(m) for m in range(mesh.ndim) if spec.placements[m].is_shard(dim))
                if spec.shape[dim] % (parts * block):
                    return False
    return True'''.split("\n")


def _schema_info(subject: Subject) -> str:
    static = [n for n, a in enumerate(subject.schema) if a.name not in subject.tensors and not a.kwarg_only]
    parts = [str(static[0])] if static else []
    keys = [a.name for a in subject.schema if a.kwarg_only and a.name not in subject.tensors]
    parts += [f"static_kwargkey={json.dumps(keys)}"] if keys else []
    parts += ["needs_pytree=True"] if subject.lists else []
    return f"RuntimeSchemaInfo({', '.join(parts)})"
