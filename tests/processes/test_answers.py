"""Processes of a check share what takes long to work out."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from verifier.core.case import OpCase
from verifier.processes.answers import ANSWERS, Answers
from verifier.rules.claims import claims_and_failures

RULES = frozenset({"S(0)", "R"})


def unasked() -> frozenset[str]:
    raise AssertionError("the answer is known")


def test_an_answer_is_worked_out_each_time_if_none_is_kept() -> None:
    answers, different = Answers(), iter([RULES, frozenset[str]()])
    assert answers.of("a question", lambda: next(different)) == RULES
    assert answers.of("a question", lambda: next(different)) == frozenset()
    assert (answers.kept, answers.folder) == (False, "")


def test_what_one_process_has_worked_out_another_one_knows() -> None:
    first, second = Answers(), Answers()
    with first.sharing():
        second.share(first.folder)
        with first.first("an op") as survived:
            assert survived
            assert first.of("a question", lambda: RULES) == RULES
        with second.first("an op"):
            assert second.of("a question", unasked) == RULES
            assert second.of("another question", frozenset) == frozenset()
        folder = Path(first.folder)
    assert not folder.exists()
    assert not first.kept


def test_a_process_waits_for_one_that_works_on_the_same_and_not_for_others() -> None:
    first, second = Answers(), Answers()
    waited = threading.Event()
    known: list[frozenset[str]] = []

    def work() -> None:
        with second.first("an op", waited.set):
            known.append(second.of("a question", unasked))

    with first.sharing():
        second.share(first.folder)
        thread = threading.Thread(target=work)
        with first.first("an op"):
            with Answers().first("another op"):
                pass
            thread.start()
            assert waited.wait(10)
            assert not known
            first.of("a question", lambda: RULES)
        thread.join(10)
    assert known == [RULES]


@pytest.mark.processes
def test_it_is_told_that_a_process_has_died_at_the_same_work() -> None:
    answers = Answers()
    with answers.sharing():
        if (child := os.fork()) == 0:
            with answers.first("an op"):
                os._exit(0)
        os.waitpid(child, 0)
        for _ in range(2):
            with answers.first("an op") as survived:
                assert not survived
        with answers.first("another op") as survived:
            assert survived


def test_claims_are_kept_for_a_tensor_of_one_element_with_any_stride() -> None:
    strided = torch.arange(5).as_strided((1,), (5,))
    case = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (strided,))
    with ANSWERS.sharing():
        kept = claims_and_failures(case, 2)
    assert kept == claims_and_failures(case, 2)
    assert "S(0) -> S(0)" in kept
