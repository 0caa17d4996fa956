"""Finds the OpInfo that an aten overload belongs to, by names alone, which takes no time."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from strategies.opinfo.calls.op_facts import SAME_AS
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.opinfo import opinfo_entries

__all__ = ["base_of", "home_rows", "owners", "row_names", "stem"]


def base_of(overload: str) -> str:
    """Return the base name of an overload.

    >>> base_of("aten.add_.Tensor"), base_of("aten._foreach_add.List")
    ('add_', '_foreach_add')
    """
    return overload.split(".")[1]


def stem(base: str) -> str:
    """Return a base name without outer underscores, which in-place and helper overloads have.

    >>> stem("_softmax"), stem("add_")
    ('softmax', 'add')
    """
    return base.strip("_")


@cache
def row_names() -> tuple[str, ...]:
    """Return the names of all OpInfos, sorted."""
    return tuple(sorted({entry.name for entry in opinfo_entries()}))


@cache
def _claims() -> dict[str, tuple[str, ...]]:
    """Return the OpInfos that each stem belongs to: those whose names match it best."""
    claims: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for entry in opinfo_entries():
        name = entry.name
        spelled = name.removeprefix("torch.ops.aten.").removesuffix(".default")
        last = spelled.rpartition(".")[2]
        kinds = [(entry.aten_name, spelled), (spelled.replace(".", "_"),), (last,)]
        # masked.sum is not sum, and sparse.mm is not mm, even if no other OpInfo has that name
        for kind, texts in enumerate(kinds):
            for text in texts:
                claims[stem(text)][kind].add(name)
        if entry.aten_backward_name:
            claims[stem(entry.aten_backward_name)][len(kinds)].add(name)
    return {key: tuple(sorted(kinds[min(kinds)])) for key, kinds in claims.items() if key}


def owners(overload: OpOverload | str) -> tuple[str, ...]:
    """Return the OpInfos with the overload's own name; empty for a helper op without an OpInfo."""
    key, claims = stem(base_of(str(overload))), _claims()
    while key not in claims and key in SAME_AS:
        key = stem(SAME_AS[key])
    return claims.get(key, ())


@cache
def home_rows(overload: OpOverload | str) -> tuple[str, ...]:
    """Return the OpInfos under which the overload is tested.

    These are its owners, or else the OpInfos with the longest name that is a part of the overload's name:
    ``native_layer_norm`` is a part of ``native_layer_norm_backward``, ``conv2d`` is not of ``convolution_backward``.
    """
    found = owners(overload)
    if found:
        return found
    words = stem(base_of(str(overload))).split("_")
    claims = _claims()
    for length in range(len(words) - 1, 0, -1):
        keys = ("_".join(words[start : start + length]) for start in range(len(words) - length + 1))
        rows = [row for key in keys for row in claims.get(key, ())]
        if rows:
            return tuple(sorted(set(rows)))
    return ()
