"""What level 1 says is shown whole, escaped and capped, and untested is never green: as text, for GitHub, as HTML."""

from __future__ import annotations

import html as html_escaping
import re
from dataclasses import fields
from pathlib import Path

import pytest
from run_factory import (
    BY_LEVEL_1,
    ODD,
    RENORMED,
    SUM,
    make_empty_run,
    make_finding,
    make_missing_rule,
    make_op_rules,
    make_rules,
    make_rules_run,
    make_run,
    make_wrong_rule,
)

from verifier.records.schema import (
    ConfirmationRecord,
    MissingRuleRecord,
    OpRulesRecord,
    RulesRecord,
    RunRecord,
    TransferRecord,
    UntestedRecord,
    WrongRuleRecord,
)
from verifier.report.github import MOST_MISSING as MOST_ANNOTATED
from verifier.report.github import github_lines
from verifier.report.html import banners, render_html
from verifier.report.missing import by_worth, folded
from verifier.report.rules_html import MOST_CONFIRMED, MOST_MISSING, rules_view
from verifier.report.rules_text import header_line, op_lines, quiet_lines, saves_text, state_text, total_lines
from verifier.report.words import counted, evidence_text, level_1_only, totals
from verifier.runs.merging import join_levels

DOCS = Path(__file__).parents[2] / "docs" / "reference"


# ---------------------------------------------------------------------------------------------------------------- text
def test_numbers_stand_beneath_their_heads() -> None:
    header = header_line()
    line = op_lines("sum", make_op_rules(untested={"the local call raises": 12}))[0]
    for head, number in (("combinations", "1,480"), ("confirmed", "3"), ("not tested", "12"), ("seconds", "0.84")):
        end = header.index(head) + len(head)
        assert line[:end].endswith(f" {number}")
    assert line[len(header) :] == "  not tested: 12 the local call raises"


def test_wrong_rule_says_difference_call_evidence_and_command_in_this_order() -> None:
    _, *lines = op_lines("renorm", make_op_rules(wrong=[make_wrong_rule(message="output [0, 1]: got 0.5\n  more")]))
    assert lines == [
        "  WRONG_VALUE output [0, 1]: got 0.5",
        "    in aten.renorm.default([5, 4], 2.0, -2, 1.0) with S(0) → S(0) on mesh (2,)",
        "    found at level 1, confirmed on gloo, 2 ranks",
        "    reproduce: python -m verifier replay 5eed5eed01",
    ]


def test_commands_that_run_a_wrong_rule_again_import_what_its_run_did() -> None:
    run = make_rules_run()
    run.header.imports = ["strategies.install", "my rules.py"]
    options = " --import strategies.install --import 'my rules.py'"
    lines = [*op_lines("renorm", make_op_rules(wrong=[make_wrong_rule()]), run.header.imports), *github_lines(run)]
    assert run.rules is not None
    lines += total_lines(run.rules, run.header.imports)
    told = [line for line in lines if "replay 5eed5eed01" in line]
    assert len(told) == 3, "the rule, its annotation, what to do next"
    assert all(f"python -m verifier replay 5eed5eed01{options}" in line for line in told)
    run.findings.clear()  # or the page leads to the finding, which has the command
    assert f"reproduce: <code>python -m verifier replay 5eed5eed01{options}" in html_escaping.unescape(render_html(run))


def test_products_that_follow_from_a_wrong_rule_are_counted_and_not_annotated() -> None:
    products = [
        make_wrong_rule(mesh=mesh, input_placements=[both], output_placements=[both],
                        confirmed=ConfirmationRecord("not tried", why="aten.renorm.default: S(0) -> S(0) is wrong"))
        for mesh, both in (("2x2", "(R, S(0))"), ("2x3", "(S(0), R)"))
    ]  # fmt: skip
    op = make_op_rules(wrong=[make_wrong_rule(), *products])
    first, *lines = op_lines("renorm", op)
    assert first.split()[3] == "3"
    folded_line = (
        "  5eed5eed01 makes 2 products wrong as well: (R, S(0)) -> (R, S(0)) on mesh 2x2, and 1 more in run.json"
    )
    assert lines[4:5] == [folded_line]
    assert not any("not tried" in line for line in lines)
    run = make_rules_run()
    run.rules = make_rules(ops={"renorm": op})
    assert sum("wrong rule in" in line for line in github_lines(run)) == 1
    assert "found at level 1, confirmed on gloo, 2 ranks" in str(github_lines(run))
    page = html_escaping.unescape(render_html(run))
    assert "2 products of these rules on several mesh dims, wrong as well" in page
    assert "found at level 1, not tried: aten.renorm.default: S(0) -> S(0) is wrong" in page
    assert len(quiet_lines(run.rules)) == 1 + 4


def test_known_wrong_rule_is_one_line_and_an_unconfirmed_one_accuses_nobody() -> None:
    unsure = make_wrong_rule("", confirmed=ConfirmationRecord("unconfirmed", why="gloo cannot run it"))
    first, *lines = op_lines("renorm", make_op_rules(wrong=[make_wrong_rule(known=True)], unconfirmed=[unsure]))
    assert first.endswith("1 known; 1 unconfirmed")
    assert lines[0].startswith("  known 5eed5eed01 WRONG_VALUE in aten.renorm.default(")
    assert lines[3:] == ["    unconfirmed: gloo cannot run it"]


def test_missing_rules_are_capped_and_those_that_save_most_come_first() -> None:
    op = make_op_rules(missing=[make_missing_rule(number, op=f"aten.sum{number}.default") for number in range(9)])
    _, *lines = op_lines("sum", op)
    assert lines[0] == (
        "  missing: S(8) -> P(sum) in aten.sum8.default([6, 4], [0], True); held in 24 draws over 3 sizes; "
        "saves 1 all_gather, 488 B: worth having if the result, which is reduced later, is smaller than what is "
        "gathered now"
    )
    assert lines[6:] == ["  and 3 more in run.json"]


def test_missing_rules_that_differ_in_dims_or_overloads_alone_are_one() -> None:
    def rule(inputs: list[str], outputs: list[str], **changes: object) -> MissingRuleRecord:
        return make_missing_rule(input_placements=inputs, output_placements=outputs, **changes)

    rules = [
        rule(["S(0)", "S(1)"], ["S(0)"], bytes_saved=8),
        rule(["S(1)", "S(2)"], ["S(1)"], bytes_saved=16, op="aten.sum_.default"),
        rule(["S(1)", "S(1)"], ["S(1)"], bytes_saved=4),
        rule(["P(sum)"], ["P(sum)"], bytes_saved=99),
        rule(["P(max)"], ["P(max)"], bytes_saved=2),
        rule(["S(3)"], ["S(3)"], bytes_saved=0, saves=[]),
    ]
    found = folded(rules)
    assert [(one.text, one.rules, one.overloads, one.best.bytes_saved) for one in found] == [
        ("P(sum) -> P(sum)", 1, 1, 99),
        ("S(d), S(d + 1) -> S(d) for d = 0, 1", 2, 2, 16),
        ("S(1), S(1) -> S(1)", 1, 1, 4),
        ("P(max) -> P(max)", 1, 1, 2),
        ("S(3) -> S(3)", 1, 1, 0),
    ]
    assert [one.worth.partition(":")[0] for one in found] == [
        "puts a reduction off, which a later op may need all the same", "worth having", "worth having",
        "seldom of use", "worth having",
    ]  # fmt: skip


def test_what_a_missing_rule_saves() -> None:
    gather = TransferRecord(0, "S(0)", "R", "all_gather", 480)
    reduce = TransferRecord(1, "P(sum)", "R", "all_reduce", 1024)
    both = make_missing_rule(saves=[gather, gather, reduce], collectives_saved=3, bytes_saved=1984)
    refused = make_missing_rule(saves=[], collectives_saved=0, bytes_saved=0)
    assert saves_text(both) == "saves 2 all_gather and 1 all_reduce, 1.9 KiB"
    assert saves_text(refused) == "DTensor refuses this call"
    assert by_worth([refused, make_missing_rule(), both]) == [both, make_missing_rule(), refused]


def test_rule_on_several_mesh_dims_and_call_without_tensors_are_written() -> None:
    rule = make_wrong_rule(mesh="2x2", input_placements=[], shapes=[], arguments="[2,\n 3]")
    assert state_text(rule) == "aten.renorm.default([2, 3]) with () → S(0) on mesh (2, 2)"


def test_op_in_which_nothing_was_tested_says_so_and_why() -> None:
    (line,) = op_lines("bernoulli", make_rules().ops["bernoulli"])
    assert line.endswith("nothing tested; not tested: aten.bernoulli.default (it draws random numbers)")
    (uncalled,) = op_lines("neg", make_op_rules(samples=0, combinations=0, confirmed=[]))
    assert "has no samples, so nothing was tried" in uncalled
    (many,) = op_lines("neg", make_op_rules(untested={"a": 3, "b": 2, "c": 1, "d": 1}))
    assert many.endswith("not tested: 3 a; 2 b; 2 more reasons")


def test_totals_add_up_and_name_everything_that_was_not_tested() -> None:
    assert total_lines(make_rules()) == [
        "rules of 5 ops on mesh 2, 3, 2x2, float64, 3 sizes",
        "  5,920 combinations in 4.0 s of checking, 1,480 a second, 2 jobs; 1.5 s starting, 2.5 s confirming",
        "  8 confirmed in 4 ops",
        "  2 wrong in 1 op, 1 of them known",
        "  1 accused, but unconfirmed in 1 op",
        "  3 missing in 2 ops; in 1 of them DTensor refuses the call",
        "  1 true but for special values in 1 op",
        "  1 inconclusive in 1 op",
        "not tested: 17 combinations and 1 overload in 2 ops",
        "  12 the local call raises",
        "   4 it draws random numbers",
        "   1 DIED: it ended the process",
        "nothing tested in 1 op: bernoulli",
        "died: 1 combination ended a worker in 1 op",
        "  renorm, sample 3: SIGSEGV: double free or corruption",
        "new: 5eed5eed01 WRONG_VALUE in aten.renorm.default([5, 4], 2.0, -2, 1.0) with S(0) → S(0) on mesh (2,)",
        "next: python -m verifier replay 5eed5eed01 runs the first wrong rule again; fix it, or accept it: "
        "python -m verifier gate --update",
        "next: unconfirmed findings do not fail the gate; see the reason given for each",
        "next: python -m verifier report shows every op's missing rules, and what each would save",
    ]


def test_brief_totals_fit_a_screen_with_what_is_new_and_what_to_do_next() -> None:
    many = [make_wrong_rule(fingerprint=f"5eed5eed{number:02}") for number in range(40)]
    untested = {f"reason {'x' * number}": 40 - number for number in range(40)}
    op = make_op_rules(
        wrong=many, untested=untested, died=[f"renorm, sample {number}: SIGSEGV" for number in range(40)]
    )
    lines = total_lines(make_rules(ops={"renorm": op}), brief=True)
    assert len(lines) < 30
    assert sum(line.startswith("new: 5eed5eed") for line in lines) == 5
    assert "new: 35 more, listed above" in lines
    assert "  and 35 more reasons in run.json" in lines
    assert any(line.startswith("next: python -m verifier replay 5eed5eed00") for line in lines)


def test_quiet_lines_have_what_is_new_and_one_line_of_totals() -> None:
    *new, last = quiet_lines(make_rules())
    assert last == "5 ops: 8 confirmed, 2 wrong, 1 of them known, 3 missing"
    assert new[-1] == "    reproduce: python -m verifier replay 5eed5eed01"
    assert not any("known" in line for line in new)


def test_totals_say_whether_all_wrong_rules_are_known() -> None:
    lines = total_lines(make_rules(ops={"renorm": make_op_rules(wrong=[make_wrong_rule(known=True)])}))
    assert "  1 wrong in 1 op, all known" in lines
    assert lines[-1].startswith("next: python -m verifier run, for what level 1 cannot see")


@pytest.mark.parametrize("ops", [{}, {"bernoulli": make_rules().ops["bernoulli"]}], ids=["no op", "not testable"])
def test_totals_of_a_check_that_tested_nothing_say_so(ops: dict[str, OpRulesRecord]) -> None:
    lines = total_lines(make_rules(ops=ops, combinations=0, seconds=0.0))
    assert "next: nothing was tested, so nothing is proved: see above why, then run again" in lines
    assert "  0 confirmed" in lines


def test_claims_only_does_not_say_that_no_rule_is_missing() -> None:
    lines = total_lines(make_rules(ops={"neg": make_op_rules()}, claims_only=True))
    assert "  missing rules were not looked for: claims only" in lines
    assert not any(line.strip().startswith("0 missing") for line in lines)


# -------------------------------------------------------------------------------------------------------------- github
def test_each_kind_of_result_has_its_kind_of_annotation() -> None:
    lines = github_lines(make_rules_run(tool_errors=["KeyError: 'x'"]))
    kinds = [re.match(r"::(\w+) title=([^:,]*)::", line) for line in lines]
    assert [match.groups() for match in kinds if match] == [
        ("error", "the verifier itself failed"),
        ("error", f"wrong rule in {RENORMED}"),
        ("warning", f"unconfirmed%3A rule of {SUM}"),
        ("notice", "missing rule in aten.mean.dim"),
        ("notice", f"missing rule in {SUM}"),
        ("notice", f"missing rule in {SUM}"),
        ("notice", "rule check (level 1)"),
    ]
    assert "5eed5eed02" not in "".join(lines), "it is known"
    assert "not tested: 17 combinations" in lines[-1]


def test_workflow_commands_are_escaped() -> None:
    odd = make_wrong_rule(
        op="aten.a,b:c%",
        message="100% \r wrong",
        arguments="x\ny",
        confirmed=ConfirmationRecord("unconfirmed", why="a\nb::error::c"),
    )
    (line, _) = github_lines(make_rules_run(make_rules(ops={"odd": make_op_rules(wrong=[odd])})))
    assert line.startswith(
        "::error title=wrong rule in aten.a%2Cb%3Ac%25::WRONG_VALUE 100%25 %0D wrong%0Ain aten.a,b:c%25"
    )
    assert not set("\r\n") & set(line)
    assert "%0Ab::error::c%0A" in line


def test_missing_rules_are_capped_and_the_rest_is_counted() -> None:
    missing = [make_missing_rule(number) for number in range(MOST_ANNOTATED + 7)]
    twice = {"sum": make_op_rules(missing=missing), "also sum": make_op_rules(missing=missing)}
    *lines, summary = github_lines(make_rules_run(make_rules(ops=twice)))
    assert len(lines) == MOST_ANNOTATED
    assert "S(56) -> P(sum)" in lines[0]
    assert summary.endswith("%0A7 more missing rules in run.json")


def test_one_finding_is_annotated_once_and_a_run_on_meshes_not_at_all() -> None:
    same = [make_wrong_rule(shapes=[[n, 4]]) for n in (5, 6)]
    lines = github_lines(make_rules_run(make_rules(ops={"renorm": make_op_rules(wrong=same)})))
    assert len(lines) == 2
    assert github_lines(make_run()) == []


# ---------------------------------------------------------------------------------------------------------------- html
def rules_section(run: RunRecord) -> str:
    """Return the text of the page's section on level 1, without its tags."""
    (section,) = re.findall(r'<section aria-labelledby="rules">.*?</section>', render_html(run), re.DOTALL)
    return html_escaping.unescape(re.sub(r"<[^>]*>", "", section))


def test_page_shows_every_kind_of_result() -> None:
    page, text = render_html(make_rules_run()), rules_section(make_rules_run())
    for finding in ("5eed5eed01", "5eed5eed02"):
        assert f'href="#finding-{finding}"' in page
        assert f'id="finding-{finding}"' in page
    for shown in (
        "aten.renorm.default([5, 4], 2.0, -2, 1.0) with S(0) → S(0) on mesh (2,)",
        "found at level 1, unconfirmed: gloo cannot run it",
        "held in 24 draws over 3 sizes, in 3 samples",
        "saves 1 all_gather, 482 B",
        "DTensor refuses this call",
        "True but for special values",
        "aten.sum.dim_IntList: P(max) -> P(max)",
        "SIGSEGV: double free or corruption",
        "aten.bernoulli.default (it draws random numbers)",
        "12 the local call raises",
        "S(0) -> S(0)",
    ):
        assert shown in text


def test_page_lists_wrong_ops_first_then_missing_then_the_rest_folded() -> None:
    section = rules_section(make_rules_run())
    places = [section.index(f"\n{name}") for name in ("renorm", "sum", "mean", "bernoulli", "neg")]
    assert places == sorted(places)
    view = rules_view(make_rules_run())
    assert view is not None
    groups = [[op.name for op in group] for group in (view.wrong, view.missing, view.rest)]
    assert groups == [["renorm", "sum"], ["mean"], ["bernoulli", "neg"]]
    assert view.nothing == ("bernoulli",)


def test_page_escapes_whatever_a_rule_says() -> None:
    hostile = make_op_rules(
        overloads=[ODD],
        confirmed=[ODD],
        wrong=[
            make_wrong_rule(
                ODD,
                ODD,
                arguments=ODD,
                message=ODD,
                confirmed=ConfirmationRecord("confirmed", ODD, 2),
                output_placements=[ODD],
            )
        ],
        missing=[make_missing_rule(op=ODD, arguments=ODD, input_placements=[ODD])],
        special=[make_wrong_rule(message=ODD)],
        inconclusive=[ODD],
        untested={ODD: 1},
        not_testable={ODD: ODD},
        died=[ODD],
    )
    page = render_html(make_rules_run(make_rules(ops={ODD: hostile})))
    assert page.count("<script>") == 1
    assert page.count("&lt;script&gt;") > 20


def test_page_caps_what_it_shows_of_an_op() -> None:
    missing = [make_missing_rule(number) for number in range(MOST_MISSING + 5)]
    confirmed = [f"{SUM}: S({number}) -> R" for number in range(MOST_CONFIRMED + 3)]
    run = make_rules_run(make_rules(ops={"sum": make_op_rules(missing=missing, confirmed=confirmed)}))
    text = rules_section(run)
    assert text.count("saves 1 all_gather") == MOST_MISSING
    assert "5 more missing in run.json" in text
    assert "3 more confirmed in run.json" in text


def test_page_of_many_ops_stays_small() -> None:
    op = make_op_rules(missing=[make_missing_rule(n) for n in range(30)], confirmed=[f"{SUM}: R -> R"] * 60)
    ops = {f"nn.functional.op_{number}": op if number % 2 else make_op_rules() for number in range(700)}
    assert len(render_html(make_rules_run(make_rules(ops=ops))).encode()) < 3_000_000


def test_a_finding_of_level_1_says_so_once() -> None:
    page = render_html(make_rules_run())
    assert f"<dd>found at level 1, {BY_LEVEL_1.text}</dd>" in page
    assert "found at level 1, found" not in page
    assert '<span class="tag">level 1</span>' in page
    assert '<span class="tag">level 1</span>' not in render_html(make_run())


def tones(run: RunRecord) -> list[str]:
    return [banner.tone for banner in banners(run, totals(run))]


def test_untested_rules_are_never_green() -> None:
    def tone(**changes: object) -> list[str]:
        checked = make_rules(ops={"neg": make_op_rules(**changes)})
        return tones(make_rules_run(checked, findings=[], counts={"PASS": 3}, trials=3, untested=[]))

    assert tone() == ["pass"]
    assert tone(untested={"the local call raises": 1}) == ["open"]
    assert tone(not_testable={SUM: "it draws random numbers"}) == ["open"]
    assert tone(died=["SIGSEGV"]) == ["open"]
    assert tone(unconfirmed=[make_wrong_rule("", confirmed=ConfirmationRecord("unconfirmed"))]) == ["open", "open"]


def test_a_run_without_level_1_has_no_such_section() -> None:
    assert 'id="rules"' not in render_html(make_run())
    assert rules_view(make_empty_run()) is None


# --------------------------------------------------------------------------------------------------------------- words
def test_words_for_what_is_counted_follow_the_levels_of_the_run() -> None:
    joined = join_levels(make_run(), make_rules_run())
    words = [counted(run)[1] for run in (make_run(), make_rules_run(), joined)]
    assert words == ["trials", "rules", "trials and rules"]
    assert level_1_only(make_run()) == set()
    assert level_1_only(joined) == {SUM, RENORMED, "aten.mean.dim", "aten.neg.default"}


def test_what_both_levels_tried_stays_in_the_table_of_ops() -> None:
    both = make_rules_run(make_rules(ops={"embedding": make_op_rules(overloads=["aten.embedding.default"])}))
    assert level_1_only(join_levels(make_run(), both)) == set()


@pytest.mark.parametrize(
    ("confirmed", "unsure", "text"),
    [
        (ConfirmationRecord("unconfirmed"), True, "unconfirmed"),
        (ConfirmationRecord("unconfirmed", why="it passed"), True, "unconfirmed: it passed"),
        (BY_LEVEL_1, False, "confirmed on gloo, 2 ranks"),
    ],
)
def test_an_unconfirmed_finding_is_tagged(confirmed: ConfirmationRecord, unsure: bool, text: str) -> None:
    assert evidence_text(1, confirmed) == f"found at level 1, {text}"
    page = render_html(make_run(findings=[make_finding(confirmed=confirmed)]))
    assert ('<span class="tag warn">unconfirmed</span>' in page) is unsure


# ---------------------------------------------------------------------------------------------------------------- docs
@pytest.mark.parametrize(
    "record", [RulesRecord, OpRulesRecord, WrongRuleRecord, MissingRuleRecord, TransferRecord, UntestedRecord]
)
def test_the_prose_names_every_field(record: type) -> None:
    prose = (DOCS / "schema.md").read_text(encoding="utf-8").partition("## The rules\n")
    text = prose[0] if record is UntestedRecord else prose[2]
    assert [field.name for field in fields(record) if f"`{field.name}`" not in text] == []


def test_lines_that_no_call_reaches_are_in_sight() -> None:
    op = make_op_rules(unreached=["my_rules.py:3", "my_rules.py:14"])
    assert "no call reaches my_rules.py:3, 14" in "\n".join(op_lines("flip", op))
    run = make_rules_run()
    run.rules = make_rules(ops={"flip": op})
    shown = "No call reaches code of the strategy of <code>flip</code>: my_rules.py:3, my_rules.py:14."
    page = render_html(run)
    assert shown in page
    assert page.index(shown) < page.index('<details class="op">')  # which is folded
    run.rules = make_rules()
    assert "No call reaches" not in render_html(run)
