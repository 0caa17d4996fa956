"""``gate --import FILE`` without a pattern verifies all that the file registers at both levels, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_commands import run_module

from verifier.core.wording import NO_SAMPLES
from verifier.records.files import read_record

pytestmark = [pytest.mark.ranks, pytest.mark.cli, pytest.mark.long]

HEAD = """
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._ops.utils import register_op_strategy, replicate_op_strategy
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten
"""
WRONG = """
@register_single_dim_strategy(aten.exp.default)
def exp(op, args, kwargs):
    return [[Partial(), Partial()]]

"""
RIGHT = """
@register_sharding(aten.trunc.default)
def trunc(x):
    return [([Replicate()], [Replicate()]), *(([Shard(d)], [Shard(d)]) for d in range(x.ndim))]
"""
COMPLETE = """
@register_sharding(aten.trunc.default)
def trunc(x):
    same = [Replicate(), Partial("max"), Partial("min"), *map(Shard, range(x.ndim))]
    return [([one], [one]) for one in same]
"""
TAKE = """
@register_sharding(aten.take.default)
def take(x, index):
    shards = [([Shard(d)], [Replicate(), Shard(d)]) for d in range(index.ndim)]
    return [([Replicate()], [Replicate(), Replicate()]), *shards]
"""
CUSTOM = """
@torch.library.custom_op("gate_of_own_rules::double", mutates_args=())
def double(x: torch.Tensor, mode: str) -> torch.Tensor:
    return x * len(mode)


register_op_strategy(torch.ops.gate_of_own_rules.double.default)(replicate_op_strategy)
"""
"""No call of an op that takes a text can be made from its schema."""
SCALE = """
import verifier

@torch.library.custom_op("gate_of_own_rules::scale", mutates_args=())
def scale(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return rows * factors[:, None]

scale.register_fake(lambda rows, factors: torch.empty_like(rows))
S, R = Shard(0), Replicate()
"""
RIGHT_SCALE = "register_sharding(scale._opoverload)(lambda rows, factors: [([R], [R, R]), ([S], [S, S])])\n"
WRONG_SCALE = "register_sharding(scale._opoverload)(lambda rows, factors: [([R], [R, R]), ([S], [S, R])])\n"
EXAMPLES = """
@verifier.samples("gate_of_own_rules::scale")
def examples():
    yield torch.randn(8, 4), torch.randn(8)
"""

BAD_EXAMPLES = """
@verifier.samples("gate_of_own_rules::scale")
def examples():
    raise LookupError("no rows")
"""

ONE_MESH = ("--mesh", "2")
"""For level 2, which takes most of the time. Level 1 has its own meshes."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gate(project: Path, text: str, *arguments: str) -> tuple[int, str]:
    (project / "my_rules.py").write_text(HEAD + text)
    made = run_module("verifier", "gate", "--import", "my_rules.py", *arguments)
    assert "Traceback" not in made.stderr
    return made.returncode, made.stdout + made.stderr


def test_a_wrong_rule_is_found_and_nothing_else_is_verified(project: Path) -> None:
    status, said = gate(project, WRONG)
    assert status == 1, said
    new = [line for line in said.splitlines() if line.startswith("    in aten.")]
    assert any("aten.exp.default" in line for line in new), said
    verified = {op for path in project.glob("reports/runs/*/run.json") for op in read_record(path).counts_by_op}
    assert verified == {"aten.exp.default"}


def test_what_is_accepted_at_both_levels_passes_the_next_gate(project: Path) -> None:
    """An update tries on ranks what level 1 accuses: the next gate does, and other dtypes fail in their own way."""
    negative = """
@register_single_dim_strategy(aten.flip.default)
def flip(op, args, kwargs):
    return [[Shard(d), Shard(d)] for d in range(len(args[0].shape)) if d not in args[1]]
"""
    assert gate(project, negative, *ONE_MESH, "--update")[0] == 1
    known = project / "reports" / "baseline.toml"
    known.write_text(known.read_text().replace("not explained yet", "a test"))
    status, said = gate(project, negative, *ONE_MESH)
    assert status == 0, said


def test_true_rules_pass_and_an_op_without_samples_is_named(project: Path) -> None:
    status, said = gate(project, RIGHT + CUSTOM)
    assert status == 0, said
    assert f"gate_of_own_rules.double.default {NO_SAMPLES}" in said


def test_wrong_samples_of_one_op_do_not_keep_the_others_from_being_verified(project: Path) -> None:
    status, said = gate(project, COMPLETE + SCALE + RIGHT_SCALE + BAD_EXAMPLES, *ONE_MESH, "--jobs", "1")
    assert status == 2, said
    assert "NO EVIDENCE samples of gate_of_own_rules.scale.default by examples: it raised LookupError: no rows" in said
    assert " 1 op, 1 job\n" in said
    verified = {op for path in project.glob("reports/runs/*/run.json") for op in read_record(path).counts_by_op}
    assert verified == {"aten.trunc.default"}


def test_a_run_leaves_out_what_torch_alone_shows_as_the_gate_does(project: Path) -> None:
    """The gradient of take is computed by an op without a rule, whatever the rule of take is."""
    (project / "mine.py").write_text(HEAD + TAKE, encoding="utf-8")
    done = run_module("verifier", "run", "--import", "mine.py", *ONE_MESH)
    assert "torch's own rules fail in the same way" in done.stderr, done.stderr
    assert (done.returncode, "new finding" in done.stdout) == (0, False), done.stdout
    (record,) = project.glob("reports/runs/*/run.json")  # which a later gate judges
    assert not read_record(record).findings


def test_an_op_of_ones_own_is_verified_by_calls_from_its_schema_or_by_its_samples(project: Path) -> None:
    status, said = gate(project, SCALE + RIGHT_SCALE, *ONE_MESH)
    assert status == 0, said
    assert "warning: gate_of_own_rules.scale.default: its calls were made from its schema alone; give better" in said

    status, said = gate(project, SCALE + WRONG_SCALE + EXAMPLES)
    assert status == 1, said
    assert "    in gate_of_own_rules.scale.default(rows=f64[" in said
    assert "from its schema" not in said


def test_nothing_is_verified_of_an_op_without_samples_or_of_a_file_that_registers_nothing(project: Path) -> None:
    status, said = gate(project, CUSTOM)
    assert status == 2, said
    assert f"NO EVIDENCE gate_of_own_rules.double.default {NO_SAMPLES}" in said
    assert 'add @verifier.samples("gate_of_own_rules.double.default") to the file, above a function' in said
    status, said = gate(project, CUSTOM, "--quiet")
    assert status == 2, said
    assert f"NO EVIDENCE gate_of_own_rules.double.default {NO_SAMPLES}" in said

    status, said = gate(project, "")
    assert status == 2, said
    assert "error: --import my_rules.py registers no sharding rule" in said


DROPOUT = """
@register_sharding(aten.native_dropout.default)
def dropout(x, p, train):
    R, S = Replicate(), Shard
    return [([R, R], [R, None, None]), *(([S(d), MASK], [S(d), None, None]) for d in range(x.ndim))]
"""


def test_the_mask_that_a_kernel_makes_for_an_empty_shard_is_no_mistake_of_the_rule(project: Path) -> None:
    status, said = gate(project, DROPOUT.replace("MASK", "S(d)"), *ONE_MESH)
    assert status == 0, said
    assert "WRONG_DTYPE in aten.native_dropout.default: torch's kernel gives a shard without elements another" in said

    status, said = gate(project, DROPOUT.replace("MASK", "R"), *ONE_MESH)
    assert status == 1, said
    assert "WRONG_SHAPE" in said


WRITES = """
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

@register_op_strategy(aten.flip.default, RuntimeSchemaInfo(1))
def turned(schema):
    dims = schema.args_schema[1]
    if isinstance(dims, list):
        TAKEN = [abs(dim) for dim in dims]
    rule = [Replicate(), Replicate()]
    return expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, [rule], input_index=1)
"""


def test_a_strategy_that_writes_to_its_arguments_is_found_where_dtensor_then_runs_the_op_with_them(
    project: Path,
) -> None:
    status, said = gate(project, WRITES.replace("TAKEN", "dims[:]"), *ONE_MESH)
    assert status == 1, said
    assert said.count("NEW ") == 1, said
    assert "likely: the strategy writes to the arguments of the call" in said

    status, said = gate(project, WRITES.replace("TAKEN", "dims"), *ONE_MESH)
    assert status == 0, said


FEWER = """
@register_sharding(aten.trunc.default)
def trunc(x):
    return [([Replicate()], [Replicate()]), *(([Shard(d)], [Shard(d)]) for d in range(1, x.ndim))]
"""
AS_TORCH = """
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo


def mine(schema):
    (given,) = schema.args_schema
    return OpStrategy([
        OpSpec(replicated(one.output_spec), (replicated(one.output_spec),)) for one in given.strategies
    ])


def replicated(spec):
    placements = [Replicate() if p.is_partial() and p.reduce_op not in ("max", "min") else p for p in spec.placements]
    return type(spec)(spec.mesh, tuple(placements), spec.tensor_meta)


register_op_strategy(aten.tanh.default, RuntimeSchemaInfo())(mine)
"""


def test_a_lost_rule_is_told_and_fails_the_gate_where_asked_for(project: Path) -> None:
    status, said = gate(project, FEWER, *ONE_MESH)
    assert status == 0, said
    assert [line for line in said.splitlines() if line.startswith("lost aten.trunc.default: S(0) -> S(0) at ")], said
    assert "`--fail-on lost` makes them count" in said

    status, said = gate(project, FEWER, *ONE_MESH, "--fail-on", "wrong,lost", "--format", "github")
    assert status == 1, said
    assert "title=lost rule of aten.trunc.default::S(0) -> S(0) is lost at " in said


def test_a_strategy_that_claims_as_torchs_has_lost_nothing(project: Path) -> None:
    status, said = gate(project, AS_TORCH, *ONE_MESH, "--fail-on", "lost")
    assert status == 0, said
    assert "LOST" not in said
    assert " lost" not in said.replace("--fail-on lost", "")


def test_shards_that_dtensor_itself_takes_away_are_not_lost(project: Path) -> None:
    """DTensor drops shards of dims with fewer elements than ranks from what ``register_sharding`` registers."""
    status, said = gate(project, COMPLETE, *ONE_MESH, "--fail-on", "lost")
    assert status == 0, said
    assert "LOST" not in said


def test_a_wrong_rule_is_found_beside_lost_ones(project: Path) -> None:
    status, said = gate(project, WRONG, "--fail-on", "wrong,lost")
    assert status == 1, said
    assert "LOST aten.exp.default: S(0) -> S(0) at " in said
    assert "NEW " in said


def test_lost_rules_are_those_of_an_import(project: Path) -> None:
    made = run_module("verifier", "gate", "--fail-on", "lost")
    assert made.returncode == 2
    assert "name what registers them: gate --import FILE" in made.stderr
