"""Whether real processes show a wrong rule: whether they fail as level 1 says."""

from __future__ import annotations

from dataclasses import replace

from verifier.core.observation import Raised
from verifier.core.verdict import LOUD, Phase, VerdictKind
from verifier.findings.failures import Failure, first_error
from verifier.records.values import trial_record
from verifier.rules.results import Rule, WrongRule
from verifier.torch_internals.placements import placement_text

__all__ = ["agrees", "error_text", "rule_of_any_call", "shows"]


def shows(wrong: WrongRule, failure: Failure) -> bool:
    """Return whether real processes show the wrong rule."""
    return failure.verdict.kind.bad and agrees(wrong, failure)


def agrees(wrong: WrongRule, failure: Failure) -> bool:
    """Return whether real processes fail as level 1 says, and not in another way: DTensor may refuse the call.

    Where the local op raises, DTensor has to raise the same; where it returns something wrong, DTensor has to return it
    too, or fail only once it puts the parts together.
    """
    verdict = failure.verdict
    if wrong.fails:
        return _fails_alike(wrong, failure)
    if verdict.kind not in LOUD:
        return wrong.verdict is not VerdictKind.CRASH
    if wrong.verdict is not VerdictKind.CRASH:
        return verdict.phase is not Phase.FORWARD or wrong.verdict is VerdictKind.DIED
    error = first_error(failure.observation)
    return error is None or error.type == wrong.raised


def _fails_alike(wrong: WrongRule, failure: Failure) -> bool:
    """Return whether DTensor fails on ranks as it did when it was asked for rules; it may wrap the exception."""
    if wrong.verdict is not VerdictKind.CRASH or failure.verdict.kind is not VerdictKind.CRASH:
        return failure.verdict.kind is wrong.verdict
    error = first_error(failure.observation)
    return error is None or error.type == wrong.raised or wrong.message.partition(": ")[2] in error.message


def error_text(raised: Raised) -> tuple[str, str, str]:
    """Return what an exception says before DTensor adds the call, which has the placements in it."""
    return raised.type, raised.message.strip().partition("\n")[0], raised.where


def rule_of_any_call(wrong: WrongRule, whole: Failure) -> WrongRule:
    """Return the failure of a call on replicated tensors in place of a rule, which nothing can apply."""
    raised = first_error(whole.observation)
    assert raised is not None
    inputs = tuple(map(placement_text, whole.trial.combination))
    kind, text, _ = error_text(raised)
    message = f"every rank raised {kind}: {text}, and so it does whatever the placements are"
    return replace(
        wrong, rule=Rule(wrong.rule.op, inputs, ()), verdict=VerdictKind.CRASH, message=message,
        trial=trial_record(whole.trial), raised=raised.type, fails=True, others=(),
    )  # fmt: skip
