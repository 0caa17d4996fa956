"""Which basic blocks of a rule a call reaches."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType

import pytest

from verifier.torch_internals.rule_code.reach import Watch


def rule(ndim: int, keep: bool, dims: list[int]) -> list[int]:
    if keep and ndim == 3 and dims[0] < 0:
        return [-1]
    if ndim > 9:
        raise NotImplementedError
    try:
        kept = [dim for dim in range(ndim) if dim not in dims or (keep and dim == 1)]
    except KeyError:
        kept = [0]
    return kept


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes(one)


CODES = [*codes(rule.__code__)]
FIRST = rule.__code__.co_firstlineno


def lines_left(*calls: tuple[int, bool, list[int]]) -> list[int]:
    """Return the lines with a block that no call reaches, counted from that of ``def``."""
    watch = Watch(CODES)
    with watch.on():
        for call in calls:
            rule(*call)
    return sorted({block.lines[0] - FIRST for block in watch.left})


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        ([(2, False, [0])], [1, 2, 6]),  # neither keep nor what is asked after it
        ([(2, True, [0])], [1, 2]),
        ([(3, True, [0])], [2]),
        ([(2, True, [0]), (3, True, [-1])], []),  # refusals and handlers of exceptions are not missed
    ],
)
def test_conditions_of_one_line_are_told_apart(calls: list[tuple[int, bool, list[int]]], left: list[int]) -> None:
    assert lines_left(*calls) == left


def test_other_code_is_not_noted_and_watching_ends() -> None:
    nothing, watch = Watch([]), Watch(CODES)
    with nothing.on():
        rule(2, True, [0])
    assert not nothing.reached
    with pytest.raises(NotImplementedError), watch.on():
        rule(10, True, [0])
    before = set(watch.reached)
    assert before
    rule(2, True, [0])
    assert watch.reached == before
