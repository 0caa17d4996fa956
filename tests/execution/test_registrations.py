"""Rules that processes have registered, as text that is the same in each of them if and only if the rules are."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.calls.arguments import make_case
from verifier.core.ops import argument_names
from verifier.execution.registrations import (
    Registered,
    as_option,
    changes,
    lacking,
    referring_modules,
    registered_rules,
)
from verifier.torch_internals.registries import install_handler, replaced_handler, replaced_strategy

NEG = torch.ops.aten.neg.default
X = torch.ones(2)


def registered(strategy: Callable[..., Any]) -> Registered:
    with replaced_strategy(NEG, strategy):
        return registered_rules()[str(NEG)]


def bound_to(*rules: object) -> Callable[..., Any]:
    return lambda op, args, kwargs: [list(rules)]


def plain(op: object, args: object, kwargs: object) -> list[list[Any]]:
    return [[Partial(), Partial()]]


class Bound:
    def __init__(self, rule: object) -> None:
        self.rule = rule
        self.log = logging.getLogger(__name__)

    def __call__(self, op: object, args: object, kwargs: object) -> list[list[Any]]:
        return [[self.rule, self.rule]]

    @functools.cached_property
    def worked_out(self) -> object:
        return object()


def test_what_is_bound_to_other_values_is_another_rule() -> None:
    makers: list[Callable[[], Callable[..., Any]]] = [
        lambda: bound_to(Shard(0), Shard(0)),
        lambda: bound_to(Shard(0), Shard(1)),
        lambda: bound_to(Replicate(), plain),
        lambda: functools.partial(plain, kwargs={"scale": 2}),
        lambda: functools.partial(plain, kwargs={"scale": 3}),
        lambda: Bound(Shard(0)),
        lambda: Bound(Shard(1)),
        lambda: Bound(Shard(1)).__call__,
        lambda: plain,
        lambda: lambda op, args, kwargs: [[Partial(), Shard(0)]],
        lambda: lambda op, args, kwargs: [[Partial(), Shard(1)]],
    ]
    texts = [registered(make()).text for make in makers]
    assert len(set(texts)) == len(makers)
    assert texts == [registered(make()).text for make in makers]  # of other objects


def test_what_a_rule_has_worked_out_makes_no_difference() -> None:
    rule = Bound(Shard(0))
    before = registered(rule)
    assert rule.worked_out
    assert registered(rule) == before
    (source, *_) = before.sources
    assert (source.module, source.file, source.name) == (__name__, __file__, "Bound")


def test_rules_are_read_anew_only_where_something_was_registered() -> None:
    before = registered_rules()
    assert registered_rules() is before
    with replaced_handler(NEG, plain):
        after = registered_rules()
        assert changes(before, after) == {str(NEG): after[str(NEG)].text}
        assert [source.name for source in after[str(NEG)].sources] == ["plain"]
        install_handler(NEG, bound_to(1))
        assert registered_rules()[str(NEG)] != after[str(NEG)]
    assert registered_rules() == before


def test_another_process_lacks_what_it_has_otherwise() -> None:
    torchs = {op: rule.text for op, rule in registered_rules().items()}
    ours = registered_rules()
    assert lacking(ours, torchs, {}) == []
    (taken,) = lacking(ours, torchs, {str(NEG): "of the user"})
    assert (taken.op, taken.theirs, taken.untouched) == (str(NEG), "of the user", False)
    assert lacking(ours, torchs, {str(NEG): "of the user"}, allowed={str(NEG)}) == []
    with replaced_strategy(NEG, plain):
        (lacks,) = lacking(registered_rules(), torchs, {}, allowed={str(NEG)})
        assert lacks.untouched
        assert __name__ in [source.module for source in referring_modules([lacks])]
        with_theirs = {str(NEG): registered_rules()[str(NEG)].text}
        assert lacking(registered_rules(), torchs, with_theirs) == []
    lazy = {"prims.fma.default": "rule of torch's compiler"}
    assert lacking(ours, {**torchs, **lazy}, {}) == []


def test_a_module_that_is_found_elsewhere_goes_by_its_file() -> None:
    here = __file__.rpartition("/")[0]
    assert as_option("test_registrations", __file__, [here]) == "test_registrations"
    assert as_option("test_registrations", __file__, ["/"]) == __file__
    assert as_option("__main__", __file__, [here]) == __file__
    assert as_option("json.decoder", "", ["/"]) == ""


# --------------------------------------------------------------------------------------------------- ops by their names
@torch.library.custom_op("test_registrations::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
    return x * factor


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (scaled, (X,), {}, ("test_registrations.scaled.default", ["x"])),
        (torch.ops.test_registrations.scaled, (), {"x": X}, ("test_registrations.scaled.default", ["x"])),
        (torch.ops.test_registrations.scaled, (X, 3), {}, ("test_registrations.scaled.default", ["x"])),
        (f"{__name__}.scaled", (X,), {}, ("test_registrations.scaled.default", ["x"])),
        (torch.ops.aten.add, (X, X), {}, ("aten.add.Tensor", ["self", "other"])),
        (torch.ops.aten.add, (X, 1), {}, ("aten.add.Tensor", ["self"])),
        ("aten.sum", (X,), {"dim": [0]}, ("aten.sum.dim_IntList", ["self"])),
    ],
)
def test_an_operator_by_its_name_is_the_overload_that_is_run(
    op: Any, args: tuple[object, ...], kwargs: dict[str, object], expected: tuple[str, list[str]]
) -> None:
    case = make_case(op, args, kwargs, exact=True)
    assert (case.op, argument_names(case)) == expected
    assert case.call == f"torch.ops.{case.op}"


def test_what_fits_no_overload_is_left_for_the_call_to_refuse() -> None:
    assert make_case(torch.ops.aten.add, (X, "one"), {}, exact=True).call == "torch.ops.aten.add"
