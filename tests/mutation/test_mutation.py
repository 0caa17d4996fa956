"""Mutants of a strategy file: each ends as it should, also one that ends its worker."""

from __future__ import annotations

import ast
import sys
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed.tensor import _redistribute as redistribute
from torch_versions import torch_is

from strategies.opinfo.source import SOURCE
from verifier.campaign.request import Request, make_plan
from verifier.cli.main import main
from verifier.core.case import MeshSpec
from verifier.core.errors import ReportedError
from verifier.core.parts import RunPart
from verifier.gate.baseline import Baseline
from verifier.mutation.campaign import MutationOptions, run_mutants
from verifier.mutation.journal import Journal, Question, joined, question_of, read_journal
from verifier.mutation.mutants import KEY, TABLE, Mutant, installed, mutants_of_files, mutants_of_registrations
from verifier.mutation.operators import OPERATORS, edits_of
from verifier.mutation.outcomes import Kind, MutationRun, Outcome
from verifier.mutation.ranks import RankTrials
from verifier.mutation.text import mutation_lines
from verifier.rules.campaign.request import RulesRequest, make_rules_plan
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions, Target, installed_sources
from verifier.torch_internals.amending.mutating import NotInstallableError, files_of_torchs_rules

STRATEGIES = """
import os

from torch import ops
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


def end(now):
    while now:
        os.abort()


@register_sharding(ops.aten.relu.default)
def relu(x):
    rules = [([Replicate()], [Replicate()])]
    end(now=False)
    for dim in range(x.ndim):
        rules.append(([Shard(dim)], [Shard(dim)]))
    return rules + [([Partial("max")], [Partial("max")])]


@register_sharding(ops.aten.neg.default)
def neg(x):
    if x.ndim > 90:
        return [([Shard(1)], [Shard(1)])]
    first = 0 if x.ndim >= 0 else 0
    return [([Shard(dim)], [Shard(dim)]) for dim in range(first, x.ndim)]
"""


@pytest.fixture
def made(tmp_path: Path, rules_taken_back: None) -> MutationRun:
    file = tmp_path / "mutated_strategies.py"
    file.write_text(STRATEGIES)
    plan = make_rules_plan(RulesRequest(imports=[str(file)], world_sizes="2", max_samples=2, sizes=1), Baseline())
    options = MutationOptions(most=None, seed=0, samples=3, jobs=1)
    return run_mutants(plan, [str(file.resolve())], True, options, lambda *_: None)


def outcomes(run: MutationRun, before: str, after: str) -> list[Outcome]:
    return [one for one in run.outcomes if (one.mutant.before, one.mutant.after) == (before, after)]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*DTensor keeps its own rule beside one:UserWarning")
def test_each_mutant_of_a_file_ends_as_it_should(made: MutationRun) -> None:
    assert (made.errors, made.no_programs) == ([], [])
    assert len(made.outcomes) == made.candidates > 30
    reduce_kinds = [one for one in made.outcomes if one.mutant.operator == "reduce kind"]
    assert [one.kind for one in reduce_kinds] == [Kind.CAUGHT, Kind.CAUGHT]
    assert "aten.relu.default: P(" in reduce_kinds[0].why
    # x.ndim is never below 0, so that both branches make the same rules
    assert {one.kind for one in outcomes(made, "x.ndim >= 0", "x.ndim > 0")} == {Kind.SAME}
    line = STRATEGIES.split("\n").index("        return [([Shard(1)], [Shard(1)])]") + 1
    unreached = [one for one in made.outcomes if one.mutant.line == line]
    assert {(one.kind, one.why) for one in unreached} == {(Kind.SURVIVED, "no sample reaches the line")}
    dropped = outcomes(made, "rules.append(([Shard(dim)], [Shard(dim)]))", "pass")
    assert [one.kind for one in dropped] == [Kind.FEWER]
    ended = outcomes(made, "False", "True")
    assert [(one.kind, one.verdict) for one in ended] == [(Kind.CAUGHT, "DIED")]
    lines = list(mutation_lines(made))
    assert sum("no sample reaches the line" in line for line in lines) == len(unreached) + 1  # os.abort()
    assert f"{made.candidates} of {made.candidates} mutants tried" in lines[-1]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*DTensor keeps its own rule beside one:UserWarning")
def test_ranks_tell_a_mutant_and_forget_it(tmp_path: Path, rules_taken_back: None) -> None:
    file = tmp_path / "strategies_on_ranks.py"
    file.write_text(STRATEGIES)
    request = Request((), ["2"], imports=[str(file)], jobs=1, max_examples=2)
    mutants = {(one.before, one.after): one for one in mutants_of_files([str(file.resolve())])}
    of_kinds = next(one for one in mutants.values() if one.operator == "reduce kind")
    with pytest.raises(NotInstallableError), installed(of_kinds):  # the file is not imported as yet
        pass
    with closing(RankTrials(make_plan(request, Baseline()))) as ranks:
        wrong = ranks.attempt(of_kinds, ["nn.functional.relu"])
        assert (wrong.verdict, wrong.trials > 0) == ("WRONG_VALUE", True)
        assert wrong.why.startswith("aten.relu.default, self=f64")
        alike = ranks.attempt(mutants["x.ndim >= 0", "x.ndim > 0"], ["neg"])
        assert (alike.verdict, alike.trials > 0) == ("", True)


def _some(mutant: Mutant, kind: Kind) -> Outcome:
    return Outcome(mutant, kind, "", "because", ("neg",), 1, 0, 0)


def test_a_file_of_outcomes_is_gone_on_with(tmp_path: Path) -> None:
    source, path = tmp_path / "source.py", tmp_path / "mutants.jsonl"
    source.write_text(STRATEGIES)
    first, second, *_ = mutants_of_files([str(source)])

    def question(seed: int = 0, shard: str | None = None) -> Question:
        return question_of([], [str(source)], [], seed, None, 3, 2, shard)

    run = MutationRun(candidates=7)
    with closing(Journal(str(path), question())) as journal:
        assert journal.run.outcomes == []
        journal.note(run, _some(second, Kind.SURVIVED))
        journal.note(run, _some(first, Kind.SAME))
        journal.note(run, _some(second, Kind.CAUGHT))
    with path.open("a") as file:
        file.write('{"candidates": 7, "outco')  # the process was killed here
    with closing(Journal(str(path), question())) as journal:
        assert journal.run.outcomes == [_some(first, Kind.SAME), _some(second, Kind.CAUGHT)]
        journal.note(run, _some(first, Kind.FEWER))
    assert [one.kind for one in read_journal(str(path))[1].outcomes] == [Kind.FEWER, Kind.CAUGHT]
    with pytest.raises(ReportedError, match="seed 0, not 1"):
        Journal(str(path), question(seed=1))
    with pytest.raises(ReportedError, match="shard all, not 1/2"):
        Journal(str(path), question(shard="1/2"))
    source.write_text(STRATEGIES + "\n")
    with pytest.raises(ReportedError, match="the changed files differ"):
        Journal(str(path), question())


def test_files_of_shards_are_put_together(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(STRATEGIES)
    mutants = mutants_of_files([str(source)])
    options = [MutationOptions(6, 0, 3, 1, RunPart(index, 2)) for index in (1, 2)]
    parts = [one.part(mutants) for one in options]
    assert sorted(parts[0] + parts[1]) == MutationOptions(6, 0, 3, 1).part(mutants)
    paths = [str(tmp_path / f"{index}.jsonl") for index in (1, 2, 3)]
    for index, (path, part) in enumerate(zip(paths, [*parts, []], strict=True), 1):
        question = question_of([], [str(source)], [], 0, 6 if index < 3 else 5, 3, 2, f"{index}/2")
        with closing(Journal(path, question)) as journal:
            for mutant in part:
                journal.note(MutationRun(candidates=len(mutants)), _some(mutant, Kind.CAUGHT))
    made = joined(paths[:2])
    assert made.candidates == len(mutants)
    assert [one.mutant for one in made.outcomes] == sorted(mutants[:6])
    with pytest.raises(ReportedError, match=r"another question .*: most 6, not 5"):
        joined(paths)
    Path(paths[0]).write_text("no JSON\n")
    with pytest.raises(ReportedError, match="line 1: no outcome of mutants"):
        joined(paths[:2])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["aten.no_such_op"], "no OpInfo and no aten overload with a rule matches 'aten.no_such_op'"),
        (["--max", "0"], "--max 0: must be at least 1"),
        (["--jobs", "1000"], "--jobs 1000: must be from 1 to 256"),
        (["no_such_file.py"], "there is no file"),
        (["--level", "3"], "--level 3: must be 1 or 2"),
        (["--shard", "3/2"], "--shard 3/2: shards are counted from 1"),
        (["--join", "no_such_file.jsonl"], "no_such_file.jsonl: No such file"),
        (["--join", "one.jsonl", "--out", "two.jsonl"], "--join: takes no ops, no --out"),
        ([redistribute.__file__, "--level", "1"], "is tried by itself, and on ranks"),
    ],
)
def test_usage_errors(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["verifier", "mutate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_each_operator_changes_one_node_and_takes_it_back() -> None:
    source = '''
def strategy(op, dim, keepdim):
    """A docstring."""
    dim = normalize_dim(dim, op.ndim)
    if keepdim and is_tensor_shardable(op.shape, spec) and op.shape[0] < max(op.shape):
        specs.append(use(Shard(dim + 1), keepdim=True))
    return [Partial(), Partial("sum"), Replicate(), Shard(dim)], add(1)
'''
    tree = ast.parse(source)
    edits = edits_of(tree)
    assert {edit.operator for edit in edits} == set(OPERATORS) - {KEY, TABLE}
    before = ast.unparse(tree)
    for edit in edits:
        undo = edit.apply()
        changed = ast.unparse(tree)
        compile(tree, "strategy", "exec")
        undo()
        assert changed != before
        assert ast.unparse(tree) == before


def check(op: str) -> tuple[int, int]:
    """Return how many wrong rules and how many stale decisions samples of ``op`` show now."""
    source = installed_sources()["opinfo"]
    (target,) = source.select([op])
    options = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True)
    samples = source.samples(target, SampleOptions(max_samples=4, rare=False))
    reports = [check_sample(sample, options) for sample in samples if not sample.not_testable]
    return sum(len(report.wrong) for report in reports), sum(len(report.stale) for report in reports)


if torch_is("<2.14"):
    RAISES = "select_int_strategy", "2", "3"
    KEEPS_THE_DIM = "select_int_strategy", "input_specs.is_sharded()", "False"
    TAKES_NEGATIVE = "gen_slice_scatter_strategy", "normalize_dim(slice_dim, input_ndim)", "slice_dim"
else:  # strategies for one mesh dim have taken the place of those for whole meshes
    RAISES = "select_int_single_dim_strategy", "0", "1"
    KEEPS_THE_DIM = "select_int_single_dim_strategy", "dim == selected_dim", "False"
    TAKES_NEGATIVE = "slice_scatter_single_dim_strategy", "normalize_dim(dim, len(input_meta.shape))", "dim"


def in_torch(file: str, function: str, before: str, after: str) -> Mutant:
    files = [one for one in files_of_torchs_rules() if one.endswith(file)]
    found = [
        one for one in mutants_of_files(files) if (one.function, one.before, one.after) == (function, before, after)
    ]
    assert len(found) == 1
    return found[0]


def test_a_strategy_that_raises_for_replicated_arguments_is_a_crash() -> None:
    mutant = in_torch("_tensor_ops.py", *RAISES)
    assert check("aten.select.int")[0] == 0
    with installed(mutant):
        assert check("aten.select.int")[0] > 0


def test_a_mutant_of_torchs_source_decides_only_inside_the_block() -> None:
    mutant = in_torch("_tensor_ops.py", *KEEPS_THE_DIM)
    before = check("aten.select.int")
    with installed(mutant):
        assert check("aten.select.int")[0] > before[0]
    assert check("aten.select.int") == before


@pytest.mark.parametrize(
    ("op", "file", "function", "before", "after", "telling"),
    [
        ("slice_scatter.default", "_tensor_ops.py", *TAKES_NEGATIVE, "dim=-"),
        ("index_put.default", "_tensor_ops.py", "index_put_single_dim_strategy",
         "contiguous_indexed and indexed_dims_sorted", "indexed_dims_sorted", "indices on dims 0, 2"),
        ("constant_pad_nd.default", "_matrix_ops.py", "constant_pad_nd_single_dim_strategy",
         "i * 2 + 1", "i * 2 - 1", "pad="),
    ],
)  # fmt: skip
def test_inputs_that_tell_a_mutant_are_drawn(
    op: str, file: str, function: str, before: str, after: str, telling: str
) -> None:
    target, options = Target(f"aten.{op}", "opinfo", f"aten.{op}"), CheckOptions((MeshSpec((2,)),), 1, claims_only=True)
    samples = [one for one in SOURCE.samples(target, SampleOptions()) if telling in one.origin]
    with installed(in_torch(file, function, before, after)):
        assert any(check_sample(sample, options).wrong for sample in samples)
    assert samples
    assert not any(check_sample(sample, options).wrong for sample in samples)


def test_a_pending_value_that_a_mask_puts_into_a_shard_is_caught() -> None:
    file = next(one for one in files_of_torchs_rules() if one.endswith("_tensor_ops.py"))
    found = [
        one for one in mutants_of_files([file])
        if (one.function, one.before, one.after) == ("index_put_single_dim_strategy", "Replicate()", "Partial()")
    ]  # fmt: skip
    options = CheckOptions((MeshSpec((2,)),), 1, claims_only=True, samples_called_again=0)
    samples = SOURCE.samples(Target("index_put", "opinfo"), SampleOptions())
    masked = [one for one in samples if "without its first dim" in one.origin and one.op == "aten.index_put.default"]
    assert masked
    with installed(found[0]):  # for values that lack the dim
        wrong = [one for sample in masked for one in check_sample(sample, options).wrong]
    assert {one.rule.inputs[-1] for one in wrong} == {"P(sum)"}


def test_mutants_of_registrations_are_caught() -> None:
    key, *_ = (one for one in mutants_of_registrations(["aten.select.int"]) if one.operator == KEY)
    _, before = check("aten.select.int")
    with installed(key):
        assert check("aten.select.int")[1] > before
    mutants = mutants_of_registrations(["aten.exp.default"])
    table = next(one for one in mutants if one.operator == TABLE and "neg" in one.after)
    wrong, _ = check("aten.exp.default")
    with installed(table):
        assert check("aten.exp.default")[0] > wrong
    assert check("aten.exp.default")[0] == wrong
