"""Which of torch's sharding rules ``derive`` finds again by itself, and how many that torch lacks.

    python benchmarks/derived_rules.py [OP ...] [--max-samples 8] [--markdown] [--json FILE]

For each op, rules are derived from what holds for its calls: DTensor is not asked, as if torch had no strategy for it.
Then DTensor is asked what it claims for the same calls, and both are compared call by call, on a mesh of one dim.

recovered   claims of torch's that hold, and that the emitted function lists for this call
lost        claims of torch's that hold, and that it does not list
new         rules that the emitted function lists, and torch does not claim
wrong again claims of torch's that a draw refutes, and that the emitted function lists all the same
refuted     claims of torch's that a draw refutes
untried     claims of torch's at placements that level 1 did not try, or in too few draws, such as masked partials
rewritten   claims of torch's for a local call with other arguments, such as sizes, which a derived strategy cannot have

A refuted claim need not be a defect: torch may claim it at even extents alone, and derived rules hold at all extents.
torch has no claims where it has a handler for the op, or makes the op of others.

Only calls of classes that are not rare count, apart from ``refuted`` and ``wrong again``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.deriving.derive import DeriveRequest, derivation
from verifier.deriving.learning.evidence import CallEvidence, by_slot, slot_names
from verifier.deriving.learning.isolated import Workshop
from verifier.deriving.learning.learned import Learned
from verifier.deriving.writing.strategy import strategy_text
from verifier.deriving.writing.subject import Provenance, Target
from verifier.planning.own_samples import overload_named
from verifier.rules.claims import claims_of

OPS = (
    "add.Tensor", "mul.Tensor", "sum.dim_IntList", "amax.default", "mean.dim", "_softmax.default", "cumsum.default",
    "sort.default", "topk.default", "mm.default", "bmm.default", "addmm.default", "native_layer_norm.default",
    "native_group_norm.default", "cat.default", "stack.default", "split.Tensor", "select.int", "slice.Tensor",
    "flip.default", "roll.default", "gather.default", "scatter.src", "index_select.default", "embedding.default",
    "embedding_dense_backward.default", "nll_loss_forward.default", "convolution.default", "view.default",
    "constant_pad_nd.default", "tril.default", "one_hot.default", "bucketize.Tensor",
)  # fmt: skip
Row = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""The placements of the tensor parameters of a call, and those of its results."""


@dataclass
class Comparison:
    """What came of one op."""

    op: str
    calls: int = 0
    rules: int = 0
    recovered: int = 0
    lost: int = 0
    new: int = 0
    refuted: int = 0
    wrong_again: int = 0
    untried: int = 0
    rewritten: int = 0
    unexplained: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of processors, user and system, in this process and its worker: what other processes take does not count."""
    error: str = ""
    lost_rules: dict[str, int] = field(default_factory=dict)
    new_rules: dict[str, int] = field(default_factory=dict)


def compare(op: str, max_samples: int) -> Comparison:
    """Derive the rules of ``op`` and compare them with torch's."""
    row = Comparison(op)
    started, cpu, shop = time.perf_counter(), time.process_time(), Workshop()
    try:
        with shop:
            calls, made = derivation(DeriveRequest(op, max_samples=max_samples), shop)
        given = Provenance("", "", "", "", 0, "derive")
        code = strategy_text([Learned(overload_named(op), calls, made)], Target.SINGLE_DIM, given)
    except ValueError as error:
        row.error = str(error)
        return row
    finally:
        row.seconds, row.cpu_seconds = time.perf_counter() - started, time.process_time() - cpu + shop.seconds
    row.calls, row.rules, row.unexplained = len(calls), len(made.rules), len(made.unexplained)
    claims = {id(call): list(_claims(call, row)) for call in calls}  # before the code replaces torch's strategy
    listed = _emitted(code)
    lost: Counter[str] = Counter()
    new: Counter[str] = Counter()
    for call in calls:
        ours = set(listed(call))
        theirs = {(inputs, outputs) for inputs, outputs in claims[id(call)]}
        for one in theirs:
            _count(row, lost, call, one, ours)
        if not call.rare:
            new.update(_text(one) for one in ours if one not in theirs)
    row.new = sum(new.values())
    row.lost_rules, row.new_rules = dict(lost.most_common(6)), dict(new.most_common(6))
    return row


def _count(row: Comparison, lost: Counter[str], call: CallEvidence, one: Row, ours: set[Row]) -> None:
    inputs, outputs = one
    allowed = call.rules.get(inputs)
    if all(p == Replicate() for p in inputs):
        return
    if allowed is None:
        row.untried += not call.rare
    elif not allowed or not all(p in some for p, some in zip(outputs, allowed, strict=True)):
        row.refuted += 1
        row.wrong_again += one in ours
    elif call.rare:
        return
    elif one in ours:
        row.recovered += 1
    elif any(inputs == found for found, _ in ours):
        row.recovered += 1  # with a result that is as good
    else:
        row.lost += 1
        lost[f"{_text(one)} of {call.origin}"] += 1


def _text(row: Row) -> str:
    return f"{', '.join(map(str, row[0]))} -> {', '.join(map(str, row[1]))}"


def _claims(call: CallEvidence, row: Comparison) -> Iterator[Row]:
    for claim in claims_of(call.case, 2)[0]:
        if any(one.call is not None for one in claim.by_rank):
            row.rewritten += not call.rare
            continue
        inputs = by_slot(slot_names(call.case), [p for (p,) in claim.masked])
        if inputs is not None:
            yield inputs, tuple(p for (p,) in claim.outputs)


def _emitted(code: str) -> Callable[[CallEvidence], Iterator[Row]]:
    """Return the function of ``code`` that lists the rules of a call; the strategy is not registered."""
    module = ast.parse(code)
    module.body = [node for node in module.body if not getattr(node, "decorator_list", None)]
    scope: dict[str, Any] = {}
    exec(compile(module, "derived", "exec"), scope)  # what the verifier itself has written
    (rules,) = (value for name, value in scope.items() if name.endswith("_rules"))

    def listed(call: CallEvidence) -> Iterator[Row]:
        names = slot_names(call.case)
        for row in rules(*call.case.args, **call.case.kwargs):
            results = len(row) - len(names)
            inputs = by_slot(names, row[results:])
            assert inputs is not None
            yield inputs, tuple(row[:results])

    return listed


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=OPS)
    parser.add_argument("--max-samples", type=int, default=8)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="written after each op; the ops that it has are not derived again")
    asked = parser.parse_args(arguments)
    known = json.loads(asked.json.read_text()) if asked.json is not None and asked.json.exists() else []
    rows = {row["op"]: Comparison(**row) for row in known}
    for op in asked.ops:
        name = op if "." in op and op.startswith(("aten.", "torch.")) else f"aten.{op}"
        row = rows[name] if name in rows else compare(name, asked.max_samples)
        rows[name] = row
        if asked.json is not None:
            asked.json.write_text(json.dumps([asdict(one) for one in rows.values()], indent=1) + "\n")
        print(_line(row, asked.markdown), flush=True)
        for kind, texts in (("lost", row.lost_rules), ("new", row.new_rules)):
            for text, count in () if asked.markdown else texts.items():
                print(f"    {kind} {count:4} {text}", flush=True)
    return 0


_COLUMNS = (
    "calls",
    "rules",
    "recovered",
    "lost",
    "new",
    "refuted",
    "wrong_again",
    "untried",
    "rewritten",
    "unexplained",
)


def _line(row: Comparison, markdown: bool) -> str:
    if row.error:
        return f"| `{row.op}` | {row.error} |" if markdown else f"{row.op}: {row.error}"
    values = [getattr(row, name) for name in _COLUMNS]
    if markdown:
        return f"| `{row.op}` | {' | '.join(map(str, values))} | {row.seconds:.0f} | {row.cpu_seconds:.0f} |"
    texts = [f"{name.replace('_', ' ')} {value}" for name, value in zip(_COLUMNS, values, strict=True)]
    return f"{row.op}: {', '.join(texts)}; {row.seconds:.1f} s, {row.cpu_seconds:.1f} s of processors"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
