"""What stands in the code of rules: its numbers, and what may go another way on ranks with another hash seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

from verifier.torch_internals.registries import replaced_strategy
from verifier.torch_internals.rule_code.constants import constants_of_rule, may_follow_hashes

OP = torch.ops.aten.exp.default
KINDS = ("max", "min")
NAMES = {"max", "min"}


def dims(x: Any) -> range:
    return range(len(x.shape))


def listed(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [*([Shard(dim)] * 2 for dim in dims(args[0])), *([Partial(kind)] * 2 for kind in KINDS)]


def by_a_set(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [[Partial(kind)] * 2 for kind in {"max", str(op)}]


def by_a_constant(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [[Partial(kind)] * 2 for kind in {"max", "min"}]


def by_a_set_of_the_module(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [[Partial(kind)] * 2 for kind in NAMES]


def by_a_name(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [[Partial(kind)] * 2 for kind in frozenset(KINDS)]


def by_another_function(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return by_a_set(op, args, kwargs)


class Rules:
    def __call__(self, op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        return [[Replicate()] * 2]


class Limits:
    rows = 24


SIZES = {"columns": 37}


class Limited:
    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        return [[Replicate()] * 2] if args[0].shape[0] > self.most else []

    def bound(self, op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        return self(op, args, kwargs) if args[0].shape[1] > self.most else []


def of_a_class(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [[Replicate()] * 2] if args[0].shape[0] > Limits.rows else []


def of_a_table(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [[Replicate()] * 2] if args[0].shape[0] > SIZES["columns"] else []


def partially(kinds: Any, op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    return [[Partial(kind)] * 2 for kind in kinds]


@pytest.mark.parametrize(
    ("rule", "may"),
    [
        (listed, False),
        (functools.partial(partially, KINDS), False),
        (by_a_set, True),
        (by_a_constant, True),
        (by_a_set_of_the_module, True),
        (by_a_name, True),
        (by_another_function, True),
        (Rules(), True),
        (functools.partial(partially, NAMES), True),
    ],
)
def test_code_that_goes_through_a_set_may_follow_hashes(rule: Callable[..., Any], may: bool) -> None:
    with replaced_strategy(OP, rule):
        assert may_follow_hashes(OP) is may


@pytest.mark.parametrize(
    ("rule", "number"),
    [(of_a_class, 24), (of_a_table, 37), (Limited(41), 41), (Limited(43).bound, 43)],
)
def test_numbers_that_a_rule_takes_from_a_class_a_table_or_an_object_stand_in_its_code(
    rule: Callable[..., object], number: int
) -> None:
    with replaced_strategy(OP):
        register_single_dim_strategy(OP)(rule)
        assert number in constants_of_rule(OP)
