"""What the end of a process's stderr tells of its end."""

from __future__ import annotations

import pytest

from verifier.meshes.worker_program import STDERR_TAIL, last_words

LOGGED = "[rank0]:W1122 12:05:01.628000 26003 torch/_logging/_internal.py:1345] falling back with allgather + chunk!\n"
ABORT = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] 40 vs 24.\n"


@pytest.mark.parametrize("cut", [False, True])
def test_an_abort_begins_where_the_runtime_says_so(cut: bool) -> None:
    before = "o one mesh dim\n" + LOGGED + LOGGED.replace("W1122", "E1122")
    assert last_words(before + ABORT, cut) == ABORT.strip()


def test_what_torch_logs_says_nothing_of_the_end() -> None:
    assert last_words(LOGGED * 20) == ""
    assert last_words("out of memory\n" + LOGGED) == "out of memory"


def test_a_line_of_which_the_beginning_is_missing_is_left_out() -> None:
    assert last_words("or_type(message)\nMemoryError\n", cut=True) == "MemoryError"
    assert last_words("error_type(message)\nMemoryError\n") == "error_type(message)\nMemoryError"


def test_the_last_lines_are_kept_and_a_long_one_is_cut() -> None:
    lines = [f"line {number} of what it wrote" for number in range(100)]
    kept = last_words("\n".join(lines)).splitlines()
    assert kept == lines[-len(kept) :]
    assert STDERR_TAIL - 40 < len("\n".join(kept)) <= STDERR_TAIL
    assert last_words("x" * 1000 + "end") == "x" * (STDERR_TAIL - 3) + "end"
    assert len(last_words(ABORT + "y" * 1000)) == STDERR_TAIL
