"""What DTensor claims of a call, so that changes of the call can be compared."""

from __future__ import annotations

from strategies.opinfo.calls.call import Call, attempt
from verifier.core.case import OpCase
from verifier.rules.claims import claim_reader, claims_and_failures
from verifier.torch_internals.rule_code.reach import Watch

__all__ = ["claimed", "kinds_of", "run_rule"]

_EXTENT = 2


def claimed(call: Call | None) -> frozenset[str]:
    """Return the rules that DTensor claims of a call on two ranks, or how it fails; none if the op does not take it."""
    if call is None or attempt(call) is None:
        return frozenset()
    case = OpCase(str(call.op), f"torch.ops.{call.op}", call.args, call.kwargs, "opinfo")
    return claims_and_failures(case, _EXTENT)


def run_rule(call: Call, watch: Watch) -> None:
    """Run the rule of the op of a call that the op takes, on two ranks, under ``watch``."""
    results = attempt(call)
    one = results[0] if results is not None and len(results) == 1 else results
    reader = claim_reader(call.op, call.args, call.kwargs, one, watch)
    if reader.lists_rules:
        reader.listed((_EXTENT,), [])
        return
    if reader.reads_no_placements((_EXTENT,)):  # it has run now, and runs the same code for all placements
        return
    case = OpCase(str(call.op), f"torch.ops.{call.op}", call.args, call.kwargs, "opinfo")
    with watch.on():
        claims_and_failures(case, _EXTENT)


def kinds_of(rules: frozenset[str]) -> frozenset[str]:
    """Return rules without the dims that they shard: these are others where a tensor has another number of dims."""
    digits = str.maketrans("", "", "0123456789")
    return frozenset(rule.translate(digits) for rule in rules)
