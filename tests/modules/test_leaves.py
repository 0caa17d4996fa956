"""What models return is taken apart the same way in every process, and nothing of a process is in it."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import pytest
import torch

from verifier.modules.leaves import leaves, plain, same_number, shortened, tensors

TENSOR = torch.ones(2)


@dataclass
class Answer:
    text: str
    values: object


class Colour(Enum):
    RED = 1


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("value", "places"),
    [
        (TENSOR, [""]),
        ((TENSOR, None), ["[0]", "[1]"]),
        ([TENSOR, None], ["[0]", "[1]"]),
        (Pair(TENSOR, None), ["[0]", "[1]"]),
        (OrderedDict(a=TENSOR), ["['a']"]),
        (UserDict(a=TENSOR), ["['a']"]),
        (MappingProxyType({1: TENSOR}), ["[1]"]),
        (Answer("t", [TENSOR]), [".text", ".values[0]"]),
        (Answer, [""]),
        (deque([TENSOR, 1]), ["<0>", "<1>"]),
        ({object(): TENSOR}, ["[key 0, a object]"]),
        ({Colour.RED: ()}, ["[<Colour.RED: 1>]"]),
        ("text", [""]),
    ],
)
def test_places(value: object, places: list[str]) -> None:
    assert [place for place, _ in leaves(value)] == places


def test_tensors_come_in_order() -> None:
    one, two, three = (torch.full((1,), float(number)) for number in range(3))
    found = tensors({"b": one, "a": (Answer("t", two), [three])})
    assert [tensor.item() for tensor in found] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        (True, 1, True),
        (torch.tensor(3).numpy()[()], 3, True),
        (0, None, False),
        ("1", 1, False),
        ("a", "b", False),
        (Colour.RED, Colour.RED, True),
        (torch.float32, torch.float64, False),
        (object(), {1}, True),
        (object(), None, False),
        (dict(leaves(()))[""], dict(leaves({}))[""], True),
        (dict(leaves(()))[""], None, False),
    ],
)
def test_what_is_equal(one: object, other: object, equal: bool) -> None:
    assert (plain(one) == plain(other)) is equal


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        (7, 6, False),
        (1.0 + 1e-9, 1.0, True),
        (1.0 + 1e-5, 1.0, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1.0, False),
        (1e-9j, 0, True),
    ],
)
def test_numbers_are_equal_within_rounding_unless_they_are_integers(
    got: complex, expected: complex, equal: bool
) -> None:
    assert same_number(got, expected, 1e-6) is equal


def test_texts_are_cut() -> None:
    assert shortened("abc", 3) == "abc"
    assert str(plain("x" * 100)) == "'" + "x" * 79 + "..."
