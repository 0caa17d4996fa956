"""The comment of derived code: what its rules rest on, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.core.wording import plural
from verifier.deriving.learning.generalise import Derivation, DerivedRule
from verifier.deriving.learning.learned import parts_text
from verifier.deriving.writing.subject import Provenance, Subject
from verifier.planning.own_samples import callable_of

__all__ = ["comment", "why_left_out"]


def comment(
    subject: Subject, made: Derivation, given: Provenance, left_out: Sequence[DerivedRule], gradient_of: str = ""
) -> list[str]:
    """Return the lines of the comment, ten at most.

    Parameters
    ----------
    left_out
        Rules that the code cannot have.
    gradient_of
        The op in whose gradient this one runs, and with which it was derived.
    """
    calls = subject.calls
    holding = [call for call in calls if call.holding and not call.rare]
    draws, sizes = min((call.draws for call in holding), default=0), min((call.sizes for call in holding), default=0)
    ndims = sorted({call.ndims for call in holding})
    lines = [
        f"Sharding rules of {callable_of(str(subject.op)) or subject.op}, "
        + (f"which runs in the gradient of {gradient_of}." if gradient_of else f"derived by `{given.command}`."),
        f"Each held in every draw of {plural(len(holding), 'call')}, in at least {draws} draws and "
        f"{plural(sizes, 'size')}, uneven ones too, on meshes {given.meshes}. "
        f"{plural(len(calls) - len(holding), 'call')} of rare classes contradict none.",
        f"Dims of the tensors: {', '.join(map(str, ndims[:6]))}{' ...' if len(ndims) > 6 else ''}; {given.dtype}, "
        f"seed {given.seed}; torch {given.torch}, dtensor-verifier {given.verifier}.",
        f"They explain {made.explained} of {made.explained + len(made.unexplained)} placements that hold.",
    ]
    cuts = {rule.cut.text: rule.cut for rule in made.rules if rule.cut is not None and rule not in left_out}
    lines += [
        f"Where {'each rank has elements' if cut.in_ones else f'shards begin at multiples of {cut.text}'}, what does "
        f"not hold elsewhere held for {cut.held} pairs of an extent and a number of ranks; for {cut.failed} others it "
        "did not."
        for cut in cuts.values()
    ]
    lines += [f"Left out: {why_left_out(rule)}." for rule in left_out[:2]]
    for call, inputs in made.unexplained[: 3 - min(2, len(left_out))]:
        lines.append(f"Left out: {', '.join(map(str, inputs))} of {call.origin}, dims {list(call.ndims)}.")
    if len(made.unexplained) > 3:
        lines.append(f"Left out, too: {len(made.unexplained) - 3} more placements.")
    return [piece for line in lines for piece in _wrapped(line)][:10]


def why_left_out(rule: DerivedRule) -> str:
    """Return why a rule with a cut is not written."""
    assert rule.cut is not None
    inputs, outputs = (", ".join(parts_text(some)) for some in (rule.inputs, rule.outputs))
    slot = rule.slots[rule.cut.slot]
    conditions = f" if {' and '.join(test.text for test in rule.tests)}" if rule.tests else ""
    return (
        f"{inputs} -> {outputs}{conditions} holds where "
        + (
            f"each rank has elements of {slot}" if rule.cut.in_ones
            else f"the shards of {slot} begin at multiples of {rule.cut.text}"
        )
        + "; a strategy that is asked of one tensor of a list does not see the number of ranks"
    )  # fmt: skip


def _wrapped(line: str, width: int = 116) -> list[str]:
    words, lines = line.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
