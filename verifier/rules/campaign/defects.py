"""What one defect makes wrong: which wrong rules belong together, and what a finding of them is called."""

from __future__ import annotations

from collections.abc import Iterable

from verifier.core.verdict import VerdictKind
from verifier.findings.keys import ByMeshDim, Change, GroupKey, Symptom
from verifier.rules.results import WrongRule

__all__ = ["base_op", "class_of", "defect_key"]


def base_op(op: str) -> str:
    """Return the op without its overload and without the mark of its in-place form: they share a strategy.

    >>> base_op("aten.add_.Tensor"), base_op("aten.amax.out")
    ('aten.add', 'aten.amax')
    """
    namespace, name, *_ = op.split(".")
    return f"{namespace}.{name.rstrip('_')}"


def defect_key(wrong: WrongRule) -> GroupKey:
    """Return what wrong rules have in common that one defect makes wrong: op, verdict, and the kind of rule.

    Which tensor dim is cut, and how often the mesh cuts it, does not tell defects apart; nor does a mesh dim on which
    everything is replicated. Stale decisions are told apart by the argument that the key of the cache leaves out. The
    rules of an op that special values refute are one. So are those of a strategy that writes to arguments. Rules that
    raise are told apart by the type of the exception.
    """
    if wrong.left_out:
        return GroupKey(base_op(wrong.rule.op), Symptom(wrong.verdict, what=wrong.left_out))
    if wrong.special:
        return GroupKey(base_op(wrong.rule.op), Symptom(VerdictKind.SPECIAL_VALUE))
    if wrong.writes:
        return GroupKey(base_op(wrong.rule.op), Symptom(VerdictKind.MUTATED_INPUT, what="the strategy writes"))
    if wrong.fails:
        return GroupKey(base_op(wrong.rule.op), Symptom(wrong.verdict, what=f"the rule raised {wrong.raised}"))
    read = wrong.rule.inputs[: wrong.read]
    columns = ByMeshDim.of((*read, *wrong.rule.outputs)).columns
    kinds = {Change(_kinds(column[: len(read)]), _kinds(column[len(read) :])) for column in columns}
    return GroupKey(base_op(wrong.rule.op), Symptom(wrong.verdict), tuple(sorted(kinds, key=str)))


def _kinds(placements: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of the tensors' placements on one mesh dim, each once and in order.

    A strided shard is how a view spells a shard that another mesh dim has cut before.
    """
    return tuple(dict.fromkeys("S(*)" if text.startswith(("S(", "_S(")) else text for text in placements))


def class_of(wrong: WrongRule) -> tuple[VerdictKind | None, str]:
    """Return the verdict of a finding of a class of its own, and what it says of the cause; None for any other."""
    if wrong.left_out:
        return VerdictKind.STALE_CACHE, wrong.message
    if wrong.special:
        return VerdictKind.SPECIAL_VALUE, "the rule holds for ordinary values, and not for these"
    if wrong.writes:
        return None, wrong.message
    return None, ""
