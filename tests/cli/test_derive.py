"""``derive``: what it writes, what it refuses, and that a strategy that a check refutes is not written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked_commands import run_module

from verifier.core.case import OpCase
from verifier.deriving.closing import close
from verifier.deriving.learning.evidence import CallEvidence
from verifier.deriving.learning.generalise import Derivation
from verifier.deriving.learning.learned import Learned

pytestmark = pytest.mark.long

SCALE = """
import torch
import verifier

@torch.library.custom_op("derived_here::scale", mutates_args=())
def scale(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return rows * factors[:, None]

scale.register_fake(lambda rows, factors: torch.empty_like(rows))

@verifier.samples("derived_here::scale")
def examples():
    yield torch.randn(8, 4), torch.randn(8)
"""
NO_ROWS = """
import torch
import verifier

@torch.library.custom_op("no_rows_here::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    if not x.shape[0]:
        raise RuntimeError("no rows")
    return x / 2

halved.register_fake(lambda x: torch.empty_like(x))
verifier.samples("no_rows_here::halved")(lambda: [(torch.randn(8, 4),)])
"""
WRONG = """
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy


@register_single_dim_strategy(torch.ops.aten.neg.default)
def neg(op, args, kwargs):
    return [[Partial("max"), Partial("max")]]
"""


@pytest.mark.ranks
@pytest.mark.nightly
def test_a_strategy_is_derived_checked_and_written_with_its_test(tmp_path: Path) -> None:
    (tmp_path / "my_op.py").write_text(SCALE)
    words = ["derive", "derived_here::scale", "--import", "my_op.py", "--out", "my_strategy.py", "--mesh", "2"]
    done = run_module("verifier", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 wrong, 0 of the derived missing" in done.stderr
    assert "register_single_dim_strategy" in (tmp_path / "my_strategy.py").read_text()
    tested = run_module("pytest", "-q", "test_my_strategy.py", folder=tmp_path)
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout


@pytest.mark.ranks
@pytest.mark.nightly
def test_an_op_that_refuses_empty_shards_gets_a_strategy_that_four_ranks_bear_out(tmp_path: Path) -> None:
    (tmp_path / "my_op.py").write_text(NO_ROWS)
    words = ["derive", "no_rows_here::halved", "--import", "my_op.py", "--out", "my_strategy.py", "--mesh", "4"]
    done = run_module("verifier", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    given = ["gate", "--mesh", "4", "--import", "my_op.py", "--import", "my_strategy.py", "--out", "reports"]
    assert run_module("verifier", *given, folder=tmp_path).returncode == 0
    strategy = tmp_path / "my_strategy.py"
    rows = "    rules.append([Shard(0), Shard(0)])\n    return rules\n"
    strategy.write_text(strategy.read_text().replace("    return rules\n", rows, 1))
    refused = run_module("verifier", *given, folder=tmp_path)
    assert refused.returncode == 1
    assert "no rows" in refused.stdout + refused.stderr


@pytest.mark.ranks
def test_a_wrong_strategy_does_not_pass(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    case = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (torch.ones(2),))
    calls = [CallEvidence("", ("self",), (1,), (1,), {}, {}, case)]
    learned = Learned(torch.ops.aten.neg.default, calls, Derivation((), (), 0))
    closed = close([learned], file, (), "2", ("2",), 1)
    assert closed.wrong > 0
    assert not closed.passed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["aten.cumsun.default"], "no op aten.cumsun.default is registered; did you mean 'cumsum'?"),
        (["cumsum"], "'cumsum' does not name an op"),
        (["aten.neg", "--out", "strategy.txt"], "--out strategy.txt: the strategy is a module"),
        (["aten.neg", "--out", "no_folder/strategy.py"], "--out no_folder/strategy.py: there is no folder no_folder"),
        (
            ["aten.neg", "--import", "my_op.py", "--out", "my_op.py"],
            "--out my_op.py: this would write over",
        ),
        (["mine::scale"], "no op mine::scale is registered; --import the file or module that defines it"),
        (["aten.cat.out"], "aten.cat.out: DTensor makes the strategy of an overload with out= from its base overload"),
        (["aten.neg", "--world-size", "1"], "--world-size 1: level 1 checks meshes of 2 to 16 ranks"),
        (["aten.neg", "--mesh", "2y"], "mesh '2y' is not a shape"),
        (["aten.neg", "--torch", "2.1"], "--torch 2.1: the code is checked with the torch that runs, 2."),
        (["aten.bernoulli.default"], "nothing can be derived for aten.bernoulli.default: it draws random numbers"),
    ],
)
@pytest.mark.processes
def test_bad_input_ends_with_one_line_and_status_2(words: list[str], said: str, tmp_path: Path) -> None:
    done = run_module("verifier", "derive", *words, folder=tmp_path)
    assert done.returncode == 2
    assert f"error: {said}" in done.stderr
    assert "Traceback" not in done.stderr
