"""The run as one HTML page that works offline: it loads no font, script or style."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from verifier.core.case import MeshSpec
from verifier.core.wording import bytes_text, plural
from verifier.records.commands import finding_text, replay_command, replay_text
from verifier.records.files import AS_IT_WAS, DEFAULT_REPORTS, write_atomically
from verifier.records.schema import FindingRecord, RunRecord
from verifier.records.special import Standing, standing_of
from verifier.report.matrix import matrix_views
from verifier.report.pages import page_environment
from verifier.report.paths.region import mesh_regions
from verifier.report.rules_html import MOST_OTHERS, rules_view
from verifier.report.rules_text import call_text as rule_call_text
from verifier.report.rules_text import evidence_for, rule_text, saves_text, state_text, untested_beside_rules
from verifier.report.svg import drawn_text, sharding_svg
from verifier.report.values import NamedTensor, call_text, named_tensors, values_text
from verifier.report.words import (
    OUTCOMES,
    Totals,
    counted,
    evidence_text,
    level_1_only,
    outcome,
    present_verdicts,
    seconds_text,
    totals,
)

__all__ = ["Banner", "banners", "render_html", "write_html"]

_PAGE = "page.html.jinja"
_OPEN_FINDINGS = 12
"""Number of new findings that are shown unfolded."""


@dataclass(frozen=True)
class Banner:
    """A message at the top of the page. ``tone`` is a tone of :class:`~verifier.report.words.Outcome`."""

    tone: str
    title: str
    text: str


@dataclass(frozen=True)
class _FindingView:
    """A finding with the texts and pictures that the page shows."""

    record: FindingRecord
    tensors: tuple[tuple[NamedTensor, Markup | None, str, str], ...]
    """Each tensor with its picture, a note on omissions of the picture, and its values."""
    call: str
    lines: list[str]
    """The lines of its message."""
    replay: str
    unfolded: bool


@dataclass(frozen=True)
class _Share:
    """A part of a bar, ``percent`` of the whole."""

    name: str
    amount: float
    percent: float


def banners(run: RunRecord, total: Totals) -> list[Banner]:
    """Return the banners of the page, the most important first; at least one."""
    result = []
    noun, nouns = counted(run)
    ops = run.rules.ops.values() if run.rules is not None else ()
    unsure = sum(len(op.unconfirmed) for op in ops)
    if not run.complete:
        text = "The run was interrupted, or its time was up. The page shows only what was tried until then."
        result.append(Banner("open", "Incomplete: the run ended before it reached everything", text))
    if total.trials == 0:
        result.append(Banner("open", "Nothing was tested", "This page holds no evidence, for or against any rule."))
    elif total.concluded == 0:
        text = f"No conclusion follows from {plural(total.trials, noun, nouns)}: {total.line}."
        result.append(Banner("open", "Nothing was concluded", text))
    if total.tool_errors:
        text = f"{nouns.capitalize()} with such an error say nothing about the op; see “Errors of the verifier”."
        result.append(Banner("ours", f"{plural(total.tool_errors, 'error')} of the verifier itself", text))
    if total.new:
        unconfirmed = sum(one.confirmed.unsure for one in run.findings if standing_of(one, run.header) is Standing.NEW)
        text = f"{unconfirmed} of them unconfirmed." if unconfirmed else "All of them confirmed."
        result.append(Banner("fail", plural(total.new, "new finding"), text))
    elif total.failed > unsure and not total.known and not total.special:
        text = "The run ended before it made findings of them. The tables below show where they are."
        result.append(Banner("fail", f"{plural(total.failed, noun, nouns)} failed", text))
    elif total.concluded:
        open_trials = total.trials - total.concluded
        passed = plural(total.passed, noun, nouns)
        text = f"{passed} passed; {open_trials:,} without a conclusion; {total.not_reached:,} not reached."
        if total.known:
            text += f" {plural(total.known, 'known finding')} still there."
        if total.special:
            text += f" {plural(total.special, 'finding')} for special values alone."
        skipped = total.not_reached or any(op.untested or op.not_testable or op.unconfirmed or op.died for op in ops)
        whole = run.complete and not (total.tool_errors or total.special or skipped) and total.passed
        result.append(Banner("pass" if whole else "open", "No new findings in what was tested", text))
    if unsure:
        text = "Level 1 refutes these rules, but real processes did not confirm it. They are no findings; see “Rules”."
        result.append(Banner("open", f"{plural(unsure, 'accused rule')} unconfirmed", text))
    return result


def _shares(amounts: Mapping[str, float]) -> list[_Share]:
    """Return the parts of a bar, largest first."""
    whole = sum(amounts.values())
    ranked = sorted(amounts.items(), key=lambda item: (-item[1], item[0]))
    return [_Share(name, amount, 100 * amount / whole if whole else 0.0) for name, amount in ranked]


def _verdict_shares(counts: Mapping[str, int]) -> list[_Share]:
    """Return a share for each tone in ``counts``, in the order pass, fail, open, ours."""
    whole = sum(counts.values())
    by_tone = dict.fromkeys(("pass", "fail", "open", "ours"), 0)
    for name, count in counts.items():
        by_tone[outcome(name).tone] += count
    return [_Share(tone, count, 100 * count / whole) for tone, count in by_tone.items() if count]


def _finding_view(finding: FindingRecord, unfolded: bool, folder: Path) -> _FindingView:
    mesh = MeshSpec.parse(finding.trial.mesh)
    tensors = tuple(
        (
            named,
            sharding_svg(named.name, named.tensor.shape, named.placements, mesh),
            drawn_text(named.tensor.shape, named.placements, mesh),
            values_text(named.tensor),
        )
        for named in named_tensors(finding)
    )
    lines = finding_text(finding, folder).split("\n")
    replay = replay_command(finding, folder)
    return _FindingView(finding, tensors, call_text(finding), lines, replay, unfolded)


def _finding_views(run: RunRecord, folder: Path) -> dict[Standing, list[_FindingView]]:
    """Return the views by how the findings count, in the given order; the first of the new ones are unfolded."""
    views: dict[Standing, list[_FindingView]] = {standing: [] for standing in Standing}
    for finding in run.findings:
        standing = standing_of(finding, run.header)
        unfolded = standing is Standing.NEW and len(views[standing]) < _OPEN_FINDINGS
        views[standing].append(_finding_view(finding, unfolded, folder))
    return views


def _asset(name: str) -> str:
    return resources.files("verifier.report").joinpath(name).read_text(encoding="utf-8").strip()


@cache
def _environment() -> Environment:
    environment = page_environment()
    environment.filters |= {"bytes": bytes_text, "seconds": seconds_text}
    environment.filters |= {"outcome": outcome, "replay": replay_text}
    environment.filters |= {"rule": rule_text, "call": rule_call_text, "state": state_text}
    environment.filters |= {"held": evidence_for, "saves": saves_text}
    environment.filters["evidence"] = lambda confirmed, level: evidence_text(level, confirmed)
    environment.globals |= {"plural": plural, "most": MOST_OTHERS}
    return environment


def load_page() -> None:
    """Compile the template of the page ahead; :func:`render_html` does so otherwise."""
    _environment().get_template(_PAGE)


def render_html(run: RunRecord, folder: Path = DEFAULT_REPORTS) -> str:
    """Return ``run``, which is recorded in ``folder``, as one HTML page.

    The page loads nothing. Its content security policy forbids loading, and allows only the page's own script, by hash,
    so that no message and no value can run as a script.
    """
    environment = _environment()
    environment.filters["replay"] = lambda fingerprint: replay_text(fingerprint, run.header.imports, folder=folder)
    script, total, by_rules = _asset("page.js.jinja"), totals(run), level_1_only(run)
    findings = _finding_views(run, folder)
    return environment.get_template(_PAGE).render(
        run=run,
        total=total,
        banners=banners(run, total),
        new=findings[Standing.NEW],
        special=findings[Standing.ASIDE],
        known=findings[Standing.KNOWN],
        verdicts=present_verdicts([run.counts, *run.counts_by_op.values(), *run.counts_by_mesh.values()]),
        outcomes=OUTCOMES,
        shares=_verdict_shares,
        by_op={op: counts for op, counts in run.counts_by_op.items() if op not in by_rules},
        untested=untested_beside_rules(run),
        rules=rules_view(run),
        counted=counted(run),
        matrices=matrix_views(run.matrices, run.findings),
        regions=mesh_regions(run),
        time=_shares(run.seconds_by),
        backends=sorted({MeshSpec.parse(mesh).backend for mesh in run.header.meshes}),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def write_html(run: RunRecord, path: Path | str, folder: Path = DEFAULT_REPORTS, kept: str = AS_IT_WAS) -> None:
    """Write the result of :func:`render_html`; raises as :func:`~verifier.records.files.write_atomically` does."""
    write_atomically(Path(path), render_html(run, folder).encode(), kept)
