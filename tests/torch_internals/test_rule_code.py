"""Code of rules that may go another way on ranks with another hash seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.torch_internals.amending.rule_code import may_follow_hashes
from verifier.torch_internals.registries import replaced_strategy

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
