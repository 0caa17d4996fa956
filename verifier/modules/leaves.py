"""The leaves of what a model returns: tensors and other values, each with its path."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum

import torch

from verifier.torch_internals.names import pytree

__all__ = ["Plain", "leaves", "plain", "same_number", "shortened", "tensors"]


@dataclass(frozen=True)
class Plain:
    """A leaf that is no tensor, in a form that processes can compare.

    ``kind`` is ``number``, ``text``, ``None``, ``empty`` (a container with nothing in it) or ``object``. Objects have
    no value here and are not compared, because each process has its own.
    """

    kind: str
    value: complex | str | bytes | None = None
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and value of each leaf in tuples, lists, mappings, dataclasses and pytree nodes.

    Tuples and lists have the same paths, because ``torch.distributed.tensor.parallel`` turns one into the other.

    >>> list(leaves({"logits": 1, "rest": (2, [None])}))
    [("['logits']", 1), ("['rest'][0]", 2), ("['rest'][1][0]", None)]
    """
    inside: list[tuple[str, object]]
    if isinstance(value, torch.Tensor | str | bytes):
        yield path, value
        return
    if is_dataclass(value) and not isinstance(value, type):
        inside = [(f".{one.name}", getattr(value, one.name)) for one in fields(value)]
    elif isinstance(value, Mapping):
        inside = [(f"[{_key(key, number)}]", entry) for number, (key, entry) in enumerate(value.items())]
    elif isinstance(value, tuple | list):
        inside = [(f"[{number}]", entry) for number, entry in enumerate(value)]
    else:
        found = pytree.tree_leaves(value)
        if len(found) == 1 and found[0] is value:
            yield path, value
            return
        inside = [(f"<{number}>", entry) for number, entry in enumerate(found)]
    if not inside:
        yield path, _EMPTY
    for place, entry in inside:
        yield from leaves(entry, path + place)


_EMPTY = Plain("empty", None, "nothing in it")


def _key(key: object, number: int) -> str:
    """Return the text of a key, without a memory address."""
    known = isinstance(key, str | bytes | numbers.Number | Enum) or key is None
    return repr(key) if known else f"key {number}, a {type(key).__name__}"


def tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors among the :func:`leaves` of ``value``."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def plain(value: object) -> Plain:
    """Return a leaf that is no tensor as a :class:`Plain`.

    >>> plain(2) == plain(2.0), plain(None) == plain(0), plain(object()) == plain(print)
    (True, False, True)
    """
    if isinstance(value, Plain):
        return value
    if value is None:
        return Plain("None", None, "None")
    if isinstance(value, str | bytes):
        return Plain("text", value, shortened(repr(value), 80))
    if isinstance(value, Enum | torch.dtype):
        return Plain("text", str(value), str(value))
    if isinstance(value, numbers.Integral):
        return Plain("number", int(value), str(value))
    if isinstance(value, numbers.Real):
        return Plain("number", float(value), str(value))
    if isinstance(value, numbers.Complex):
        return Plain("number", complex(value), str(value))
    return Plain("object", None, f"an object of type {type(value).__name__}")


def same_number(got: complex, expected: complex, absolute: float) -> bool:
    """Return whether two numbers are equal, within ``absolute`` unless both are integers.

    >>> same_number(2, 3, 5.0), same_number(2.0, 3, 5.0), same_number(float("nan"), float("nan"), 0.0)
    (False, True, True)
    """
    if got == expected or (got != got and expected != expected):
        return True
    if isinstance(got, int) and isinstance(expected, int):
        return False
    distance = abs(got - expected)
    return math.isfinite(distance) and distance <= absolute


def shortened(text: str, most: int = 160) -> str:
    """Return ``text``, cut after ``most`` characters.

    >>> shortened("abcdef", 3)
    'abc...'
    """
    return text if len(text) <= most else f"{text[:most]}..."
