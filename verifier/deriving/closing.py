"""Closes the loop: a derived strategy goes through the checks that every strategy goes through."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from verifier.deriving.learning.evidence import CallEvidence, by_slot, described, slot_names
from verifier.deriving.learning.generalise import Derivation, placements_of
from verifier.deriving.learning.learned import Learned
from verifier.deriving.writing.mutants import Mutants
from verifier.records.schema import TrialRecord
from verifier.records.values import load_trial
from verifier.rules.execute import LocalCall

__all__ = ["Closed", "close", "close_by_test"]


_PRODUCTS = "2x2"
"""The mesh on which level 1 tries products of the rules."""


_FAILED = re.compile(r"^ *in \S+?\((.*)\) on mesh \((\d+),\)", re.MULTILINE)
_SHARDED = re.compile(r"\[(\d[\d, ]*)\] S\((\d+)\)")
"""How messages tell a call that failed on a mesh of one dim, and a sharded tensor: ``x=f64[5, 1] S(0)``."""
_MOST_SHOWN = 6
"""So many wrong rules are told."""
_NO_STRATEGY = re.compile(r"Operator (\S+) does not have a sharding strategy registered")
"""What DTensor says of an op without a strategy."""


@dataclass(frozen=True)
class Closed:
    """What the checks said of a derived strategy.

    Parameters
    ----------
    confirmed, wrong
        Rules that level 1 confirmed and refuted; tests that passed and failed where the code is no strategy.
    missing
        Derived rules that DTensor does not apply though the strategy has them, as text.
    gate, said
        The exit status of ``gate``, or of the tests, and the last lines that it printed: all if it could not verify.
    mutants
        What the calls say of changes of single lines; None if they were not asked.
    only_uneven
        Whether each call that failed, as far as it is told, had a tensor in uneven shards.
    refuting
        The calls for which level 1 refuted rules on meshes of one dim, with what they refute.
    without_strategy
        Other ops that ran in the gate, as in the gradient of the op, and that have no strategy.
    """

    confirmed: int
    wrong: int
    missing: tuple[str, ...]
    gate: int
    said: str
    mutants: Mutants | None = None
    without_strategy: tuple[str, ...] = ()
    only_uneven: bool = False
    refuting: tuple[CallEvidence, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong or missing, and the calls tell each line from a changed one."""
        told = self.mutants is None or not (self.mutants.survivors or self.mutants.disagrees)
        return not self.wrong and not self.missing and self.gate == 0 and self.confirmed > 0 and told


def close(
    learned: Sequence[Learned], file: Path, imports: Sequence[str], world_sizes: str, meshes: Sequence[str],
    max_samples: int,
) -> Closed:  # fmt: skip
    """Run ``rules`` and ``gate`` with the strategies in ``file``; what they record is written beside it.

    Both begin at the same time, since each checks one op on one core for the most part. The gate ends early if
    ``rules`` refutes something.

    Raises
    ------
    ValueError
        If one of the commands could not verify.
    """
    named = [word for name in (*imports, str(file)) for word in ("--import", name)]
    on = [word for mesh in meshes for word in ("--mesh", mesh)]
    ops = [str(one.op) for one in learned]
    words = ["rules", *ops, *named, "--world-size", world_sizes, "--mesh", _PRODUCTS, "--max-samples", str(max_samples)]
    words += ["--format", "json", "--out", str(file.parent / "rules")]
    with _running(["gate", *named, *on, "--out", str(file.parent / "gate")]) as gate, _running(words) as rules:
        status, text, errors = rules()
        if status == 2 or not text:
            raise ValueError(f"rules of the derived strategy could not verify:\n{errors.strip()}")
        closed = _closed_by_rules(learned, msgspec.json.decode(text))
        return closed if closed.wrong else _with_gate(closed, ops, *gate())


def _closed_by_rules(learned: Sequence[Learned], record: Mapping[str, Any]) -> Closed:
    """Return what ``rules`` says; the gate has passed if nothing is wrong, and else failed."""
    ops = [str(one.op) for one in learned]
    counts = list(record["ops"].values())
    derived = {(str(one.op), *point) for one in learned for point in _derived(one.calls, one.made)}
    missing = tuple(
        f"{', '.join(one['input_placements'])} of {one['origin']}"
        for found in counts
        for one in found["missing"]
        if (one["op"], one["origin"], tuple(one["input_placements"])) in derived
    )
    confirmed, wrong = (sum(len(found[what]) for found in counts) for what in ("confirmed", "wrong"))
    if not wrong:
        return Closed(confirmed, wrong, missing, 0, "")
    refuted = [_refuted(one) for found in counts for one in found["wrong"][:_MOST_SHOWN]]
    only_uneven = all(_is_uneven(one) for found in counts for one in found["wrong"])
    trials = [msgspec.convert(one["trial"], TrialRecord) for one in record["findings"] if one["op"] in ops]
    refuting = tuple(_refuting(trial) for trial in trials if trial.mesh.isdigit())
    return Closed(confirmed, wrong, missing, 1, "\n".join(refuted), only_uneven=only_uneven, refuting=refuting)


def _with_gate(closed: Closed, ops: Collection[str], status: int, text: str, errors: str) -> Closed:
    """Return what the gate says beside what ``rules`` says, which found nothing wrong."""
    said = text + errors
    others = tuple(dict.fromkeys(name for name in _NO_STRATEGY.findall(said) if name not in ops))
    shown = said.strip() if status == 2 else _last(said, 12)
    failed = _FAILED.findall(said)
    only_uneven = bool(failed) and all(_has_uneven_shards(call, int(ranks)) for call, ranks in failed)
    return replace(closed, gate=status, said=shown, without_strategy=others, only_uneven=only_uneven)


def close_by_test(test: Path) -> Closed:
    """Run a test file, which is beside the code that it tests; its tests count as what is confirmed and wrong."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(test.parent), test.name]
    done = subprocess.run(words, cwd=test.parent, capture_output=True, text=True, check=False)
    passed, failed = (
        sum(map(int, re.findall(rf"(\d+) {what}", done.stdout))) for what in ("passed", "(?:failed|error)")
    )
    return Closed(passed, failed, (), done.returncode, _last(done.stdout + done.stderr, 12))


def _refuting(record: TrialRecord) -> CallEvidence:
    """Return the call of a trial that shows a wrong rule, with the placements that it refutes."""
    trial = load_trial(record)
    placed = by_slot(slot_names(trial.case), [placements[0] for placements in trial.combination])
    with torch.no_grad():
        local = LocalCall(trial.case)
        whole = local(local.tensors)
    call = described("what rules refutes", trial.case, local, whole)
    return replace(call, rules={} if placed is None else {placed: ()}, rare=True)


def _is_uneven(wrong: Mapping[str, Any]) -> bool:
    """Return whether a wrong rule was refuted by uneven shards, on a mesh of one dim."""
    if not wrong["mesh"].isdigit():
        return False
    placed = zip(wrong["input_placements"], wrong["shapes"], strict=False)
    call = ", ".join(f"f64[{', '.join(map(str, shape))}] {placement}" for placement, shape in placed)
    return _has_uneven_shards(call, int(wrong["mesh"]))


def _has_uneven_shards(call: str, ranks: int) -> bool:
    """Return whether a call, with its tensors as messages tell them, has a tensor in uneven shards."""
    sharded = _SHARDED.findall(call)
    return any(int(shape.split(",")[int(dim)]) % ranks for shape, dim in sharded)


def _refuted(wrong: Mapping[str, Any]) -> str:
    inputs, outputs = (", ".join(wrong[what]) for what in ("input_placements", "output_placements"))
    return f"wrong: {inputs} -> {outputs} of {wrong['origin']} on {wrong['mesh']}: {wrong['message']}"


def _derived(calls: Sequence[CallEvidence], made: Derivation) -> set[tuple[str, tuple[str, ...]]]:
    """Return what the rules list of what holds for each call, by the origin of the call."""
    return {
        (call.origin, tuple(map(str, inputs)))
        for call in calls for rule in made.rules for inputs, _ in placements_of(rule, call) if inputs in call.holding
    }  # fmt: skip


_Ended = tuple[int, str, str]
"""The exit status of a command, and what it printed on standard output and on standard error."""


@contextmanager
def _running(words: Sequence[str]) -> Iterator[Callable[[], _Ended]]:
    """Run a command of the verifier in this block, which is given a function that waits for its end."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-m", "verifier", *words], stdout=output, stderr=errors)

        def ended() -> _Ended:
            status = process.wait()
            output.seek(0)
            errors.seek(0)
            return status, output.read(), errors.read()

        try:
            yield ended
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its workers and ranks
                process.wait()


def _last(text: str, lines: int) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
