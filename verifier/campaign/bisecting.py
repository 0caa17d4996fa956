"""Finds out under which versions of torch findings fail, and writes that down."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from verifier.campaign.replaying import replay
from verifier.core.wording import did_you_mean, one_line, plain_text, plural, version_key
from verifier.findings.script.render import NoScriptError, render_script
from verifier.findings.versions import Interpreter, Outcome, run_under, told
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry, Cause
from verifier.planning.boundary import needs_imports, refusal
from verifier.records.files import RunFormatError
from verifier.records.schema import GONE, TrialRecord
from verifier.records.values import load_trial
from verifier.runs.store import RunStore

__all__ = ["WRITERS", "Question", "Told", "noted", "questions_about", "tell"]


@dataclass(frozen=True)
class Question:
    """A finding whose script is to be run."""

    name: str
    fingerprint: str
    op: str
    verdict: str
    title: str
    trial: TrialRecord
    imports: tuple[str, ...] = ()

    @classmethod
    def of(cls, entry: BaselineEntry) -> Question:
        name, title = (entry.remedy, entry.title) if isinstance(entry, Cause) else (entry.fingerprint, entry.summary)
        return cls(name, entry.fingerprint, entry.op, entry.verdict, title, entry.trial(), entry.imports)


@dataclass(frozen=True)
class Told:
    """What came of one finding: outcomes sorted by version, and whether every version was told."""

    name: str
    fingerprint: str
    op: str
    verdict: str
    title: str
    outcomes: tuple[Outcome, ...]
    summary: str
    complete: bool


def questions_about(
    named: Sequence[str], baseline: Baseline, imports: Sequence[str], store: RunStore
) -> list[Question]:
    """Return the findings that are named by fingerprint or by remedy, or all entries of the baseline.

    Raises
    ------
    ValueError
        If no finding or several have the name, or one needs an import that is not among ``imports``.
    """
    if not named:
        entries = [entry for entry in baseline.entries if not needs_imports(entry.imports, imports)]
        if not entries:
            raise ValueError("bisect: the baseline has no entry; name a finding")
        return [Question.of(entry) for entry in entries]
    questions = []
    for name in named:
        entries = [one for one in baseline.entries if name in (one.fingerprint, getattr(one, "remedy", ""))]
        entries = entries or [one for one in baseline.entries if name and one.fingerprint.startswith(name)]
        if len(entries) == 1:
            questions.append(Question.of(entries[0]))
            continue
        try:
            found = store.find_finding(name)
        except RunFormatError:  # the finding meant has a damaged file
            raise
        except ValueError as error:
            if hint := did_you_mean(name, [cause.remedy for cause in baseline.causes]):
                raise ValueError(f"no finding and no remedy {name!r}{hint}") from error
            raise
        questions.append(
            Question(
                found.fingerprint,
                found.fingerprint,
                found.op,
                found.verdict,
                found.message.partition("\n")[0],
                found.trial,
                tuple(found.imports),
            )
        )
    for question in questions:
        if missing := needs_imports(question.imports, imports):
            raise ValueError(
                f"bisect {question.name}: it was found with --import {' --import '.join(missing)}; give it"
            )
    return questions


def tell(question: Question, interpreters: Sequence[Interpreter], imports: Sequence[str]) -> Told:
    """Write the script of a finding under the torch of this process, and run it under each interpreter.

    One of the interpreters is that of this process.
    """
    here = next(one.torch for one in interpreters if one.python is None)

    def result(outcomes: Sequence[Outcome], summary: str) -> Told:
        complete = sum(one.fails is not None for one in outcomes) == len(interpreters)
        return Told(
            question.name, question.fingerprint, question.op, question.verdict, question.title, tuple(outcomes),
            summary, complete,
        )  # fmt: skip

    trial = load_trial(question.trial)
    if reason := refusal(trial, imports):
        return result([], f"not run: it {reason}")
    verdict, fails = replay(trial, question.verdict, imports)
    if not fails:
        outcomes = [Outcome(here, GONE, f"{verdict.kind} {verdict.message}".strip())]
        return result(outcomes, f"does not fail under {here}, with which the verifier runs, so it has no script")
    try:
        source = render_script(trial, verdict, None, imports)
    except NoScriptError as error:
        return result([], f"no script could be written: {error}")
    outcomes = [run_under(one, source) for one in interpreters]  # in this thread, so that a Ctrl-C ends a script
    return result(outcomes, told(outcomes))


def noted(baseline: Baseline, results: Sequence[Told]) -> Baseline:
    """Return the baseline with what was told of its entries."""
    outcomes = {one.fingerprint: one.outcomes for one in results}
    entries = []
    for entry in baseline.entries:
        for outcome in outcomes.get(entry.fingerprint, ()):
            if outcome.fails is not None:
                entry = entry.tried_under(outcome.torch, outcome.fails)
        entries.append(entry)
    return replace(baseline, entries=tuple(entries))


# -------------------------------------------------------------------------------------------------------------- writing
def _text(results: Sequence[Told]) -> str:
    lines = []
    for one in results:
        lines += [f"{one.name} {one.verdict} in {one.op}: {one.title}"]
        width = max((len(outcome.torch) for outcome in one.outcomes), default=0)
        for outcome in one.outcomes:
            said = f": {one_line(outcome.why, 240)}" if outcome.fails is None and outcome.why else ""
            lines.append(f"  torch {outcome.torch:<{width}}  {outcome.status}{said}")
        lines += [f"  {one.summary}", ""]
    return plain_text("\n".join([*lines, _totals(results)]) + "\n")


def _totals(results: Sequence[Told]) -> str:
    counts = Counter(one.summary if one.complete else "not told under every version" for one in results)
    lines = [f"- {number}: {summary}" for summary, number in counts.most_common()]
    return "\n".join([plural(len(results), "finding"), *lines])


def _markdown(results: Sequence[Told]) -> str:
    versions = sorted({outcome.torch for one in results for outcome in one.outcomes}, key=version_key)
    marks = {True: "fails", False: "right", None: "not told"}
    lines = [
        "| finding | op | what | " + " | ".join(versions) + " |", "| --- | --- | --- |" + " --- |" * len(versions),
    ]  # fmt: skip
    for one in results:
        by_version = {outcome.torch: marks[outcome.fails] for outcome in one.outcomes}
        title = one.title.replace("|", "\\|")
        cells = [one.name, f"`{one.op}`", one_line(title, 160), *(by_version.get(each, "") for each in versions)]
        lines.append(f"| {' | '.join(cells)} |")
    return plain_text("\n".join([*lines, "", _totals(results)]) + "\n")


def _json(results: Sequence[Told]) -> str:
    return json.dumps({"findings": [asdict(one) for one in results]}, indent=2) + "\n"


WRITERS: Mapping[str, Callable[[Sequence[Told]], str]] = {"text": _text, "json": _json, "markdown": _markdown}
