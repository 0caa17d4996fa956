"""Which code of a rule a call reaches: basic blocks, so that the parts of a condition in one line are told apart."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

__all__ = ["Block", "Watch", "watch_of"]

_ENDS = frozenset(
    {"RETURN_VALUE", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
)
"""Instructions that do not go on to the next one."""


class Block(NamedTuple):
    """Instructions that run one after the other, from ``offset`` on, in ``lines`` of ``file``.

    ``number`` is that of the code among those of the rule; ``after`` has the offsets of the blocks that may come next.
    """

    number: int
    offset: int
    file: str
    lines: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def places(self) -> set[tuple[str, int]]:
        """The lines, each with its file."""
        return {(self.file, line) for line in self.lines}


def _blocks(number: int, code: CodeType) -> Iterator[Block]:
    """Yield the blocks that a call may reach without an exception.

    A block that only raises is left out: what a rule refuses it does not claim.
    """
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
        lines = {one.positions.lineno for one in bodies[start] if one.positions and one.positions.lineno}
        yield Block(number, start, code.co_filename, tuple(sorted(lines)), tuple(successors[start]))


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


class Watch:
    """Notes which code of a rule is reached, until nothing of it is left.

    Attributes
    ----------
    blocks
        All blocks of the code.
    reached
        Those that were reached while :meth:`on` was entered.
    """

    def __init__(self, codes: Sequence[CodeType]) -> None:
        self._blocks = {code: {one.offset: one for one in _blocks(n, code)} for n, code in enumerate(codes)}
        self.blocks = frozenset(block for of_code in self._blocks.values() for block in of_code.values())
        self.reached: set[Block] = set()

    @property
    def left(self) -> frozenset[Block]:
        """The blocks that were not reached, of code that was entered.

        A function that was not entered is called by a block that was not reached, or it is named for another reason.
        """
        entered = {block.number for block in self.reached}
        return frozenset(block for block in self.blocks - self.reached if block.number in entered)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Note what is reached inside the context, in this thread."""
        if self.reached and not self.left:  # tracing costs time
            yield
            return
        before = sys.gettrace()
        sys.settrace(self._trace_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace_call(self, frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        blocks = self._blocks.get(frame.f_code)
        if blocks is None:
            return None
        known, add = blocks, self.reached.add
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if 0 in known:  # Python does not tell the first instruction of a call
            add(known[0])

        def trace_opcode(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
            if (block := known.get(frame.f_lasti)) is not None:
                add(block)
            return trace_opcode

        return trace_opcode


@functools.lru_cache(maxsize=64)
def watch_of(codes: tuple[CodeType, ...]) -> Watch:
    """Return the watch of the process over these codes: what one sample has reached need not be watched for again."""
    return Watch(codes)
