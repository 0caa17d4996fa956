"""Ops of one's own that write to their arguments: what is derived for them, and that nothing is written to a copy."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from derived_here import closed, confirmed, confirmed_inputs, derived_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.opinfo.calls.call import Call
from strategies.opinfo.calls.running import accepts
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.errors import SamplesError
from verifier.core.verdict import VerdictKind
from verifier.deriving.learning.gradients import has_gradients
from verifier.deriving.writing.subject import CannotWriteError, Target
from verifier.execution.imports import run_imports
from verifier.meshes.pool import Pool, PoolSet
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.planning import own_samples
from verifier.planning.own_samples import overload_named
from verifier.rules.samples import SampleOptions, installed_sources
from verifier.rules.samples import Target as OpTarget

IN_PLACE = """
import torch, verifier

@torch.library.custom_op("{space}::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, factors: torch.Tensor) -> None:
    x.mul_(factors[:, None])

scale_.register_fake(lambda x, factors: None)
verifier.samples("{space}::scale_")(lambda: [(torch.randn(6, 4), torch.randn(6))])
"""
OUT_ALONE = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("crossed.out(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)")
torch.library.impl(library, "crossed.out", "CompositeExplicitAutograd")(
    torch.no_grad()(lambda x, y, *, out: out.copy_(x[:, None] * y))
)
verifier.samples("{space}::crossed.out")(
    lambda: [(torch.randn(6), torch.randn(4), {{"out": torch.empty(6, 4)}})]
)
"""
EACH_IN_PLACE = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("stepped_(Tensor(a!)[] xs, Tensor(b!)[] states, Tensor[] steps) -> ()")

@torch.library.impl(library, "stepped_", "CompositeExplicitAutograd")
@torch.no_grad()
def stepped_(xs, states, steps):
    for x, state, step in zip(xs, states, steps, strict=True):
        state.add_(step)
        x.sub_(state.sum(-1))

def lists(n):
    return [torch.randn(4) for _ in range(n)], *([torch.randn(4, 6) for _ in range(n)] for _ in range(2))

verifier.samples("{space}::stepped_")(lambda: [lists(2)])
"""
IN_BLOCKS = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("levelled_(Tensor(a!)[] xs) -> ()")

@torch.library.impl(library, "levelled_", "CompositeExplicitAutograd")
@torch.no_grad()
def levelled_(xs):
    for x in xs:
        x.unflatten(-1, (-1, 4)).sub_(x.unflatten(-1, (-1, 4)).amax(-1, keepdim=True))

verifier.samples("{space}::levelled_")(lambda: [([torch.randn(3, 16), torch.randn(3, 16)],)])
"""
INTO = """
import torch, verifier

@torch.library.custom_op("{space}::product", mutates_args=("total",))
def product(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    if total is not None:
        total.copy_((x * y).sum(-1))
    return x * y

product.register_fake(lambda x, y, total: torch.empty_like(x))
verifier.samples("{space}::product")(
    lambda: [(torch.randn(4, 6), torch.randn(4, 6), torch.randn(4)), (torch.randn(4, 6), torch.randn(4, 6), None)]
)
"""
WITH_LARGEST = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("{name}(Tensor(a!) x, int dim) -> (Tensor(a!), Tensor)")
torch.library.impl(library, "{name}", "CompositeExplicitAutograd")(lambda x, dim: (x.neg_(), x.amax(dim)))
verifier.samples("{space}::{name}")(lambda: [(torch.randn(4, 6), 1), (torch.randn(6, 4), 0)])
"""
WRITTEN = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("{name}(Tensor(a!) x, float by) -> {returned}")

def scaled(x, by):
    x.mul_(by)
    {end}

torch.library.impl(library, "{name}", "CompositeExplicitAutograd")({mode}(scaled))
verifier.samples("{space}::{name}")(lambda: [(torch.randn(4, 6), 2.0)])
"""
RESIZING = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("stats.out(Tensor x, *, Tensor(a!) mean, Tensor(b!) top) -> (Tensor(a!), Tensor(b!))")

@torch.library.impl(library, "stats.out", "CompositeExplicitAutograd")
@torch.no_grad()
def stats(x, *, mean, top):
    return torch.sum(x, -1, out=mean), torch.amax(x, -1, out=top)  # which resize what does not fit

verifier.samples("{space}::stats.out")(
    lambda: [(torch.randn(4, 6), {{"mean": torch.empty({given}), "top": torch.empty(4)}})]
)
"""


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, rules_taken_back: None) -> None:
    """Let what a test declares and registers be gone after it."""
    monkeypatch.setattr(own_samples, "_makers", {})


def test_what_an_op_of_ones_own_writes_to_is_placed_by_its_rules(tmp_path: Path) -> None:
    op, code = derived_of(OUT_ALONE, tmp_path, "out_alone", "crossed.out", Target.SINGLE_DIM)
    assert "rules.append([Shard(d), Shard(d), Replicate(), Shard(d)])" in code
    assert {rule.inputs for rule in confirmed(closed(op, code))} >= {("S(0)", "R", "S(0)"), ("R", "S(0)", "S(1)")}


def test_an_op_that_returns_nothing_has_rules_of_its_arguments_alone(tmp_path: Path) -> None:
    op, code = derived_of(IN_PLACE, tmp_path, "in_place", "scale_", Target.SINGLE_DIM)
    assert "rules.append([Shard(d), Shard(d)])" in code
    assert "register_single_dim_strategy" in code  # DTensor redistributes no first argument of such a name
    assert {rule.inputs for rule in confirmed(closed(op, code))} >= {("S(0)", "S(0)"), ("S(1)", "R")}


@pytest.mark.ranks
def test_lists_in_place_have_one_placement_each_and_are_not_redistributed(tmp_path: Path) -> None:
    op, code = derived_of(EACH_IN_PLACE, tmp_path, "each_in_place", "stepped_", Target.SINGLE_DIM)
    assert "[*[Shard(d)] * len(xs), *[Shard(d)] * len(states), *[Shard(d)] * len(steps)]" in code
    assert "[*[True] * len(xs), *[True] * len(states), *[False] * len(steps)]" in code
    args = ([torch.arange(4.0)] * 2, [torch.arange(8.0).reshape(4, 2)] * 2, [torch.ones(4, 2)] * 2)
    cut, whole, parts = Shard(0), Replicate(), Partial()
    placed = {
        (cut, cut, cut, cut, whole, parts): VerdictKind.PASS,
        (whole, whole, whole, whole, cut, parts): VerdictKind.PASS,
        (whole, cut, cut, cut, cut, cut): VerdictKind.UNSUPPORTED,
        (cut, cut, cut, whole, cut, cut): VerdictKind.UNSUPPORTED,
    }
    assert verdicts(tmp_path, "each_in_place_stepped_", code, op, args, placed) == placed


def test_lists_in_place_may_have_rules_in_blocks(tmp_path: Path) -> None:
    op, code = derived_of(IN_BLOCKS, tmp_path, "in_blocks", "levelled_", Target.SINGLE_DIM)
    assert "([*[Shard(d)] * len(xs)], 0, d, 4)" in code
    assert "_filter" not in code  # torch would not ask it of an op that returns nothing
    assert confirmed_inputs(closed(op, code)) >= {("S(0)", "S(0)"), ("S(1)", "S(1)")}
    at_any_cut = code.replace(", 0, d, 4)", ", 0, d, 1)")
    assert {one.rule.inputs for report in closed(op, at_any_cut) for one in report.wrong} >= {("S(1)", "S(1)")}


@pytest.mark.ranks
def test_what_is_written_to_behind_the_first_argument_is_not_redistributed(tmp_path: Path) -> None:
    op, code = derived_of(INTO, tmp_path, "into", "product", Target.SINGLE_DIM)
    assert "return [False, False, *[True] * (total is not None)]" in code
    args = (torch.arange(8.0).reshape(4, 2), torch.ones(4, 2), torch.zeros(4))
    placed = {
        (Shard(0), Shard(0), Shard(0)): VerdictKind.PASS,
        (Shard(0), Shard(0), Replicate()): VerdictKind.PASS,
        (Replicate(), Replicate(), Shard(0)): VerdictKind.PASS,
    }
    assert verdicts(tmp_path, "into_product", code, op, args, placed) == placed
    unguarded = code.replace("if all(one.input_specs[n].placements == here[n] for n in stay)", "")
    assert unguarded != code
    wrong = verdicts(tmp_path, "into_product", unguarded, op, args, placed)
    assert wrong[Shard(0), Shard(0), Replicate()] is VerdictKind.WRONG_VALUE
    assert confirmed_inputs(closed(op, code)) >= {("S(0)", "S(0)", "S(0)"), ("S(1)", "S(1)")}
    with pytest.raises(CannotWriteError, match="DTensor writes to a copy of total"):
        derived_of(INTO, tmp_path, "into_by_sharding", "product", Target.REGISTER_SHARDING)


def verdicts(
    folder: Path, module: str, code: str, op: str, args: tuple[object, ...], placed: dict[tuple[Placement, ...], object]
) -> dict[tuple[Placement, ...], VerdictKind]:
    """Return the verdicts on calls that are so placed on two ranks, where a file defines the op and code its rules."""
    rules = folder / f"rules_{len([*folder.glob('rules_*.py')])}.py"
    rules.write_text(code)
    case = OpCase(op, f"torch.ops.{op}", args, {}, "own")
    imports = [str(folder / f"{module}.py"), str(rules)]
    with closing(PoolSet(lambda key: Pool(key, imports))) as pools:
        trials = {one: Trial(case, MeshSpec((2,)), tuple((p,) for p in one)) for one in placed}
        return {one: judge(pools.run_alone(trial), make_reference(case)).kind for one, trial in trials.items()}


def test_an_op_of_which_dtensor_would_not_return_the_results_has_no_strategy(tmp_path: Path) -> None:
    for name in ("with_largest_", "with_largest"):
        example = WITH_LARGEST.replace("{name}", name)
        if name.endswith("_"):
            with pytest.raises(CannotWriteError, match="DTensor returns the first argument, or nothing"):
                derived_of(example, tmp_path, f"named_{name}", name, Target.SINGLE_DIM)
        else:
            derived_of(example, tmp_path, f"named_{name}", name, Target.SINGLE_DIM)


@pytest.mark.parametrize(
    ("name", "returned", "mode", "seen"),
    [
        ("grown_", "Tensor(a!)", "torch.no_grad()", False),
        ("shrunk_", "()", "torch.no_grad()", False),
        ("grown_in_sight_", "Tensor(a!)", "", True),
    ],
)
def test_what_an_op_in_place_does_out_of_autograds_sight_has_no_gradient(
    tmp_path: Path, name: str, returned: str, mode: str, seen: bool
) -> None:
    end = "return x" if returned != "()" else "return None"
    example = WRITTEN.format(space="{space}", name=name, returned=returned, end=end, mode=mode)
    op, code = derived_of(example, tmp_path, f"of_{name}", name, Target.SINGLE_DIM)
    assert confirmed_inputs(closed(op, code)) >= {("S(0)",), ("S(1)",), ("P(sum)",), ("P(avg)",)}
    (sample, *_) = installed_sources()["own"].samples(OpTarget(op, "own", op), SampleOptions())
    case = sample.draw(0, 0)
    assert case is not None
    assert has_gradients(case) is seen


def test_what_an_op_would_have_to_resize_is_not_given_to_it(tmp_path: Path) -> None:
    """DTensor does not see that a local tensor was resized; torch warns of such calls on plain tensors, too."""
    (tmp_path / "fits.py").write_text(RESIZING.format(space="fits", given="4"))
    run_imports([str(tmp_path / "fits.py")])
    x, fit, op = torch.ones(4, 6), torch.empty(4), overload_named("fits::stats.out")
    taken = [accepts(Call(op, (x,), {"mean": one, "top": fit})) for one in (fit, torch.empty(0), torch.empty(5))]
    assert taken == [True, True, False]
    (tmp_path / "unfit.py").write_text(RESIZING.format(space="unfit", given="5"))
    run_imports([str(tmp_path / "unfit.py")])
    samples = installed_sources()["own"].samples(OpTarget("unfit.stats.out", "own", "unfit.stats.out"), SampleOptions())
    with pytest.raises(SamplesError, match="it would resize a tensor that is given for a result"):
        next(samples)
