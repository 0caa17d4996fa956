"""Which rules that are wrong on purpose level 1 accuses, and how long that takes.

    python benchmarks/rule_mutants.py [NAME ...]

One line for each mutant of tests/mutants/rule_mutants.py: what is wrong with it, on which meshes that shows, which of
its wrong rules are accused, how many more there are, and the seconds of the check (drawing the calls included, reading
torch's own descriptions of its ops not). Exit status 1 if a wrong rule is not accused or a true one is.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "mutants"))

from rule_mutants import MUTANTS, RuleMutant, check, samples, short

from verifier.placements.parsing import parse_placements
from verifier.rules.results import Rule


def is_product(rule: Rule, mutant: RuleMutant) -> bool:
    """Return whether the rule, one of a mesh of two dims, is one of the mutant's on one of them at least."""
    sides = [[parse_placements(text) for text in side] for side in (rule.inputs, rule.outputs)]
    if any(len(placements) != 2 for side in sides for placements in side):
        return False
    return any(
        " -> ".join(", ".join(str(placements[mesh_dim]) for placements in side) for side in sides) in mutant.wrong
        for mesh_dim in range(2)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="Mutants; all if none is given.")
    names = parser.parse_args().names
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    samples("aten.neg.default", 1)  # imports torch's descriptions
    missed = unjust = 0
    total = 0.0
    print(f"{'mutant':<26} {'fault':<44} {'shown by':<14} {'s':>5}  accused")
    for mutant in chosen:
        start = time.perf_counter()
        with mutant.registered():
            reports = check(mutant.op, mutant.most, mutant.claims_only)
        seconds = time.perf_counter() - start
        accused = {wrong.rule for report in reports for wrong in report.wrong}
        caught = {short(rule) for rule in accused} & mutant.wrong
        others = [rule for rule in accused if short(rule) not in mutant.wrong and not is_product(rule, mutant)]
        missed += len(mutant.wrong - caught)
        unjust += len(others)
        total += seconds
        first = min(caught, default="NOT CAUGHT")
        more = f" and {len(caught) - 1} more" if len(caught) > 1 else ""
        more += f"; MISSED {sorted(mutant.wrong - caught)}" if mutant.wrong - caught else ""
        more += f"; UNJUST {sorted(map(short, others))}" if others else ""
        print(f"{mutant.name:<26} {mutant.fault:<44} {mutant.shown_by:<14} {seconds:5.2f}  {first}{more}")
    print(f"{len(chosen)} mutants, {missed} wrong rules missed, {unjust} true rules accused, {total:.1f} s")
    return 1 if missed or unjust else 0


if __name__ == "__main__":
    raise SystemExit(main())
