"""Which code of a rule a call reaches: basic blocks, so that the parts of a condition in one line are told apart."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

__all__ = ["Block", "blocks_of", "reached_blocks"]

_ENDS = frozenset(
    {"RETURN_VALUE", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
)
"""Instructions that do not go on to the next one."""


class Block(NamedTuple):
    """Instructions of ``code`` that run one after the other, from ``offset`` on, in ``line`` of its file.

    ``after`` has the offsets of the blocks that may come next.
    """

    code: CodeType
    offset: int
    line: int
    after: tuple[int, ...]


def blocks_of(codes: Sequence[CodeType]) -> frozenset[Block]:
    """Return the blocks that a call may reach in ``codes`` without an exception.

    A block that only raises is left out: what a rule refuses it does not claim.
    """
    return frozenset(block for code in dict.fromkeys(codes) for block in _blocks(code))


def _blocks(code: CodeType) -> Iterator[Block]:
    instructions = [*dis.get_instructions(code)]
    leaders = _leaders(instructions)
    bodies: dict[int, list[dis.Instruction]] = {}
    for instruction in instructions:
        if instruction.offset in leaders:
            start = instruction.offset
        bodies.setdefault(start, []).append(instruction)
    starts = sorted(bodies)
    after = dict(pairwise(starts))
    successors = {start: [*_successors(bodies[start][-1], after.get(start))] for start in starts}
    raising = _only_raising(bodies, successors)
    left, reachable = [starts[0]], set[int]()
    while left:
        start = left.pop()
        if start not in reachable:
            reachable.add(start)
            left += successors[start]
    for start in sorted(reachable - raising):
        line = next((one.positions.lineno for one in bodies[start] if one.positions and one.positions.lineno), None)
        yield Block(code, start, line or code.co_firstlineno, tuple(successors[start]))


def _leaders(instructions: Sequence[dis.Instruction]) -> set[int]:
    leaders = {instructions[0].offset}
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        if one.is_jump_target:
            leaders.add(one.offset)
        if following is not None and (jumps or one.opname in _ENDS):
            leaders.add(following.offset)
    return leaders


def _successors(last: dis.Instruction, following: int | None) -> Iterator[int]:
    if last.opcode in dis.hasjrel or last.opcode in dis.hasjabs:
        yield last.argval
    if last.opname not in _ENDS and following is not None:
        yield following


def _only_raising(bodies: dict[int, list[dis.Instruction]], successors: dict[int, list[int]]) -> set[int]:
    """Return the blocks from which every way ends in a raised exception."""
    raising = {start for start, body in bodies.items() if body[-1].opname in ("RAISE_VARARGS", "RERAISE")}
    while True:
        more = {s for s, nexts in successors.items() if s not in raising and nexts and raising.issuperset(nexts)}
        if not more:
            return raising
        raising |= more


@contextlib.contextmanager
def reached_blocks(blocks: frozenset[Block], into: set[Block]) -> Iterator[None]:
    """Add to ``into`` those of ``blocks`` that are reached inside the context, in this thread."""
    of_code: dict[CodeType, dict[int, Block]] = {}
    for block in blocks:
        of_code.setdefault(block.code, {})[block.offset] = block

    def trace_call(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        offsets = of_code.get(frame.f_code)
        if offsets is None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        known = offsets
        if 0 in known:  # Python does not tell the first instruction of a call
            into.add(known[0])

        def trace_opcode(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
            if (block := known.get(frame.f_lasti)) is not None:
                into.add(block)
            return trace_opcode

        return trace_opcode

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield
    finally:
        sys.settrace(before)
