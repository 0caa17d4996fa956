"""Entry points that are wrong are caught by the programs that call them, which pass before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import entry_point_mutants
import pytest
import torch
from entry_point_defects import DEFECTS, FUNCTIONS, KEPT, NUMBERS, SQUARE
from torch.distributed.tensor import Partial, Replicate, Shard
from torch_versions import mended_here, torch_is

from strategies.chains import (
    buffers,
    entry_points,
    handing_over,
    memory_orders,
    parallel,
    procedures,
    programs,
    second_gradients,
)
from strategies.remedies import REMEDIES
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.execution.remedies import installed_remedies
from verifier.meshes.pool import PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.meshes.tasks import Task
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

MESH = MeshSpec((2,))
RAISING = (
    entry_points.copied,
    entry_points.distributed,
    entry_points.implicitly,
    entry_points.inferred,
    handing_over.restored,
    handing_over.stored,
    handing_over.to_another_mesh,
    memory_orders.computed,
    memory_orders.differentiated,
    memory_orders.exchanged,
    memory_orders.in_formats,
    memory_orders.laid_out,
    memory_orders.moved_between,
    parallel.fully_sharded,
    parallel.sharded_in_turns,
    procedures.penalised,
    procedures.placed_gradients,
    programs.chain,
)


CASES: dict[Callable[[], None], tuple[Callable[..., Any], tuple[object, ...], dict[str, torch.Tensor]]] = {
    entry_point_mutants.numbers_drawn_in_vain: (
        entry_points.drawn,
        ("torch.multinomial", [2], 5),
        {"x": NUMBERS},
    ),
    entry_point_mutants.gelus_doubled: (
        memory_orders.exchanged,
        (f"{FUNCTIONS}.gelu", [], [4, 2, 3], [1, 2]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.gradients_of_moved_blocks_doubled: (
        memory_orders.moved_between,
        ([4, 2, 3], [1, 2], [Shard(0)]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.redistributed_blocks_turned: (
        memory_orders.laid_out,
        ("redistribute", [0, 1, 2], [Replicate()]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.blocks_not_flipped: (
        memory_orders.computed,
        ("torch.flip", [[0, 1]], [0, 1, 2], ""),
        {"x": NUMBERS, "y": NUMBERS},
    ),
    entry_point_mutants.images_copied_twice: (
        memory_orders.in_formats,
        ("torch.empty_like", [], [Shard(0)], [None]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.third_derivatives_halved: (
        second_gradients.twice,
        ("torch.lgamma", [], {}),
        {"x": NUMBERS / 4},
    ),
    entry_point_mutants.second_gradients_forgotten: (
        procedures.accumulated,
        ([["torch.mul", 2], ["torch.square"]],),
        {"x": NUMBERS},
    ),
    entry_point_mutants.gradients_of_gradients_halved: (
        procedures.penalised,
        ("redistribute", [Replicate()]),
        {"x": NUMBERS, "y": NUMBERS[:3].clone()},
    ),
    # in each worker a mutant stays in force for those below it; those above take powers
    entry_point_mutants.powers_doubled: (
        memory_orders.differentiated,
        ("torch.sum", [4, 2, 3], [1, 1]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.outputs_exchanged: (
        entry_points.prepared,
        ("a tuple", {"output_layouts": [Shard(0)] * 2, "desired_output_layouts": [Replicate()] * 2}, 2),
        {"x": NUMBERS},
    ),
    entry_point_mutants.plain_tensors_forgotten: (
        entry_points.implicitly,
        ("", "torch.maximum", False),
        {"x": NUMBERS, "y": NUMBERS * 2},
    ),
    entry_point_mutants.ones_that_are_two: (entry_points.made, ("ones", [Shard(0)], []), {"x": NUMBERS}),
    entry_point_mutants.identities_forgotten: (entry_points.initialised, ("eye_", []), {"x": NUMBERS}),
    entry_point_mutants.equal_denied: (
        entry_points.on_submeshes,
        ("torch.equal", 1),
        {"x": NUMBERS[:, 0].clone(), "y": NUMBERS[:, 0].clone()},
    ),
    entry_point_mutants.losses_without_weights: (
        procedures.parallel_loss,
        ([Shard(1)], {"reduction": "sum"}, ""),
        {"x": NUMBERS / 4, "y": torch.tensor([0, 2, 1, 2]), "z": NUMBERS[0].clone()},
    ),
    entry_point_mutants.styles_without_reduction: (
        entry_points.styled,
        ("perceptron", {"0": ["ColwiseParallel", KEPT], "1": ["RowwiseParallel", KEPT]}, [3, 4]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.gradients_of_locals_doubled: (entry_points.unwrapped, (), {"x": NUMBERS}),
    entry_point_mutants.distributed_views_untransposed: (
        entry_points.distributed,
        ("torch.t", [], [Shard(0)]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.transposed_conjugates_forgotten: (
        programs.chain,
        (
            [
                ["lazy", "torch.conj", ["x"], {}],
                ["made", "torch.t", ["lazy"], {}],
                ["twice", "torch.mul", ["made", 2], {}],
            ],
        ),
        {"x": NUMBERS * 1j},
    ),
    entry_point_mutants.callers_tensors_counted_up: (entry_points.taken, (False, [Shard(0)]), {"x": NUMBERS}),
    entry_point_mutants.products_forgotten_in_inference: (entry_points.inferred, ("torch.mul", [2]), {"x": NUMBERS}),
    entry_point_mutants.copies_that_are_negative: (entry_points.copied, ("torch.clone", []), {"x": NUMBERS}),
    entry_point_mutants.chunks_that_are_negative: (
        handing_over.checkpointed,
        ("torch.clone", [], [Replicate()]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.sequences_out_of_order: (
        buffers.in_context,
        ([["torch.clone"]], [1]),
        {"x": NUMBERS.t().clone()},
    ),
    entry_point_mutants.outputs_written_twice: (
        buffers.resized,
        ("torch.exp", [], [4, 3], [Shard(0)]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.outputs_that_are_copies: (
        buffers.written_to_views,
        ("torch.sqrt", [], ["torch.Tensor.transpose", 0, 1], False, []),
        {"x": NUMBERS, "y": NUMBERS.t().clone()},
    ),
    entry_point_mutants.pickles_that_are_negative: (
        handing_over.stored,
        ("save", "torch.clone", []),
        {"x": NUMBERS},
    ),
    entry_point_mutants.numbers_that_are_negative: (handing_over.handed_over, ("float",), {"x": NUMBERS}),
    entry_point_mutants.numbers_one_too_small: (
        programs.chain,
        ([["row", "torch.narrow", ["x", 0, "y", 1], {}]],),
        {"x": NUMBERS, "y": torch.tensor(2)},
    ),
    entry_point_mutants.numbers_that_divide_twice: (
        entry_points.beside_numbers,
        ("torch.div", 2, True),
        {"x": NUMBERS},
    ),
    entry_point_mutants.sums_written_twice: (entry_points.written_to_plain, ("torch.sum", "out"), {"x": NUMBERS}),
    entry_point_mutants.cumulated_sums_forgotten: (entry_points.reordered, ([0, 1], [Shard(0)]), {"x": NUMBERS}),
    entry_point_mutants.said_placements_of_gradients_forgotten: (
        procedures.placed_gradients,
        ("full_tensor", ["avg"]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.saved_inputs_negated: (parallel.resharded, ("replicated", 0, True, 4), {"x": NUMBERS}),
    entry_point_mutants.plans_of_the_first_rank: (
        parallel.with_own_weights,
        ("inner", "ColwiseParallel", 1),
        {"x": NUMBERS},
    ),
    entry_point_mutants.momenta_forgotten: (
        handing_over.restored,
        ({"full_state_dict": True}, True, [Shard(0)]),
        {"x": NUMBERS},
    ),
    entry_point_mutants.deferred_gradients_halved: (
        parallel.sharded_in_turns,
        (True, False, 0, "gradient_sync", [], ["ab", "a"]),
        {"x": NUMBERS, "y": -NUMBERS},
    ),
    entry_point_mutants.sharded_gradients_doubled: (
        parallel.fully_sharded,
        ([], {}, [True, False]),
        {"x": NUMBERS, "y": -NUMBERS},
    ),
    entry_point_mutants.checked_replicas_negated: (parallel.checked_on_submeshes, ("",), {"x": NUMBERS}),
}
"""For each mutant a program, its arguments and its tensors."""


@pytest.mark.ranks
@pytest.mark.parametrize("mutant", CASES, ids=lambda mutant: mutant.__name__)
def test_a_wrong_entry_point_is_seen(mutant: Callable[[], None], pools_of_mutants: PoolSet) -> None:
    program, args, tensors = CASES[mutant]
    case = OpCase("composite.given", f"{program.__module__}.{program.__name__}", args, tensors, "chains", False)
    whole = program in (entry_points.initialised, handing_over.handed_over)  # torch's own are wrong on shards
    placements = tuple(((Shard(0) if name == "x" and not whole else Replicate()),) for name in tensors)
    trial = Trial(case, MESH, placements)
    assert judge(pools_of_mutants.run_alone(trial), make_reference(case)).kind is VerdictKind.PASS
    outcome = pools_of_mutants.of(MESH).call(
        Task("rules_in_ranks.register", (f"{mutant.__module__}.{mutant.__name__}",), MESH)
    )
    assert outcome.ok, outcome
    assert judge(pools_of_mutants.run_alone(trial), make_reference(case)).kind is VerdictKind.WRONG_VALUE


@pytest.mark.ranks
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("kind", ["sum", "avg", "product", "max", "min"])
def test_parts_that_are_wrapped_again_are_those_of_the_same_tensor(kind: str, grows: bool, pools: PoolSet) -> None:
    program = f"{procedures.__name__}.rewrapped"
    case = OpCase("composite.rewrapped", program, (grows,), {"x": NUMBERS}, "chains", False)
    assert judge(pools.run_alone(Trial(case, MESH, ((Partial(kind),),))), make_reference(case)).kind is VerdictKind.PASS


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("remedy", "program", "args", "tensors"),
    DEFECTS,
)
def test_what_torch_itself_does_wrong_is_seen_and_mended(
    remedy: str, program: Callable[..., Any], args: tuple[object, ...], tensors: dict[str, torch.Tensor], pools: PoolSet
) -> None:
    case = OpCase("composite.given", f"{program.__module__}.{program.__name__}", args, tensors, "chains", False)
    trial = Trial(case, MESH, tuple((Shard(0),) for _ in tensors))
    raises = program in RAISING and remedy != "models-left-out-of-states"
    wrong = VerdictKind.CRASH if raises else VerdictKind.WRONG_VALUE
    kind = judge(run_remedied(pools, trial, ()), make_reference(case)).kind
    assert kind is (VerdictKind.PASS if remedy in mended_here() else wrong)
    for names in ((remedy,), tuple(installed_remedies())):
        assert not judge(run_remedied(pools, trial, names), make_reference(case)).kind.bad


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "path", "late", "wrong"),
    [
        ("sum", "torch.add", True, VerdictKind.WRONG_VALUE),
        ("sum", "torch.add", False, VerdictKind.CRASH),
        ("max", "torch.sub", False, VerdictKind.CRASH),
    ],
)
def test_numbers_that_are_taken_for_tensors_are_seen_and_mended(
    kind: str, path: str, late: bool, wrong: VerdictKind, pools: PoolSet
) -> None:
    program = f"{entry_points.__name__}.beside_numbers"
    case = OpCase("composite.beside_numbers", program, (path, -2, late), {"x": NUMBERS}, "chains", False)
    pending, sharded = Trial(case, MESH, ((Partial(kind),),)), Trial(case, MESH, ((Shard(0),),))
    assert judge(run_remedied(pools, pending, ()), make_reference(case)).kind is wrong
    mended = run_remedied(pools, pending, ("numbers-taken-for-tensors",))
    assert judge(mended, make_reference(case)).kind is VerdictKind.PASS
    assert judge(run_remedied(pools, sharded, ()), make_reference(case)).kind is VerdictKind.PASS


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("path", "kind", "wrong"),
    [
        # a later one has a rule of amax.out without a placement for out, and raises in every call
        ("torch.amax", "out", VerdictKind.WRONG_VALUE if torch_is("<2.14") else VerdictKind.CRASH),
        ("torch.Tensor.add_", "in place", VerdictKind.CRASH),
        ("torch.Tensor.copy_", "an item", VerdictKind.CRASH),
    ],
)
def test_what_is_written_to_a_plain_tensor_is_seen_and_refused(
    path: str, kind: str, wrong: VerdictKind, pools: PoolSet
) -> None:
    program = f"{entry_points.__name__}.written_to_plain"
    case = OpCase("composite.written_to_plain", program, (path, kind), {"x": NUMBERS}, "chains", False)
    trial = Trial(case, MESH, ((Shard(0),),))
    assert judge(run_remedied(pools, trial, ()), make_reference(case)).kind is wrong
    refused = run_remedied(pools, trial, ("plain-tensors-written-to",))
    assert judge(refused, make_reference(case)).kind is VerdictKind.UNSUPPORTED


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "wrong"),
    [
        ("share_memory_", VerdictKind.DIED),
        ("apply_", VerdictKind.DIED),
        ("from_dlpack", VerdictKind.DIED),
        ("tensor", VerdictKind.CRASH),
        ("format", VerdictKind.CRASH),
    ],
)
def test_what_reads_the_memory_of_a_dtensor_is_seen_and_mended(way: str, wrong: VerdictKind, pools: PoolSet) -> None:
    program = f"{handing_over.__name__}.handed_over"
    case = OpCase("composite.handed_over", program, (way,), {"x": NUMBERS}, "chains", False)
    trial = Trial(case, MESH, ((Replicate(),),))
    remedy = "formats-of-scalars" if way == "format" else "memory-of-wrappers"
    assert judge(run_remedied(pools, trial, ()), make_reference(case)).kind is wrong
    assert not judge(run_remedied(pools, trial, (remedy,)), make_reference(case)).kind.bad


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("difference", "wrong"),
    [
        ("", VerdictKind.PASS),
        ("shape", VerdictKind.CRASH),
        ("dtype", VerdictKind.CRASH),
        ("alone", VerdictKind.HANG),
    ],
)
def test_checks_on_submeshes_that_ask_all_ranks_are_seen_and_mended(
    difference: str, wrong: VerdictKind, pools: PoolSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"{parallel.__name__}.checked_on_submeshes"
    case = OpCase("composite.checked_submesh", program, (difference,), {"x": NUMBERS}, "chains", False)
    trial = Trial(case, MeshSpec((2, 2)), ((Shard(0), Replicate()),))
    if wrong is VerdictKind.HANG:  # which takes the whole limit; ranks that compute get more
        monkeypatch.setattr(pools.of(trial.mesh), "trial_limit", 4.0)
    assert judge(run_remedied(pools, trial, ()), make_reference(case)).kind is wrong
    mended = run_remedied(pools, trial, ("checks-of-the-whole-world",))
    assert judge(mended, make_reference(case)).kind is VerdictKind.PASS


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("remedy", "program", "args", "wrong"),
    [
        ("sequences-counted-from-the-end", buffers.in_context, ([["torch.clone"]], [-1]), VerdictKind.CRASH),
        ("checkpoints-of-strided-shards", handing_over.checkpointed, ("torch.flatten", [], []), VerdictKind.CRASH),
        ("outputs-that-keep-their-shape", buffers.resized, ("torch.exp", [], [0], [Shard(0)]), VerdictKind.WRONG_SHAPE),
    ],
)
def test_what_changes_memory_is_seen_and_mended(
    remedy: str, program: Callable[..., Any], args: tuple[object, ...], wrong: VerdictKind, pools: PoolSet
) -> None:
    case = OpCase("composite.given", f"{program.__module__}.{program.__name__}", args, {"x": SQUARE}, "chains", False)
    trial = Trial(case, MESH, ((Shard(1),),))
    assert judge(run_remedied(pools, trial, ()), make_reference(case)).kind is wrong
    assert judge(run_remedied(pools, trial, (remedy,)), make_reference(case)).kind is VerdictKind.PASS


@pytest.mark.ranks
def test_what_is_unscaled_beside_a_plain_flag_is_not_refused(pools: PoolSet) -> None:
    tensors = {"p0": NUMBERS, "g0": NUMBERS - 2}
    case = OpCase("composite.scaled_gradients", f"{procedures.__name__}.scaled", (1,), tensors, "chains", False)
    trial = Trial(case, MESH, ((Shard(0),),) * len(tensors))
    kept = run_remedied(pools, trial, ("plain-tensors-written-to",))
    assert judge(kept, make_reference(case)).kind is VerdictKind.PASS


@pytest.mark.ranks
def test_norms_of_several_meshes_are_seen_to_raise_and_mended(pools: PoolSet) -> None:
    tensors = {"p0": NUMBERS, "g0": NUMBERS - 2, "p1": NUMBERS[0].clone(), "g1": NUMBERS[1].clone()}
    path = f"{entry_points.__name__}.over_two_meshes"
    outcomes: dict[str, list[VerdictKind]] = {}
    every = tuple(
        one.name for one in REMEDIES.remedies
    )  # each looks at lists whose tensors are on meshes of different sizes
    for kind, option in (("clip_grad_norm_", "foreach"), ("AdamW", "foreach"), ("AdamW", "fused")):
        options = {option: True, **({"lr": 0.5} if kind == "AdamW" else {"max_norm": 3.0})}
        case = OpCase("composite.given", path, (kind, options), tensors, "chains", False)
        trial = Trial(case, MeshSpec((2, 2)), ((Shard(0), Replicate()),) * len(tensors))
        outcomes[f"{kind}, {option}"] = [
            judge(run_remedied(pools, trial, remedies), make_reference(case)).kind
            for remedies in ((), ("norms-of-several-meshes",), every)
        ]
    assert outcomes == {
        "clip_grad_norm_, foreach": [VerdictKind.CRASH, VerdictKind.PASS, VerdictKind.PASS],
        "AdamW, foreach": [VerdictKind.PASS, VerdictKind.PASS, VerdictKind.PASS],
        "AdamW, fused": [VerdictKind.PASS, VerdictKind.PASS, VerdictKind.PASS],
    }


def test_every_mutant_is_tried() -> None:
    own = {f for name, f in vars(entry_point_mutants).items() if callable(f) and name[0] != "_"}
    assert {f for f in own if f.__module__ == entry_point_mutants.__name__} == {*CASES}
