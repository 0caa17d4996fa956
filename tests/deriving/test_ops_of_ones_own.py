"""Ops of one's own from files of about eight lines: what is derived for them, and that it stands the checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from derived_here import closed, confirmed, confirmed_inputs, derived_of
from torch.distributed.tensor import Replicate, Shard
from torch_versions import torch_is

from verifier.deriving.derive import DeriveRequest, derivation, derive
from verifier.deriving.learning.isolated import Workshop
from verifier.deriving.writing.subject import CannotWriteError, Target
from verifier.execution.imports import run_imports
from verifier.planning import own_samples

MOST_BLOCKS = """
import torch, verifier

@torch.library.custom_op("{space}::less_largest", mutates_args=())
def less_largest(x: torch.Tensor) -> torch.Tensor:
    blocks = x.reshape(x.shape[0], {blocks}, 32)  # each with a scale of its own
    return (blocks - blocks.amax(-1, keepdim=True)).reshape(x.shape)

less_largest.register_fake(lambda x: torch.empty_like(x))
verifier.samples("{space}::less_largest")(lambda: [(torch.randn(6, 128),)])
"""
OPTIONAL = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("centred(Tensor x, bool stats=False) -> (Tensor, Tensor?)")

@torch.library.impl(library, "centred", "CompositeExplicitAutograd")
def centred(x, stats=False):
    total = x.sum(-1, keepdim=True)
    return x - total, total if stats else None

verifier.samples("{space}::centred")(lambda: [(torch.randn(4, 6),), (torch.randn(4, 6), True)])
"""
FRAGILE = """
import os, torch, verifier

@torch.library.custom_op("{space}::fragile", mutates_args=())
def fragile(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape[0] != y.shape[0]:
        os.abort()  # as a kernel does that writes where it should not
    return x + y

fragile.register_fake(lambda x, y: {fake})
verifier.samples("{space}::fragile")(lambda: [(torch.randn(6, 4), torch.randn(6, 4))])
"""
BLOCKS = MOST_BLOCKS.format(space="{space}", blocks="x.shape[1] // 32")
FULL_BLOCKS = MOST_BLOCKS.format(space="{space}", blocks="-1")  # refuses a tensor without elements
ONE_FACTOR = """
import torch, verifier

@torch.library.custom_op("{space}::folded", mutates_args=())
def folded(x: torch.Tensor, factor: int) -> torch.Tensor:
    blocks = x.reshape(-1, factor * factor)  # no example shows that the block is the square
    return (blocks - blocks.amax(-1, keepdim=True)).reshape(x.shape)

folded.register_fake(lambda x, factor: torch.empty_like(x))
verifier.samples("{space}::folded")(lambda: [(torch.randn(72), 3), (torch.randn(108), 3)])
"""
LIST = """
import torch, verifier

@torch.library.custom_op("{space}::blended", mutates_args=())
def blended(xs: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    return sum(xs) * weight[:, None]

blended.register_fake(lambda xs, weight: torch.empty_like(xs[0]))
verifier.samples("{space}::blended")(lambda: [([torch.randn(6, 4), torch.randn(6, 4)], torch.randn(6))])
"""
SCALES = """
import torch, verifier

@torch.library.custom_op("{space}::scaled", mutates_args=())
def scaled(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x * scales.repeat_interleave(32, -1)  # a scale of each block

scaled.register_fake(lambda x, scales: torch.empty_like(x))
verifier.samples("{space}::scaled")(lambda: [(torch.randn(6, 64), torch.randn(6, 2))])
"""
PAIRS = """
import torch, verifier

@torch.library.custom_op("{space}::pairs", mutates_args=())
def pairs(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] % 2 == 0
    return x[::2] + x[1::2]

pairs.register_fake(lambda x: x.new_empty(x.shape[0] // 2))
verifier.samples("{space}::pairs")(lambda: [(torch.randn(12),)])
"""
NO_ROWS = """
import torch, verifier

@torch.library.custom_op("{space}::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    if not x.shape[0]:
        raise RuntimeError("no rows")
    return x / 2

halved.register_fake(lambda x: torch.empty_like(x))
verifier.samples("{space}::halved")(lambda: [(torch.randn(8, 4),)])
"""
UNKNOWN_TO_AUTOGRAD = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("doubled(Tensor x) -> Tensor")
torch.library.impl(library, "doubled", "CompositeExplicitAutograd")(lambda x: x * 2)
verifier.samples("{space}::doubled")(lambda: [(torch.randn(4, 6),)])
"""
BY_KEYWORD = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("weighted(Tensor x, *, Tensor weight) -> Tensor")
torch.library.impl(library, "weighted", "CompositeExplicitAutograd")(torch.no_grad()(lambda x, *, weight: x * weight))
verifier.samples("{space}::weighted")(lambda: [(torch.randn(4, 6), {{"weight": torch.randn(6)}})])
"""
COUNTED = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("largest(Tensor x, int count, int dim=-1) -> (Tensor, int, Tensor)")

@torch.library.impl(library, "largest", "CompositeExplicitAutograd")
@torch.no_grad()
def largest(x, count, dim=-1):
    values, indices = x.topk(count, dim)
    return values, count, indices

verifier.samples("{space}::largest")(
    lambda: [(torch.randn(4, 6), 2), (torch.randn(4, 6), 2, 0), (torch.randn(4, 6, 5), 3, 1)]
)
"""
NO_SIZES = """
import torch, verifier

@torch.library.custom_op("{space}::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    return x / 2

verifier.samples("{space}::halves")(lambda: [(torch.randn(4, 6),)])
"""
RANDOM = """
import torch, verifier

@torch.library.custom_op("{space}::jittered", mutates_args=())
def jittered(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)

jittered.register_fake(lambda x: torch.empty_like(x))
verifier.samples("{space}::jittered")(lambda: [(torch.randn(6, 4),)])
"""
EACH = """
import torch, verifier

@torch.library.custom_op("{space}::each", mutates_args=())
def each(xs: list[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
    return [x * factor for x in xs]

each.register_fake(lambda xs, factor: [torch.empty_like(x) for x in xs])
verifier.samples("{space}::each")(
    lambda: [([torch.randn(4, 6), torch.randn(4, 6)], torch.randn(6)), ([torch.randn(5, 4)], torch.randn(4))]
)
"""
ONE_SCALE = """
import torch, verifier

@torch.library.custom_op("{space}::rescaled", mutates_args=())
def rescaled(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (x.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2)  # one scale may be for all blocks

rescaled.register_fake(lambda x, scales: torch.empty_like(x))
verifier.samples("{space}::rescaled")(lambda: [(torch.randn(6, 128), torch.randn(6, 4))])
"""
PIECES = """
import torch, verifier

@torch.library.custom_op("{space}::pieces", mutates_args=())
def pieces(x: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    return [one.clone() for one in x.tensor_split(count, dim)]

pieces.register_fake(lambda x, count, dim: [torch.empty_like(one) for one in x.tensor_split(count, dim)])
verifier.samples("{space}::pieces")(
    lambda: [(torch.randn(6, 4), 2, 0), (torch.randn(4, 6, 5), 3, -2), (torch.randn(4, 6), 1, 1)]
)
"""
SELECTING = """
import torch, verifier

@torch.library.custom_op("{space}::turned", mutates_args=())
def turned(x: torch.Tensor, which: int) -> torch.Tensor:
    one, other = x.chunk(2, which)
    return torch.cat([-other, one], which)

turned.register_fake(lambda x, which: torch.empty_like(x))
verifier.samples("{space}::turned")(
    lambda: [(torch.randn(4, 6), 0), (torch.randn(6, 4), 1), (torch.randn(3, 4, 5), 1), (torch.randn(3, 5, 4), -1)]
)
"""
EXAMPLES = {
    "largest": COUNTED,
    "jittered": RANDOM,
    "each": EACH,
    "rescaled": ONE_SCALE,
    "pieces": PIECES,
    "turned": SELECTING,
    "less_largest": BLOCKS,
    "less_largest_of_full": FULL_BLOCKS,
    "centred": OPTIONAL,
    "blended": LIST,
    "folded": ONE_FACTOR,
    "halved": NO_ROWS,
    "scaled": SCALES,
    "pairs": PAIRS,
    "weighted": BY_KEYWORD,
}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, rules_taken_back: None) -> None:
    """Let what a test declares and registers be gone after it."""
    monkeypatch.setattr(own_samples, "_makers", {})


def derived(folder: Path, space: str, name: str, target: Target) -> tuple[str, str]:
    """Return the overload that an example of EXAMPLES defines, and the code derived for it."""
    return derived_of(EXAMPLES[name], folder, space, name.removesuffix("_of_full"), target)


@pytest.mark.parametrize("name", ["less_largest", "less_largest_of_full"])
def test_a_rule_holds_where_the_cut_falls_on_a_multiple_of_32(name: str, tmp_path: Path) -> None:
    op, code = derived(tmp_path, f"in_blocks_{name}", name, Target.REGISTER_SHARDING)
    assert "_begin_at_multiples(x, d, 32)" in code
    assert ("_each_rank_has_elements(x, d)" in code) == (name == "less_largest_of_full")
    reports = closed(op, code)
    assert {rule.inputs for rule in confirmed(reports)} >= {("S(0)",), ("S(1)",)}
    at_any_cut = code.replace("length % block == 0", "True").replace("extent % (block * math.prod(sizes)) == 0", "True")
    assert [wrong for report in closed(op, at_any_cut) for wrong in report.wrong]


def test_a_block_that_one_factor_shows_is_not_that_of_other_factors(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "one_factor", "folded", Target.REGISTER_SHARDING)
    assert "_begin_at_multiples(x, d, 9)" in code
    assert "if factor == 3" in code
    assert ("S(0)",) in confirmed_inputs(closed(op, code))


@pytest.mark.parametrize(("name", "condition"), [("scaled", "(x, d, 32)"), ("pairs", "(x, d, 2)")])
def test_extents_in_proportion_and_assertions_show_blocks(name: str, condition: str, tmp_path: Path) -> None:
    _, code = derived(tmp_path, f"shown_by_{name}", name, Target.REGISTER_SHARDING)
    assert f"_begin_at_multiples{condition}" in code


@pytest.mark.parametrize("name", ["less_largest", "less_largest_of_full"])
def test_a_strategy_for_one_mesh_dim_keeps_the_products_that_are_cut_in_blocks(name: str, tmp_path: Path) -> None:
    op, code = derived(tmp_path, f"products_{name}", name, Target.SINGLE_DIM)
    assert ("full_mesh_strategy_filter=" in code) == torch_is(">=2.14")
    assert ("is_valid_strategy_cb=" in code) == torch_is("<2.14")
    in_blocks = {("S(1)",), ("(S(1), R)",), ("(R, S(1))",), ("(S(0), S(1))",)}
    assert confirmed_inputs(closed(op, code)) >= in_blocks
    at_any_cut = code.replace(", 32))", ", 1))")
    assert at_any_cut != code
    assert [one for report in closed(op, at_any_cut) for one in report.wrong]


def test_products_that_cut_one_dim_twice_are_kept_where_all_shards_begin_at_multiples(tmp_path: Path) -> None:
    """Of 128 elements, shards begin at multiples of 32 on 2 ranks, and not on 2x3."""
    op, code = derived(tmp_path, "cut_twice", "less_largest", Target.SINGLE_DIM)
    per_dim = code.replace("parts, extent = math.prod(sizes), spec", "parts, extent = sizes[0], spec")
    assert per_dim != code
    assert not any(report.wrong for report in closed(op, code, "2x3"))
    wrong = {one.rule.inputs for report in closed(op, per_dim, "2x3") for one in report.wrong}
    assert ("(S(1), S(1))",) in wrong


def test_a_strategy_for_one_mesh_dim_lets_each_rank_have_elements(tmp_path: Path) -> None:
    """DTensor uses a rule for five rows on four ranks, whatever a strategy says of uneven shards."""
    op, code = derived(tmp_path, "no_rows", "halved", Target.SINGLE_DIM)
    assert {("S(0)",), ("S(1)",)} <= confirmed_inputs(closed(op, code, "4"))
    on_any = code.replace(" and length * (parts - 1) < extent", "")
    forbidden = on_any.replace("allow_uneven_sharding=True", "allow_uneven_sharding=False")
    assert forbidden != on_any != code
    wrong = [one for report in closed(op, forbidden, "4") for one in report.wrong]
    assert {one.rule.inputs for one in wrong} == {("S(0)",)}


def test_a_rule_of_ranks_that_have_elements_says_so_where_the_mesh_is_seen(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "no_rows_seen", "halved", Target.REGISTER_SHARDING)
    assert "_each_rank_has_elements(x, d)" in code
    found = {rule.inputs for rule in confirmed(closed(op, code, "4"))}
    assert {("S(0)",), ("S(1)",)} <= found
    on_any = code.replace("_each_rank_has_elements(x, d)", "True")
    wrong = [one.rule.inputs for report in closed(op, on_any, "4") for one in report.wrong]
    assert ("S(0)",) in wrong


@pytest.mark.processes
@pytest.mark.parametrize(("space", "fake"), [("checked", "x + y"), ("unchecked", "torch.empty_like(x)")])
def test_an_op_that_ends_its_process_costs_the_placements_that_do_so(tmp_path: Path, space: str, fake: str) -> None:
    file = tmp_path / f"{space}.py"
    file.write_text(FRAGILE.format(space=space, fake=fake))
    run_imports([str(file)])
    request = DeriveRequest(f"{space}::fragile", imports=[str(file)], max_samples=1)
    with Workshop(request.imports) as shop:
        calls, made = derivation(request, shop)
        assert shop.deaths
    (call,) = [call for call in calls if not call.rare]
    assert not call.rules.get((Shard(0), Replicate()))
    assert call.rules[Shard(0), Shard(0)]
    assert call.rules[Shard(1), Shard(1)]
    assert {(rule.inputs[0] == Replicate(), rule.pivot) for rule in made.rules if rule.pivot is not None} == {
        (False, 0)
    }


def test_a_result_that_some_calls_lack_has_no_placement_there(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "optional", "centred", Target.SINGLE_DIM)
    assert "rules.append([Shard(d), None, Shard(d)])" in code
    assert "rules.append([Shard(d), Shard(d), Shard(d)])" in code
    assert {rule.outputs for rule in confirmed(closed(op, code))} >= {("S(0)",), ("S(0)", "S(0)")}


def test_a_list_of_tensors_is_placed_alike(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "lists", "blended", Target.SINGLE_DIM)
    assert "*[Shard(d)] * len(xs)" in code
    assert {rule.inputs for rule in confirmed(closed(op, code))} >= {("S(0)", "S(0)", "S(0)"), ("S(1)", "S(1)", "R")}


def test_what_another_extent_refutes_gets_a_condition_on_extents(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "broadcasting", "rescaled", Target.REGISTER_SHARDING)
    assert re.search(r"if .*scales\.shape\[.*\] != 1.* and _begin_at_multiples\(x, d, 32\)", code)
    assert {rule.inputs for rule in confirmed(closed(op, code))} >= {("S(0)", "S(0)"), ("S(1)", "S(1)")}


def test_a_list_of_results_has_rules_however_many_there_are(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "in_pieces", "pieces", Target.SINGLE_DIM)
    assert "rules.append([*[Shard(d)] * count_of_results, Shard(d)])" in code
    assert ("@register_op_strategy(" in code) == torch_is("<2.14")
    found = {(rule.inputs, rule.outputs) for rule in confirmed(closed(op, code))}
    assert found >= {
        (("S(1)",), ("S(1)", "S(1)")),
        (("S(0)",), ("S(0)", "S(0)", "S(0)")),
        (("S(0)",), ("S(0)",)),
    }


def test_a_list_may_be_empty(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "each_of_a_list", "each", Target.SINGLE_DIM)
    assert "if len(xs) > 0" in code
    assert "* len(xs), *[Shard(d)] * len(xs), Replicate()])" in code
    scope: dict[str, Any] = {}
    exec(compile(code, "derived.py", "exec"), scope)
    assert scope["each_of_a_list_each_rules"]([], torch.empty(4)) == []
    reports = closed(op, code, calls=r"call \d$|xs is")
    assert "xs=[], factor=f64[4]" in {report.call for report in reports}
    assert {rule.inputs for rule in confirmed(reports)} >= {("S(0)", "S(0)", "R"), ("S(1)", "S(0)")}


def test_of_an_op_that_draws_random_numbers_it_says_what_to_derive_instead(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes what is drawn as an argument"):
        derived(tmp_path, "drawing", "jittered", Target.SINGLE_DIM)


def test_an_argument_of_any_name_may_select_a_dim(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "selecting", "turned", Target.SINGLE_DIM)
    assert "if d not in which_dims:" in code
    assert {rule.inputs for rule in confirmed(closed(op, code))} >= {("S(0)",), ("S(1)",), ("S(2)",)}


def test_an_op_may_also_return_numbers(tmp_path: Path) -> None:
    op, code = derived(tmp_path, "counted", "largest", Target.SINGLE_DIM)
    assert "rules.append([Shard(d), None, Shard(d), Shard(d)])" in code
    assert confirmed_inputs(closed(op, code)) >= {("S(0)",), ("S(1)",), ("S(2)",)}


@pytest.mark.processes
def test_an_op_without_a_fake_kernel_can_have_no_strategy(tmp_path: Path) -> None:
    file = tmp_path / "no_sizes.py"
    file.write_text(NO_SIZES.format(space="no_sizes"))
    run_imports([str(file)])
    with pytest.raises(ValueError, match=r"does not run on tensors without values.*register_fake"):
        derive(DeriveRequest("no_sizes::halves", imports=[str(file)]), "new")


@pytest.mark.processes
def test_an_op_without_a_gradient_formula_loses_gradients_under_any_strategy(tmp_path: Path) -> None:
    (tmp_path / "unknown_to_autograd.py").write_text(UNKNOWN_TO_AUTOGRAD.format(space="unknown_to_autograd"))
    run_imports([str(tmp_path / "unknown_to_autograd.py")])
    with pytest.raises(ValueError, match="has no gradient formula"):
        derive(DeriveRequest("unknown_to_autograd::doubled", imports=[str(tmp_path / "unknown_to_autograd.py")]), "new")


def test_a_tensor_that_is_given_by_keyword_stays_as_it_is_placed(tmp_path: Path) -> None:
    with pytest.raises(CannotWriteError, match="does not redistribute a tensor that is given by keyword, as weight is"):
        derived(tmp_path, "by_keyword", "weighted", Target.SINGLE_DIM)
    derived(tmp_path, "by_keyword_of_locals", "weighted", Target.LOCAL_MAP)
