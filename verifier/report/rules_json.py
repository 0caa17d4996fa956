"""The rule check as JSON, for ``python -m verifier rules --format json``."""

from __future__ import annotations

from typing import Any

import msgspec

from verifier.records.schema import FORMAT_VERSION, RunRecord

__all__ = ["render_rules_json"]


def render_rules_json(run: RunRecord) -> str:
    """Return the rule check of ``run`` as JSON: header, totals, ``ops``, findings and untested combinations.

    ``combinations``, ``seconds`` and ``ops`` are as in :class:`~verifier.records.schema.RulesRecord`.

    Raises
    ------
    ValueError
        If ``run`` has no rule check.
    """
    if run.rules is None:
        raise ValueError(f"run {run.header.id} has no rule check; make one with `python -m verifier rules`")
    rules: dict[str, Any] = msgspec.to_builtins(run.rules)
    fields = {
        "format_version": FORMAT_VERSION,
        "header": msgspec.to_builtins(run.header),
        "complete": run.complete,
        **rules,
        "findings": msgspec.to_builtins(run.findings),
        "baseline": msgspec.to_builtins(run.baseline),
        "untested": msgspec.to_builtins(run.untested),
        "tool_errors": run.tool_errors,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
