"""Seconds of the commands for one's own strategy, from start to exit, beside torch's validator on one op.

    python benchmarks/own_strategy.py [--rounds 3] [--markdown]

The commands run in turn, round by round, in a project of its own with one strategy, for ``cumsum``, in a right and in a
wrong version. ``python -m torch.distributed.tensor._ops.strategy_validation`` on ``nn.functional.embedding`` at world
size 2 is what the times are compared with, because machines differ: it takes one core and no disk. ``rules`` runs once
before the rounds, so that known findings have been confirmed.

Exit status: 0, or 1 if a command ended with another status than it should.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

VALIDATOR = "torch.distributed.tensor._ops.strategy_validation"
OP = "nn.functional.embedding"
STRATEGY = """\
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten.cumsum.default)
def cumsum(x, dim, dtype=None):
    others = [d for d in range(x.ndim) {condition}]
    return [([Replicate()], [Replicate(), None, None]), *(([Shard(d)], [Shard(d), None, None]) for d in others)]
"""
RIGHT, WRONG = "if d != dim % x.ndim", ""


@dataclass
class Command:
    """A command, the exit statuses that it may have, and the seconds that it took.

    Parameters
    ----------
    ratio
        The largest wanted share of the validator's seconds; None if none is wanted.
    """

    name: str
    arguments: Sequence[str]
    statuses: Sequence[int]
    ratio: float | None = None
    seconds: list[float] = field(default_factory=list)

    def run(self, folder: Path) -> None:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", *self.arguments], cwd=folder, capture_output=True, text=True)
        self.seconds.append(time.monotonic() - began)
        if done.returncode not in self.statuses:
            sys.stderr.write(done.stdout + done.stderr)
            raise SystemExit(f"{' '.join(self.arguments)}: exit status {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    options = parser.parse_args()
    validator = Command("torch's validator", [VALIDATOR, "--device", "cpu", "--world-size", "2", "--op", OP], [0, 1])
    rules = Command(f"`rules {OP}`", ["verifier", "rules", OP], [0, 1], 5 / 16.1)
    unchanged = ["verifier", "gate", "--import", "right.py", "--changed-since", "HEAD"]
    commands = [
        validator,
        rules,
        Command("`gate --import right.py`", ["verifier", "gate", "--import", "right.py"], [0], 15 / 16.1),
        Command("`gate --import wrong.py`", ["verifier", "gate", "--import", "wrong.py"], [1], 15 / 16.1),
        Command("`gate --import right.py --changed-since HEAD`", unchanged, [0], 5 / 16.1),
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, condition in (("right.py", RIGHT), ("wrong.py", WRONG)):
            (folder / name).write_text(STRATEGY.format(condition=condition))
        as_author = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
        for arguments in (["init", "-q"], ["add", "."], [*as_author, "commit", "-q", "-m", "Add strategies"]):
            subprocess.run(["git", *arguments], cwd=folder, check=True)
        rules.run(folder)
        rules.seconds.clear()
        for _ in range(options.rounds):
            for command in commands:
                command.run(folder)
    head = ("command", "seconds (least to most)", "of the validator's", "wanted")
    rows = [head, *([("---",) * len(head)] if options.markdown else [])]
    for command in commands:
        median, (least, *_, most) = statistics.median(command.seconds), sorted([*command.seconds, command.seconds[0]])
        share = statistics.median(
            ours / theirs for ours, theirs in zip(command.seconds, validator.seconds, strict=True)
        )
        wanted = "" if command.ratio is None else f"{command.ratio:.2f}"
        rows.append((command.name, f"{median:.1f} ({least:.1f} to {most:.1f})", f"{share:.2f}", wanted))
    for row in rows:
        print(f"| {' | '.join(row)} |" if options.markdown else "  ".join(f"{cell:45}" for cell in row).rstrip())


if __name__ == "__main__":
    main()
