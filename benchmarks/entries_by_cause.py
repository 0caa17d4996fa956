"""A table of every entry of a baseline and the remedies that mend its trial, made by running it.

python benchmarks/entries_by_cause.py reports/baseline.toml --only aten.cumsum
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import fields
from pathlib import Path

from verifier.execution.remedies import installed_remedies
from verifier.findings.attribution import Attribution
from verifier.findings.failures import Failure
from verifier.gate.baseline import load_baseline
from verifier.gate.entries import BaselineEntry, Cause
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.values import load_trial

TRIAL_LIMIT = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("--only", default="", help="entries whose op begins so")
    parser.add_argument("--family", default="opinfo", help="the family of the entries; empty for all")
    options = parser.parse_args()
    pools = PoolSet(lambda key: Pool(key, trial_limit=TRIAL_LIMIT), keep=2)
    entries = [e for e in load_baseline(options.baseline).entries if e.op.startswith(options.only)]
    entries = [e for e in entries if options.family in ("", e.family)]
    # a cause for each remedy, known or not
    like = {f.name: getattr(entries[0], f.name) for f in fields(BaselineEntry)} if entries else {}
    causes = [Cause(**like, remedy=name, title="", where=()) for name in installed_remedies()]
    attribution = Attribution(lambda trial, names: run_remedied(pools, trial, names), causes, installed_remedies())
    counts: Counter[str] = Counter()
    try:
        for entry in sorted(entries, key=lambda one: (load_trial(one.trial()).mesh.world_size, one.op)):
            trial = load_trial(entry.trial())
            observation = run_remedied(pools, trial)
            verdict = judge(observation, make_reference(trial.case))
            if not verdict.kind.bad:
                found = f"does not fail: {verdict.kind}"
            else:
                mending = attribution.explain(Failure(trial, observation, verdict))
                found = ", ".join(cause.remedy for cause in mending) or "no remedy"
            counts[found] += 1
            print(f"{entry.fingerprint} {entry.op} {entry.verdict}: {found}", flush=True)
    finally:
        pools.close()
    for found, count in counts.most_common():
        print(f"{count:4d} {found}")


if __name__ == "__main__":
    main()
