"""The end of a run on a terminal: plain, unwrapped, untested is never passed, and the last lines are what to do."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_factory import (
    EMBEDDING,
    MARKUP,
    ODD,
    RENORM,
    make_empty_run,
    make_header,
    make_long_run,
    make_rules_run,
    make_run,
)

from verifier.records.commands import replay_command
from verifier.records.schema import EdgeCoverageRecord, KnownRecord, RuleCoverageRecord, RunRecord
from verifier.report.terminal import print_summary
from verifier.report.words import OUTCOMES, totals
from verifier.runs.merging import join_levels


def printed(run: RunRecord, width: int = 60, terminal: bool = False) -> str:
    out = io.StringIO()
    print_summary(
        run, Console(file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else "auto")
    )
    return out.getvalue()


def test_a_log_gets_plain_text() -> None:
    assert "\x1b" not in printed(make_run())
    assert "\x1b" in printed(make_run(), terminal=True)


@pytest.mark.parametrize("width", [20, 80])
def test_no_line_is_wrapped(width: int) -> None:
    lines = printed(make_run(), width).splitlines()
    assert "    reproduce: python -m verifier replay a1b2c3d4e5" in lines
    assert any(line.startswith(EMBEDDING) and line.split()[1:] == ["301", "-", "17", "-", "6", "40"] for line in lines)


def test_new_findings_come_in_full_and_known_ones_in_a_line() -> None:
    run = make_run()
    text = printed(run)
    known, *new = run.findings
    for finding in new:
        for line in finding.message.splitlines():
            assert f"  {line}\n" in text
    (line,) = [line for line in text.splitlines() if known.fingerprint in line and "CRASH" in line]
    assert known.reason in line
    assert known.message not in text
    assert text.index(line) < text.index(new[0].message.splitlines()[0])  # what is new is nearer to the end


def screen(run: RunRecord, **how: bool) -> list[str]:
    out = io.StringIO()
    print_summary(run, Console(file=out, width=80), **how)
    return out.getvalue().splitlines()


def test_a_brief_summary_of_a_long_run_without_new_findings_fits_a_screen() -> None:
    run = make_long_run(60)
    run = replace(
        run,
        findings=[replace(finding, known=True, reason="known") for finding in run.findings],
        counts_by_op={f"aten.op{number}.default": {"PASS": 3} for number in range(200)},
        unsupported={f"refused {'x' * number}": 1 for number in range(50)},
        baseline=[KnownRecord(f"{number:012}", "untested", "needs cuda") for number in range(50)],
        tool_errors=[],
    )
    brief, full = screen(run, brief=True), screen(run)
    assert len(brief) < 50 < len(full)
    assert any("which -v lists" in line for line in brief)
    assert not any("which -v lists" in line for line in full)


def test_ops_that_failed_come_first_where_not_all_are_listed() -> None:
    counts = {f"aten.op{number}.default": {"PASS": 3} for number in range(20)} | {"aten.last.default": {"CRASH": 1}}
    lines = screen(replace(make_run(), counts_by_op=counts), brief=True)
    ops = [line.split()[0] for line in lines if line.startswith("aten.")]
    assert ops[0] == "aten.last.default"


def test_a_quiet_summary_has_what_is_new_and_one_line_of_totals() -> None:
    run = make_run()
    lines = screen(run, quiet=True)
    new = [finding for finding in run.findings if not finding.known]
    assert lines[1] == f"{len(new)} new findings"
    assert lines[-1].startswith(f"{run.trials:,} run, ")
    assert not any(finding.fingerprint in line for finding in run.findings if finding.known for line in lines)


def test_text_is_never_taken_for_markup() -> None:
    text = printed(make_run())
    assert MARKUP in text
    assert ODD in text


def test_an_op_of_which_nothing_was_tested_says_so() -> None:
    lines = printed(make_run()).splitlines()
    (renorm,) = [line for line in lines if line.startswith(RENORM)]
    assert renorm.endswith("not tested")
    assert not any(line.startswith(EMBEDDING) and line.endswith("not tested") for line in lines)


def test_reasons_are_given_for_what_was_not_tested() -> None:
    run = make_run()
    text = printed(run)
    for reason in [*run.unsupported, *run.inconclusive, *(entry.reason for entry in run.untested)]:
        assert reason in text


def test_the_last_lines_say_what_to_do() -> None:
    *_, total, replay, page = printed(make_run()).splitlines()
    assert total.startswith("553 run, 421 passed, 22 failed, 104 unsupported (DTensor has no strategy")
    assert total.endswith("129 not reached; took 1 min 33 s")
    assert replay == "  reproduce: python -m verifier replay a1b2c3d4e5"
    assert page == "  open reports/latest/index.html"


def test_commands_name_the_folder_of_the_runs_where_it_is_not_the_usual_one() -> None:
    resumable = make_run(complete=False, header=make_header(request={"seed": 0}, time_limit=None))
    out = io.StringIO()
    print_summary(resumable, Console(file=out, width=60), folder=Path("my runs"))
    *_, command, replay, _page = out.getvalue().splitlines()
    assert command == f"  go on with it: python -m verifier run --resume {resumable.header.id} --out 'my runs'"
    assert replay == "  reproduce: python -m verifier replay a1b2c3d4e5 --out 'my runs'"
    assert "    reproduce: python -m verifier replay a1b2c3d4e5 --out 'my runs'" in out.getvalue().splitlines()
    assert "--out" not in printed(resumable)


def test_nothing_tested_is_said_and_not_green() -> None:
    text = printed(make_empty_run())
    assert "nothing was tested, so nothing is proved" in text
    assert "\x1b[32m" not in printed(make_empty_run(), terminal=True)


def test_an_interrupted_run_says_so_and_how_to_go_on() -> None:
    run = make_run(complete=False)
    *_, command, _replay, _page = printed(run).splitlines()
    assert "INCOMPLETE" in printed(run)
    assert command.endswith(run.header.command)
    assert "INCOMPLETE" not in printed(make_run())
    resumable = make_run(complete=False, header=make_header(request={"seed": 0}, time_limit=None))
    *_, command, _replay, _page = printed(resumable).splitlines()
    assert command == f"  go on with it: python -m verifier run --resume {resumable.header.id}"


def test_our_own_errors_are_not_hidden() -> None:
    text = printed(make_run(tool_errors=["Traceback\nIndexError: [0] :bug:"]))
    assert "  IndexError: [0] :bug:\n" in text
    assert "1 tool error" in text


def test_beyond_twenty_new_findings_get_a_line_each() -> None:
    run = make_long_run(25)
    text = printed(run)
    assert all(finding.fingerprint in text for finding in run.findings)
    assert text.count("likely: padding_idx") == 20


def test_numbers_add_up_and_only_pass_counts_as_passed() -> None:
    run = make_run(counts=dict.fromkeys(OUTCOMES, 1), trials=len(OUTCOMES))
    total = totals(run)
    assert (total.passed, total.unsupported, total.inconclusive, total.tool_errors) == (1, 1, 1, 1)
    assert total.failed == len(OUTCOMES) - 4
    assert total.concluded == total.passed + total.failed


def test_rules_that_never_ran_are_named() -> None:
    rules = ["R, R", *(f"S({dim}), R" for dim in range(8))]
    run = make_run(
        rule_coverage={
            EMBEDDING: RuleCoverageRecord(rules, ["R, R"]),
            RENORM: RuleCoverageRecord(["P(sum)", "R"], ["R"]),
            "aten.neg.default": RuleCoverageRecord(["R"], ["R"]),
        }
    )
    lines = printed(run).splitlines()
    at = lines.index("3 of 12 rules that DTensor claims of these calls ran on a mesh")
    assert lines[at + 1 : at + 4] == [
        f"  {EMBEDDING}: 8 of 9 never: {'; '.join(rules[1:7])} and 2 more",
        f"  {RENORM}: 1 of 2 never: P(sum)",
        "",
    ]
    assert "rules that DTensor claims" not in printed(make_run())


def test_edges_that_no_redistribution_took_are_counted() -> None:
    edges = {"1": EdgeCoverageRecord(132, ["R -> S(0)", "S(0) -> R"], ["P(max) -> P(min)"])}
    edges["2"] = EdgeCoverageRecord(132, [], [])
    lines = printed(make_run(edge_coverage=edges)).splitlines()
    first, second = (line for line in lines if "edges between placements" in line)
    assert first.startswith("2 of 132 edges between placements exercised on 1-d meshes, 1 only refused by DTensor")
    assert first.endswith(", 129 never asked for")
    assert second.startswith("0 of 132 edges between placements exercised on 2-d meshes, 0 only refused by DTensor")
    assert second.endswith(", 132 never asked for")
    assert "edges between placements" not in printed(make_run())


def test_a_rule_check_is_summed_up_and_not_listed_op_by_op() -> None:
    text = printed(make_rules_run())
    lines = text.splitlines()
    assert lines[1] == "rules of 5 ops on mesh 2, 3, 2x2, float64, 3 sizes"
    assert "  3 missing in 2 ops; in 1 of them DTensor refuses the call" in lines
    assert "nothing was tested\n" not in text
    assert not any(line.startswith("aten.") for line in lines)
    assert text.count("the local call raises") == 1
    assert text.count("reproduce: python -m verifier replay 5eed5eed01") == 2
    assert "WRONG_VALUE 5eed5eed01, found at level 1, confirmed on gloo, 2 ranks" in lines


def test_two_levels_are_summed_up_one_after_the_other() -> None:
    lines = printed(join_levels(make_run(), make_rules_run())).splitlines()
    table = [line.split()[0] for line in lines if line.startswith("aten.")]
    assert table == [EMBEDDING, "aten.embedding_dense_backward.default", RENORM]
    assert "rules of 5 ops on mesh 2, 3, 2x2, float64, 3 sizes" in lines
    assert any("not reached: aten.embedding.default on mesh 2x2x2" in line for line in lines)


def test_the_command_at_the_end_has_the_options_of_the_finding() -> None:
    finding = replace(make_run().findings[0], imports=["my rules.py"], rank_memory="1GiB")
    command = f"python -m verifier replay {finding.fingerprint} --import 'my rules.py' --rank-memory 1GiB"
    assert replay_command(finding) == command
    assert replay_command(finding, Path("nights")) == f"{command} --out nights"


def test_refusals_that_differ_in_numbers_only_are_one_line() -> None:
    reasons = {"dim 0 of 3 is cut by conv2d": 2, "dim 1 of 3 is cut by conv2d": 3, "dim 1 of 3 is cut by conv1d": 1}
    lines = [line.split() for line in printed(make_run(unsupported=reasons)).splitlines() if "unsupported:" in line]
    assert [(line[0], line[9]) for line in lines] == [("5", "conv2d,"), ("1", "conv1d")]
    assert " ".join(lines[0]).endswith("and 1 line like it with other numbers")
