"""Which basic blocks of a rule a call reaches."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType

import pytest

from verifier.torch_internals.rule_code.reach import Block, blocks_of, reached_blocks


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


BLOCKS = blocks_of([*codes(rule.__code__)])
FIRST = rule.__code__.co_firstlineno


def lines_left(*calls: tuple[int, bool, list[int]]) -> list[int]:
    """Return the lines with a block that no call reaches, counted from that of ``def``."""
    reached: set[Block] = set()
    with reached_blocks(BLOCKS, reached):
        for call in calls:
            rule(*call)
    return sorted({block.line - FIRST for block in BLOCKS - reached})


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


def test_other_code_is_not_noted_and_tracing_ends() -> None:
    reached: set[Block] = set()
    with reached_blocks(frozenset(), reached):
        rule(2, True, [0])
    assert not reached
    with pytest.raises(NotImplementedError), reached_blocks(BLOCKS, reached):
        rule(10, True, [0])
    before = set(reached)
    rule(2, True, [0])
    assert reached == before
