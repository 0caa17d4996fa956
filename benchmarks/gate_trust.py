"""How far a gate can be trusted: runs with other seeds, on unchanged torch, against the committed baseline.

    python benchmarks/gate_trust.py --seeds 2 --ops 6 --mesh 2 --max-examples 4

Each run draws embeddings, redistributions and common ops with a seed of its own. A finding that is new there is either
a cause that nobody knew, or a false alarm: a known cause in other clothes. To tell them apart, each new finding's trial
runs again under all remedies; if it passes, or is refused, the alarm was false. Exit status 1 if there is any.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from verifier.campaign import campaign
from verifier.campaign.recorded import record
from verifier.campaign.request import Request, make_plan
from verifier.core.case import Trial
from verifier.core.observation import Observation
from verifier.core.verdict import VerdictKind
from verifier.execution.remedies import installed_remedies
from verifier.gate.baseline import load_baseline
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.schema import FindingRecord
from verifier.records.values import load_trial
from verifier.runs.store import RunStore

COMMON = (
    "add", "sub", "mul", "div", "mm", "bmm", "addmm", "matmul", "baddbmm", "einsum", "sum", "mean", "amax", "amin",
    "prod", "std", "var", "softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "argmax", "topk", "sort",
    "cat", "stack", "split", "chunk", "select", "narrow", "index_select", "gather", "scatter", "where",
    "masked_fill", "transpose", "permute", "reshape", "view", "expand", "squeeze", "unsqueeze", "flip", "roll",
    "tril", "triu", "clone", "exp", "log", "sqrt", "tanh", "sigmoid", "clamp", "nn.functional.relu",
    "nn.functional.gelu", "nn.functional.layer_norm", "nn.functional.batch_norm", "nn.functional.conv2d",
    "nn.functional.mse_loss",
)  # fmt: skip
"""Sixty ops that models are made of, as OpInfo names them."""


class Stopwatch:
    """Runs trials under remedies as a campaign does, and adds up the seconds: what attribution costs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, pools: PoolSet, trial: Trial, remedies: tuple[str, ...] = ()) -> Observation:
        began = time.monotonic()
        try:
            return run_remedied(pools, trial, remedies)
        finally:
            self.seconds += time.monotonic() - began


def is_mended(pools: PoolSet, finding: FindingRecord) -> bool:
    """Return whether the trial of ``finding`` no longer fails under all remedies."""
    trial = load_trial(finding.trial)
    kind = judge(run_remedied(pools, trial, tuple(installed_remedies())), make_reference(trial.case)).kind
    return kind is VerdictKind.PASS or kind is VerdictKind.UNSUPPORTED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--ops", type=int, default=len(COMMON), help="how many of the common ops, drawn by the seed")
    parser.add_argument("--mesh", action="append", help="default: 2, 4 and 2x2")
    parser.add_argument("--profile", default="ci")
    parser.add_argument("--max-examples", type=int)
    parser.add_argument("--baseline", type=Path, default=Path("reports/baseline.toml"))
    options = parser.parse_args()
    baseline = load_baseline(options.baseline)
    totals: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        ops = sorted(random.Random(seed).sample(COMMON, min(options.ops, len(COMMON))))
        request = Request(
            ("embedding", "redistribution", *ops), tuple(options.mesh or ("2", "4", "2x2")), profile=options.profile,
            seed=seed, max_examples=options.max_examples, command="gate_trust",
        )  # fmt: skip
        started, campaign.run_remedied = time.monotonic(), (attribution := Stopwatch())
        with tempfile.TemporaryDirectory() as folder:
            run = record(make_plan(request, baseline), RunStore(Path(folder)))
        seconds = time.monotonic() - started
        new = [finding for finding in run.findings if not finding.known]
        pools = PoolSet(lambda key: Pool(key, trial_limit=8.0))
        try:
            false = [finding for finding in new if is_mended(pools, finding)]
        finally:
            pools.close()
        known = len(run.findings) - len(new)
        print(
            f"seed {seed}: {run.trials} trials in {seconds:.0f} s, {attribution.seconds / seconds:.0%} of it "
            f"attribution, {known} known findings, {len(new)} new, {len(false)} of them false alarms",
            flush=True,
        )
        for finding in new:
            alarm = "false alarm" if finding in false else "new cause"
            where = f"{finding.op} on mesh {finding.mesh}: {finding.rule}"
            print(f"  {alarm}: {finding.fingerprint} {finding.verdict} {where}")
            print(f"    {finding.message.partition(chr(10))[0]}")
        totals.update(runs=1, red=bool(new), trials=run.trials, known=known, new=len(new), false=len(false))
    print(
        f"{totals['runs']} runs, {totals['trials']} trials: {totals['red']} red, {totals['known']} known findings, "
        f"{totals['new']} new, {totals['false']} of them false alarms"
    )
    return int(totals["false"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
