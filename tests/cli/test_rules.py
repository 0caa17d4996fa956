"""``python -m verifier rules`` from the command line to the recorded run, with real workers and real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Command

from verifier.cli.main import main
from verifier.gate.baseline import load_baseline
from verifier.records.schema import RunRecord
from verifier.rules.campaign.recorded import record_rules
from verifier.rules.campaign.request import RulesRequest, make_rules_plan
from verifier.runs.store import RunStore


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of one command."""
    monkeypatch.setattr(sys, "argv", ["verifier", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def recorded(folder: Path, *patterns: str, jobs: int = 1, **options: Any) -> RunRecord:
    request = RulesRequest(patterns, world_sizes="2", jobs=jobs, **options)
    return record_rules(
        make_rules_plan(request, load_baseline(folder / "none.toml", missing_ok=True)), RunStore(folder)
    )


@pytest.mark.processes
def test_json_has_what_scripts_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = run(
        capsys,
        monkeypatch,
        "rules",
        "nn.functional.embedding",
        "--world-size",
        2,
        "--max-samples",
        1,
        "--format",
        "json",
        "--out",
        tmp_path,
    )
    data = json.loads(out)
    assert status in (0, 1)  # torch's gradient of a table is wrong when it is scaled by frequency
    assert data["combinations"] > 1000
    assert data["seconds"] > 0
    op = data["ops"]["nn.functional.embedding"]
    wrong = {one["op"] for one in op["wrong"]}  # ranks cannot run the out= overload, whatever the placements are
    assert wrong <= {"aten.embedding_dense_backward.default", "aten.embedding_dense_backward.out"}
    assert "aten.embedding.default: S(1), R -> S(1)" in op["confirmed"]
    missing = {(tuple(m["input_placements"]), tuple(m["output_placements"])): m for m in op["missing"]}
    weight = missing[("P(sum)", "R"), ("P(sum)",)]
    assert weight["verdict"] == "MISSING"
    assert weight["draws"] >= 20
    assert weight["sizes"] >= 3
    assert weight["bytes_saved"] > 0
    assert weight["shapes"]


@pytest.mark.ranks
def test_an_empty_shard_is_found_confirmed_and_known_once_it_is_in_the_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = tmp_path / "baseline.toml"
    baseline.write_text("format_version = 1\n")
    command = ("rules", "aten.embedding.default", "--world-size", "3", "--claims-only", "--out", tmp_path)
    status, out, _ = run(capsys, monkeypatch, *command, "--baseline", baseline)
    assert status == 1
    assert "index_select(): self indexing axis dim should be positive" in out
    assert "found at level 1, confirmed on gloo, 3 ranks" in out
    (finding,) = (RunStore(tmp_path).newest() or pytest.fail("no run")).findings
    assert finding.level == 1
    assert finding.script_status == "fails as described"

    assert run(capsys, monkeypatch, "gate", "--baseline", baseline, "--update", "--out", tmp_path)[0] == 1
    baseline.write_text(baseline.read_text().replace("not explained yet", "the kernel refuses an empty shard"))
    status, out, _ = run(capsys, monkeypatch, *command, "--baseline", baseline)
    assert status == 0
    assert f"known {finding.fingerprint}" in out
    status, out, _ = run(capsys, monkeypatch, "gate", "--baseline", baseline, "--out", tmp_path)
    assert status == 0
    assert "1 known" in out


@pytest.mark.processes
def test_products_of_rules_are_tried_of_every_call_on_request(tmp_path: Path) -> None:
    """DTensor takes long to decide on meshes of several dims, so by default few are, of the first calls."""

    def tried(**options: Any) -> int:
        rules = recorded(
            tmp_path, "aten.neg.default", meshes=["2x2"], claims_only=True, max_samples=3, jobs=0, **options
        ).rules
        assert rules is not None
        return sum(op.combinations for op in rules.ops.values())

    none, few, all_of_them = tried(products=0), tried(), tried(products=1000)
    assert none < few < all_of_them


@pytest.mark.processes
def test_missing_rules_fail_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("rules", "aten.add.Tensor", "--world-size", 2, "--max-samples", 1, "--out", tmp_path)
    status, out, _ = run(capsys, monkeypatch, *command)
    assert status == 0
    assert "missing: R, P(max) -> P(max)" in out
    assert run(capsys, monkeypatch, *command, "--fail-on", "missing", "--format", "github")[0] == 1


@pytest.mark.processes
def test_the_verdicts_do_not_depend_on_the_number_of_jobs(tmp_path: Path) -> None:
    def verdicts(run: RunRecord) -> Any:
        assert run.rules is not None
        for op in run.rules.ops.values():
            op.seconds = 0
        return run.rules.ops

    ops = ("aten.sum.dim_IntList", "aten.neg.*", "aten.index_select.default")
    one, two, here = (recorded(tmp_path / str(jobs), *ops, jobs=jobs, max_samples=2, sizes=1) for jobs in (1, 2, 0))
    assert verdicts(one) == verdicts(two) == verdicts(here)


@pytest.mark.processes
def test_other_seeds_draw_other_values_and_come_to_the_same_rules(tmp_path: Path) -> None:
    first, second = (recorded(tmp_path / str(seed), "aten.mm.default", jobs=0, seed=seed, sizes=2) for seed in (0, 1))
    assert first.rules is not None
    assert second.rules is not None
    assert first.rules.ops["aten.mm.default"].confirmed == second.rules.ops["aten.mm.default"].confirmed


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_accuse_nobody(tmp_path: Path, dtype: str) -> None:
    # in a worker: some kernels end the process when they are fed parts of a float tensor
    run = recorded(tmp_path, "aten.mm.default", "softmax", "nn.functional.layer_norm", dtype=dtype, max_samples=3)
    assert run.rules is not None
    assert run.header.dtypes == [dtype]
    for op in run.rules.ops.values():
        assert op.confirmed
        assert [wrong for wrong in op.wrong if not wrong.fails] == []  # an out= call for which no rule is left raises
        assert not op.unconfirmed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nn.functional.embeding"], "did you mean 'nn.functional.embedding'?"),
        (["aten.embeding.default"], "aten.embedding"),
        (["add", "--world-size", "two"], "--world-size 'two' is not a list of numbers such as 2,3,4"),
        (["add", "--world-size", "1"], "--world-size 1: level 1 checks meshes of 2 to 16 ranks"),
        (["add", "--mesh", "2y2"], "mesh '2y2' is not a shape"),
        (["add", "--mesh", "simulated:2x2"], "level 1 runs no collectives"),
        (["add", "--mesh", "2x2+flat"], "level 1 runs no collectives, which a flattened mesh merges"),
        (["add", "--dtype", "float46"], "did you mean 'float64'?"),
        (["add", "--sizes", "0"], "--sizes 0: must be from 1 to 5"),
        (["add", "--max-samples", "0"], "--max-samples 0: must be at least 1"),
        (["add", "--products", "-1"], "--products -1: must be at least 0"),
        (["add", "--jobs", "-1"], "--jobs -1: must be from 1 to 256"),
        (["add", "--jobs", "257"], "--jobs 257: must be from 1 to 256"),
        (["add", "--import", "no/such/file.py"], "no/such/file.py"),
        (["add", "--import", "--quiet"], "--import --quiet: name a module or a file"),
        (["add", "--baseline", "no-such.toml"], "no-such.toml"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    status, out, err = run(capsys, monkeypatch, "rules", *arguments, "--out", tmp_path)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.processes
def test_nothing_is_wrong_with_all_remedies_in_force(tmp_path: Path) -> None:
    """A process of its own: what a dispatch mode makes of the first import of torch's test utilities is seen there."""
    options = ["--world-size", "2", "--sizes", "1", "--max-samples", "1", "--claims-only"]
    options += ["--baseline", str(tmp_path / "none.toml"), "--out", str(tmp_path)]
    (tmp_path / "none.toml").write_text("format_version = 3\n")
    for more, status in ([], 1), (["--import", "strategies.install_all"], 0):
        with Command(["-m", "verifier", "rules", "aten.nansum.default", *options, *more]) as command:
            assert command.wait() == status, command.printed()
