"""Verdicts of real processes on the rules that torch's own validator calls incorrect.

    python benchmarks/peer_accusations.py [--draws 8] [--op linalg.vector_norm] [--markdown]

``peer_accusations.json`` holds what ``python -m torch.distributed.tensor._ops.strategy_validation`` accuses on
torch 2.13.0 and the calls on which it does so. Here two gloo processes run each of these calls through DTensor, with
exactly the accused input placements and with parts that differ from rank to rank. A rule counts as tried only where
DTensor executed it: nothing was communicated, the local kernel was given this rank's own local tensors, and the output
has the accused placements. It is right if then, in every draw, each rank's local output is what the output placements
promise and ``full_tensor()`` is the result of the same call on the whole tensors. Nothing but torch is needed.

Exit status: 0 if the verdicts are those that the stored causes explain, 1 if one differs, 2 if a rule was not executed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accusation_trials import RANKS, Accusation, Trial, try_all

ACCUSATIONS = Path(__file__).with_suffix(".json")

CAUSES = {
    "unread-placement": "It has no parser for the output placement, never runs the rule, and counts it as incorrect.",
    "product-split": "It gives each rank a whole copy of a `P(product)` input, whose product is the square.",
    "size-arguments": "It calls the kernel on the shard with the sizes of the whole tensor; DTensor rewrites them.",
    "random": "It compares two draws of random numbers.",
    "tolerance": "Rounding: it allows 1e-5 in float32, whatever the size of the parts; in float64 it has no complaint.",
    "magnitude": "None, the rule is wrong: a norm is taken of magnitudes, and a rank whose value is not the maximum "
    "(minimum) may have the largest (smallest) one.",
    "broadcast": "None, the rule is wrong: A has that batch dim too and stays whole, so each rank pairs its part of B "
    "with all of A.",
}
HOLDS = {"magnitude", "broadcast"}


@dataclass(frozen=True)
class Verdict:
    """What all trials of one accused rule come to."""

    accusation: Accusation
    trials: tuple[Trial, ...]

    @property
    def word(self) -> str:
        """``right``, ``wrong``, or ``not executed`` where DTensor did something else than the rule."""
        if any(trial.executed and trial.failure for trial in self.trials):
            return "wrong"
        return "right" if all(trial.executed for trial in self.trials) else "not executed"

    @property
    def counted(self) -> str:
        """How many of the trials agree with the verdict."""
        failed = sum(bool(trial.failure) for trial in self.trials)
        if self.word == "wrong":
            return f"{failed} of {len(self.trials)} fail"
        return f"{len(self.trials) - failed} of {len(self.trials)} agree"

    @property
    def evidence(self) -> str:
        """A failure if there is one, otherwise what the kernels were called with."""
        failures = [trial.failure for trial in self.trials if trial.failure]
        if failures:
            return failures[0]
        notes = Counter(trial.note for trial in self.trials if trial.note)
        call = self.trials[0].local_call
        seen = [f"rank 0 runs `{call}`" if call else "the kernel is not called on the given local tensors"]
        return "; ".join([*seen, *(f"{note} in {count} of {len(self.trials)}" for note, count in notes.items())])


def load_accusations(path: Path = ACCUSATIONS) -> list[Accusation]:
    """Return the accused rules in the order of the file."""
    stored = json.loads(path.read_text())
    assert stored["format_version"] == 2, path
    return [
        Accusation(
            op=entry["op"],
            aten=entry["aten"],
            inputs=tuple(entry["inputs"]),
            outputs=tuple(entry["outputs"]),
            cause=entry["cause"],
            reasons=tuple(entry["reasons"]),
            samples=entry["samples"],
            calls=tuple(entry["calls"]),
        )
        for entry in stored["accusations"]
    ]


def says(accusation: Accusation) -> str:
    """Return what the validator says of a rule."""
    samples = f"in {accusation.samples} sample{'s' if accusation.samples > 1 else ''}"
    if not accusation.reasons:
        return f"nothing: it cannot read {' '.join(accusation.outputs)} and did not run the rule, {samples}"
    more = len(accusation.reasons) - 1
    reason = accusation.reasons[0].replace("`", "'")
    return f"{reason}{f' (and {more} more like it)' if more else ''}, {samples}"


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """Return the table of docs/explanations/peer-accusations.md."""
    lines = [
        "| op | accused rule | what the validator says | real processes | its mistake | seen on the ranks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for verdict in verdicts:
        accusation = verdict.accusation
        overload = accusation.aten.removeprefix("aten.").removesuffix(".default")
        op = f"`{accusation.op}`" + (f" (`{overload}`)" if overload != accusation.op else "")
        cells = [
            op,
            f"`{accusation.rule}`",
            says(accusation),
            f"{verdict.word if verdict.word == 'right' else f'**{verdict.word}**'}, {verdict.counted}",
            "none" if accusation.cause in HOLDS else accusation.cause,
            verdict.evidence,
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def as_text(verdicts: Sequence[Verdict]) -> str:
    """Return one block of lines for each verdict."""
    blocks = []
    for verdict in verdicts:
        accusation = verdict.accusation
        head = f"{verdict.word.upper():5}  {accusation.op} [{accusation.aten}]  {accusation.rule}"
        body = [
            f"validator: {says(accusation)}",
            f"processes: {verdict.counted}; {verdict.evidence}",
            f"its mistake: {CAUSES[accusation.cause]}",
        ]
        blocks.append("\n".join([head, *(f"       {textwrap.shorten(line, 200)}" for line in body)]))
    return "\n".join(blocks)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the last line: how many rules are right and how many are wrong."""
    counted = Counter(verdict.word for verdict in verdicts)
    wrong = {(v.accusation.aten, v.accusation.rule) for v in verdicts if v.word == "wrong"}
    ops = len({verdict.accusation.op for verdict in verdicts})
    trials = sum(len(verdict.trials) for verdict in verdicts)
    words = ", ".join(f"{count} {word}" for word, count in sorted(counted.items()))
    return f"{len(verdicts)} accused rules on {ops} ops, {trials} trials: {words} ({len(wrong)} distinct wrong rules)"


def main() -> int:
    """Try the accused rules and print the verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=8, help="draws of values for each call (default 8)")
    parser.add_argument("--op", help="only the rules of this op, as the validator names it")
    parser.add_argument("--markdown", action="store_true", help="print the table of the page on accusations")
    options = parser.parse_args()
    accusations = [each for each in load_accusations() if options.op in (None, each.op)]
    if not accusations or options.draws < 1:
        known = ", ".join(sorted({each.op for each in load_accusations()}))
        parser.error(f"nothing to try: --draws must be at least 1, --op one of {known}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a full_tensor() that raises leaves a collective unwaited
    print(f"torch {torch.__version__}, gloo, {RANKS} processes, {options.draws} draws a call", file=sys.stderr)
    tried = try_all(accusations, options.draws)
    verdicts = [Verdict(accusation, trials) for accusation, trials in zip(accusations, tried, strict=True)]
    print(as_markdown(verdicts) if options.markdown else as_text(verdicts))
    print(summary(verdicts), file=sys.stderr)
    if any(verdict.word == "not executed" for verdict in verdicts):
        return 2
    unexplained = [v for v in verdicts if (v.word == "wrong") != (v.accusation.cause in HOLDS)]
    for verdict in unexplained:
        print(f"{verdict.accusation.op} {verdict.accusation.rule} is {verdict.word}, unlike before", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
