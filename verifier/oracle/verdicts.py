"""The verdict on an observation."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch

from verifier.core.case import Trial
from verifier.core.observation import Contribution, Difference, DifferenceKind, Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, Verdict, VerdictKind, tensor_name
from verifier.oracle.comparison import Spot, compare
from verifier.oracle.reference import Reference, expected_value
from verifier.oracle.tolerance import unexplained
from verifier.placements.algebra import Disagreement, Irreducible, combine
from verifier.placements.parsing import parse_placements

__all__ = [
    "judge",
    "moment",
    "vacuous",
]


def vacuous(reference: Reference) -> str:
    """Return why agreement with ``reference`` would prove nothing, or an empty string."""
    if not reference.outputs:
        return "the call returns no tensor"
    if all(output.numel() == 0 for output in reference.outputs):
        return "every output is empty"
    if all(not output.numel() or bool((output.detach() == 0).all()) for output in reference.outputs):
        return "every output is 0"
    if all(o.numel() > 1 and bool((o.detach() == o.detach().reshape(-1)[0]).all()) for o in reference.outputs):
        return "every element of the output is the same"
    return ""


_KINDS = {
    DifferenceKind.VALUE: VerdictKind.WRONG_VALUE,
    DifferenceKind.SHAPE: VerdictKind.WRONG_SHAPE,
    DifferenceKind.STRIDES: VerdictKind.WRONG_SHAPE,
    DifferenceKind.DTYPE: VerdictKind.WRONG_DTYPE,
    DifferenceKind.STRUCTURE: VerdictKind.WRONG_SHAPE,
    DifferenceKind.PLAIN_ZEROS: VerdictKind.WRONG_SHAPE,
    DifferenceKind.PLACEMENT: VerdictKind.WRONG_PLACEMENT,
    DifferenceKind.MUTATED: VerdictKind.MUTATED_INPUT,
}


def judge(observation: Observation, reference: Reference) -> Verdict:
    """Return the verdict on ``observation``, given the local reference of the call.

    An error of the verifier itself gives TOOL_ERROR, so that one trial is lost and not the run.
    """
    try:
        return _judge(observation, reference)
    except Exception as error:  # noqa: BLE001 - becomes a verdict that fails the run, with its traceback
        text = "".join(traceback.format_exception(error)[-12:])
        return Verdict(VerdictKind.TOOL_ERROR, f"{type(error).__name__}: {error}", detail=text)


def _judge(observation: Observation, reference: Reference) -> Verdict:
    reports = [report for report in observation.reports if report is not None]
    raised = [(report, report.raised) for report in reports if report.raised is not None]
    if observation.fate in (Fate.DIED, Fate.HANG, Fate.SLOW):
        return _judge_unended(observation, reference, reports)
    for _, error in raised:
        if error.ours:
            return Verdict(
                VerdictKind.TOOL_ERROR, f"{error.type}: {error.message}", error.phase, detail=error.traceback
            )
    for report in reports:
        if report.other_kernel:
            return Verdict(VerdictKind.INCONCLUSIVE, report.other_kernel)
    if raised:
        return _judge_raised(observation, reference, raised)
    if observation.fate is not Fate.COMPLETED or len(reports) != len(observation.reports):
        return Verdict(VerdictKind.TOOL_ERROR, f"a {observation.fate} trial without an exception: {observation.detail}")
    if reference.raised is not None:
        error_text = f"{type(reference.raised).__name__}: {_first_line(str(reference.raised))}"
        held = ", ".join(f"{subject} {text}" for subject, text in reports[0].placements)
        return Verdict(
            VerdictKind.SILENT_ERROR, f"returned {held or 'a value'}, expected {error_text}", Phase.FORWARD, "output"
        )
    doubts: list[str] = []
    differences = _differences(observation, reports, reference, doubts)
    disagreement = _disagreement(reports)
    if disagreement is not None:
        since = moment(disagreement.phase, disagreement.backward)
        before = [one for one in differences if moment(one.phase, one.backward) < since]
        return _judge_difference(before, f"then {disagreement.message}") if before else disagreement
    if differences:
        return _judge_difference(differences)
    for doubt in [*doubts, *(text for report in reports for text in report.unchecked)]:
        return Verdict(VerdictKind.INCONCLUSIVE, doubt)
    if reason := vacuous(reference):
        return Verdict(VerdictKind.INCONCLUSIVE, reason)
    return Verdict(VerdictKind.PASS)


_PHASES = list(Phase)


def _order(difference: Difference) -> tuple[int, int, int, str]:
    return (_PHASES.index(difference.phase), difference.backward or 0, difference.rank, difference.subject)


def moment(phase: Phase, backward: int | None) -> tuple[int, int, int]:
    """Return a sort key for a moment of a trial: a gradient is gathered before the next backward pass begins."""
    number = _PHASES.index(phase)
    if phase is Phase.GATHER_GRADIENT:
        return _PHASES.index(Phase.BACKWARD), backward or 0, number
    return number, backward or 0, number


def _furthest(reports: Sequence[ProcessReport]) -> Phase:
    return max((report.reached for report in reports), key=_PHASES.index, default=Phase.SETUP)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _judge_unended(observation: Observation, reference: Reference, reports: Sequence[ProcessReport]) -> Verdict:
    """Judge a trial that not all ranks finished.

    DIED and HANG stay the verdict even if a value was wrong, because they cost a user more than a wrong value. Slowness
    alone is no finding, so a slow trial is judged by its values.
    """
    seen = _differences(observation, reports, reference, [])
    first = _judge_difference(seen) if seen else None
    reached = _furthest(reports)
    if observation.fate is Fate.SLOW:
        message = "ranks still computed when the time was over: slow, or without an end"
        if first is not None:
            return replace(first, message=f"{first.message}\nthen {message}", detail=observation.detail)
        return Verdict(VerdictKind.INCONCLUSIVE, message, reached, detail=observation.detail)
    message = observation.detail if first is None else f"{observation.detail}\nbefore that: {first.message}"
    if observation.fate is Fate.DIED:
        return Verdict(VerdictKind.DIED, message, reached, "process", out_of_memory=observation.out_of_memory)
    return Verdict(VerdictKind.HANG, message, reached, "collective")


def _judge_raised(
    observation: Observation, reference: Reference, raised: Sequence[tuple[ProcessReport, Raised]]
) -> Verdict:
    """Judge a trial in which ranks raised: by earlier differences if there are any, else by the exception."""
    _, error = min(raised, key=lambda pair: (moment(pair[1].phase, pair[1].backward), pair[0].ranks))
    verdict = _judge_exception(observation, reference, raised, error)
    reports = [report for report in observation.reports if report is not None]
    own = [difference for report, _ in raised for difference in report.differences]  # a rank ends when it raises
    since = moment(error.phase, error.backward)
    before = [
        one
        for one in _differences(observation, reports, reference, [], reducible=True)
        if one.phase is Phase.INPUTS or one in own or moment(one.phase, one.backward) < since
    ]
    if verdict.kind is VerdictKind.PASS or not before:
        return verdict
    return _judge_difference(before, f"then, in the phase {error.phase}: {verdict.message}", error.traceback)


def _judge_exception(
    observation: Observation, reference: Reference, raised: Sequence[tuple[ProcessReport, Raised]], error: Raised
) -> Verdict:
    if reference.raised is not None and error.phase in (Phase.SETUP, Phase.FORWARD):
        return Verdict(VerdictKind.PASS, f"raises as the local call does: {error.type}", error.phase)
    ranks = sorted(rank for r, e in raised if e.phase == error.phase for rank in r.ranks)
    everyone = len(ranks) == observation.trial.mesh.world_size
    who = "every rank" if everyone else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    what = f"{error.type}: {_first_line(error.message)}" if error.message else f"{error.type} in {error.where}"
    message = f"{who} raised {what}, expected no exception"
    if error.endless:
        said = f"{who} computed without an end: {_first_line(error.message)}"
        return Verdict(VerdictKind.HANG, said, error.phase, _subject_of(error), error.backward, error.traceback)
    if error.refusal and everyone:
        said = f"{error.type}: {_first_line(error.message)}"
        return Verdict(VerdictKind.UNSUPPORTED, said, error.phase, backward=error.backward)
    if observation.fate is Fate.STUCK:
        message += f" ({observation.detail})"
    subject, detail = _subject_of(error), error.traceback
    return Verdict(
        VerdictKind.CRASH, message, error.phase, subject, error.backward, detail, error.type, error.out_of_memory
    )


def _subject_of(error: Raised) -> str:
    return "gradient" if error.phase in (Phase.BACKWARD, Phase.GATHER_GRADIENT) else "output"


def _disagreement(reports: Sequence[ProcessReport]) -> Verdict | None:
    """Return the verdict on ranks that have different placements for the same result; None if they agree."""
    table: dict[str, list[str]] = {}
    for report in reports:
        for subject, text in report.placements:
            table.setdefault(subject, []).append(text)
    for subject, texts in table.items():
        if len(set(texts)) > 1:
            listing = "; ".join(f"rank {r.ranks[0]}: {t}" for r, t in zip(reports, texts, strict=True))
            message = f"{subject} placements differ: {listing}"
            if gradient := re.fullmatch(r"(.+\.grad) (\d+)", subject):  # with the number of the backward pass
                number = int(gradient[2])
                return Verdict(VerdictKind.RANKS_DISAGREE, message, Phase.BACKWARD, gradient[1], number)
            return Verdict(VerdictKind.RANKS_DISAGREE, message, Phase.FORWARD, subject)
    return None


def _differences(
    observation: Observation,
    reports: Sequence[ProcessReport],
    reference: Reference,
    doubts: list[str],
    reducible: bool = False,
) -> list[Difference]:
    """Return the differences that ranks reported, and those between a reduction of all ranks' parts and the reference.

    If ``reducible`` is true, parts that no collective reduces are left out.
    """
    differences = [difference for report in reports for difference in report.differences]
    if not any(difference.kind is DifferenceKind.SHAPE for difference in differences):
        differences += _combined_differences(observation.trial, reports, reference, doubts, reducible)
    return differences


def _judge_difference(differences: Sequence[Difference], later: str = "", detail: str = "") -> Verdict:
    """Return the verdict on the first difference; the text ``later`` ends its message."""
    difference = min(differences, key=_order)
    kind = _KINDS[difference.kind]
    if difference.phase in (Phase.BACKWARD, Phase.GATHER_GRADIENT):
        kind = VerdictKind.WRONG_GRADIENT
    where = f" {list(difference.index)}" if difference.index is not None else ""
    holder = f" on rank {difference.rank}" if difference.rank >= 0 else ""
    what = "" if difference.kind is DifferenceKind.VALUE else f" {difference.kind}"
    name = tensor_name(difference.phase, difference.subject)
    message = f"{name}{where}{holder}:{what} got {difference.got}, expected {difference.expected}"
    if later:
        message += f"\n{later}"
    return Verdict(kind, message, difference.phase, difference.subject, difference.backward, detail)


def _combined_differences(
    trial: Trial, reports: Sequence[ProcessReport], reference: Reference, doubts: list[str], reducible: bool
) -> list[Difference]:
    """Check what no rank can check alone: that the local tensors of a Partial reduce to the reference.

    If a trial ended early or ranks disagree, parts may be missing or have different placements; they are skipped.
    """
    groups: dict[Spot, list[Contribution]] = {}
    for report in reports:
        for part in report.contributions:
            groups.setdefault(Spot(part.phase, part.subject, part.backward), []).append(part)
    differences = []
    steps = [step for report in reports for step in report.redistributions]
    for spot, parts in groups.items():
        if len(parts) != trial.mesh.world_size or len({part.placements for part in parts}) > 1:
            continue
        parts.sort(key=lambda part: part.rank)
        expected = expected_value(reference, spot, trial.seed)
        assert expected is not None, f"no reference for {spot.subject}"
        placements = parse_placements(parts[0].placements)
        try:
            got = combine([part.local for part in parts], placements, trial.mesh.shape, expected.shape)
        except Disagreement as error:
            if reducible and isinstance(error, Irreducible):
                continue
            kind = DifferenceKind.MUTATED if spot.phase is Phase.INPUTS else DifferenceKind.VALUE
            differences.append(spot.difference(kind, error, f"parts of {parts[0].placements} of one tensor"))
            continue

        def differing(
            absolute: float,
            spot: Spot = spot,
            held: str = parts[0].placements,
            got: torch.Tensor = got,
            expected: torch.Tensor = expected,
        ) -> list[Difference]:
            found = compare(got, expected.detach(), absolute)
            if found is None:
                return []
            kind, text, wanted, index = found
            kind = DifferenceKind.MUTATED if spot.phase is Phase.INPUTS else kind
            note = f"{text} once the ranks' parts are reduced under {held}"
            return [replace(spot.difference(kind, note, wanted), index=index)]

        found, doubt = unexplained(differing, trial, reference, expected, steps, spot, placements)
        differences += found
        doubts += doubt
    return differences
