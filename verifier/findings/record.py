"""The record of a minimised failure: its message, its script, its entry in the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.core.arguments import combination_rows
from verifier.core.call_text import describe_call
from verifier.core.verdict import LOUD, VerdictKind, tensor_name
from verifier.findings.failures import Failure, cotangent_text, first_report
from verifier.findings.grouping import Group, dtype_class, fingerprint, group_key, rule_class, unlike_rules
from verifier.findings.own_frames import own_frames, refuses
from verifier.findings.places import strategy_of
from verifier.findings.script.render import NoScriptError, render_script, run_script
from verifier.gate.entries import BaselineEntry
from verifier.processes.limits import format_size, parse_size
from verifier.records.schema import GONE, NOT_RUN, UNCONFIRMED, ConfirmationRecord, FindingRecord
from verifier.records.values import trial_record

_REFUSES = (
    "the strategy raises it on purpose: DTensor takes NotImplementedError alone for a refusal of the call, and "
    "communicates instead where a strategy has the rule that replicates all tensors"
)
SCRIPT_RAN = "the stand-alone script does not show it"

__all__ = ["SCRIPT_RAN", "finding_record", "message", "written_script"]


def message(failure: Failure, cause: str) -> str:
    """Return the finding's message: the difference, the call, the likely cause."""
    trial = failure.trial
    call = describe_call(trial.case, combination_rows(trial.case, trial.combination))
    named = f" with the dims {', '.join(trial.mesh.names)}" if trial.mesh.names else ""
    mesh = f"{'flattened ' * trial.mesh.flat}mesh {trial.mesh.shape}{named}"
    where = f"  in {trial.case.op}({call}) on {mesh}, backend {trial.mesh.backend}"
    if failure.verdict.kind not in (VerdictKind.DIED, VerdictKind.HANG):  # their first line says where each rank was
        where += f", during {failure.verdict.phase}"
    lines = [failure.verdict.message, where]
    if cotangents := cotangent_text(failure):
        lines.append(f"  with the cotangent placed as {cotangents}")
    if not trial.case.call.endswith(trial.case.op.removeprefix("aten.")):
        lines.append(f"  called as {trial.case.call}")
    if failure.verdict.kind is VerdictKind.CRASH:
        lines += [f"  raised at {frame}" for frame in own_frames(failure.verdict.detail)]
        if refuses(failure.verdict.detail):
            lines.append(f"  {_REFUSES}")
    if unlike := unlike_rules(failure.observation):
        lines.append(f"  ranks chose different rules: {unlike}")
    if cause:
        lines.append(f"  likely: {cause}")
    return "\n".join(lines)


def rank_memory(failure: Failure, memory_limit: int | None) -> str:
    """Return the value of ``--rank-memory`` that a replay needs to show ``failure``; empty if it needs none."""
    if memory_limit is None or not failure.verdict.out_of_memory:
        return ""
    size = format_size(memory_limit).replace(" ", "")
    return size if parse_size(size) == memory_limit else str(memory_limit)


def written_script(failure: Failure, memory_limit: int | None = None, imports: Sequence[str] = ()) -> tuple[str, str]:
    """Return the script of ``failure``, or the reason why there is none; the other of the two is empty.

    Raises
    ------
    TypeError
        If an argument of the call is of a type for which there is no literal.
    """
    try:
        return render_script(failure.trial, failure.verdict, memory_limit, imports), ""
    except NoScriptError as error:
        return "", f"none could be written: {error}"


def finding_record(
    group: Group,
    smallest: Failure,
    confirmed: ConfirmationRecord,
    minimised: bool,
    entry: BaselineEntry | None,
    family: str,
    cause: str,
    check_script: bool = True,
    imports: Sequence[str] = (),
    level: int = 2,
    name: str = "",
    script_status: str = "",
    memory_limit: int | None = None,
) -> FindingRecord:
    """Return the record of ``group``, whose minimised failure is ``smallest``.

    The script of a new finding is run before it is stored, unless ``check_script`` is False. The script of a known
    finding was run when the finding was new. ``level`` is the level that found it. ``name`` is the fingerprint, if it
    is not made from the minimised failure. ``script_status`` is the outcome of the script if it was already run, or why
    it was not run. ``memory_limit`` is the memory limit of the ranks in bytes.

    Raises
    ------
    TypeError
        If an argument of the call is of a type that no file can hold.
    """
    trial, verdict = smallest.trial, smallest.verdict
    name = entry.fingerprint if entry is not None else name or fingerprint(smallest)
    report = first_report(smallest.observation)
    outputs = [text for subject, text in (report.placements if report else ()) if subject.startswith("output")]
    stored = trial_record(trial)
    script, no_script = written_script(smallest, memory_limit, imports)
    if no_script:
        status = no_script
    elif entry is not None:
        status = f"{NOT_RUN}: the finding is known"
    else:
        status = script_status or (run_script(script)[0] if check_script else NOT_RUN)
        if status == GONE:
            confirmed = ConfirmationRecord(UNCONFIRMED, why=SCRIPT_RAN)
    return FindingRecord(
        fingerprint=name,
        op=trial.case.op,
        family=family,
        verdict=verdict.kind,
        level=level,
        mesh=str(trial.mesh),
        input_placements=dict(combination_rows(trial.case, trial.combination)),
        output_placements=outputs,
        known=entry is not None,
        phase=verdict.phase,
        subject=verdict.subject if verdict.kind in LOUD else tensor_name(verdict.phase, verdict.subject),
        dtype=dtype_class(trial.case),
        rule=str(rule_class(smallest)),
        message=message(smallest, cause),
        confirmed=confirmed,
        minimised=minimised,
        occurrences=group.occurrences,
        trial=stored,
        script=script,
        script_status=status,
        reason=entry.reason if entry is not None else "",
        explained=entry.explains if entry is not None else "",
        also=list(group.seen),
        cotangent=cotangent_text(smallest),
        imports=list(imports),
        rank_memory=rank_memory(smallest, memory_limit),
        groups=sorted({group.key, group_key(smallest)}),
        strategy=strategy_of(rule_class(smallest).op),
    )
