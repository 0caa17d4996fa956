"""Programs that torch itself runs wrongly: the remedy, the program, its arguments and its tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch_versions import needs_torch

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
from verifier.torch_internals.placements import strided_shard

NUMBERS = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
SQUARE = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(4, 4)
KEPT = {"use_local_output": False}
FUNCTIONS = "torch.nn.functional"
CONJUGATE = [
    ["lazy", "torch.conj", ["x"], {}],
    ["row", "torch.select", ["lazy", 0, 1], {}],
    ["made", "torch.mul", ["row", 2], {}],
]
DEFECTS = [
    ("data-that-stay", entry_points.exchanged, (), {"x": NUMBERS, "y": -NUMBERS}),
    ("views-in-inference-mode", entry_points.inferred, ("torch.unsqueeze", [0]), {"x": NUMBERS}),
    (
        "implicit-replication-that-ends",
        entry_points.implicitly,
        ("nested", "torch.add", True),
        {"x": NUMBERS, "y": -NUMBERS},
    ),
    (
        "penalties-through-from-local",
        procedures.penalised,
        ("from_local", [Replicate()]),
        {"x": NUMBERS.t().clone(), "y": NUMBERS},
    ),
    (
        "gradients-of-parallel-log-softmax",
        procedures.parallel_loss,
        ([Shard(1)], {"reduction": "sum", "alone": True}, ""),
        {"x": NUMBERS / 4, "y": torch.tensor([0, 2, 1, 2])},
    ),
    (
        "gradients-of-parallel-log-softmax",
        second_gradients.parallel,
        ([Shard(1)], {"reduction": "mean"}),
        {"x": NUMBERS / 4, "y": torch.tensor([0, 2, 1, 2])},
    ),
    ("copies-of-views", entry_points.copied, ("torch.narrow", [1, 1, 1]), {"x": NUMBERS}),
    ("copies-of-views", handing_over.stored, ("save", "torch.narrow", [1, 1, 1]), {"x": NUMBERS}),
    (
        "unfinished-results-stored",
        handing_over.stored,
        ("weights", "redistribute", [Replicate()]),
        {"x": NUMBERS},
    ),
    (
        "checkpoints-of-strided-shards",
        handing_over.checkpointed,
        ("torch.clone", [], [strided_shard(0, 2)]),
        {"x": NUMBERS},
    ),
    ("sequences-in-front", buffers.in_context, ([["torch.clone"]], [0]), {"x": SQUARE}),
    (
        "sequences-that-are-views",
        buffers.in_context,
        ([["torch.narrow", 1, 0, 4], ["torch.narrow", 1, 1, 4]], [1, 1]),
        {"x": torch.cat([SQUARE, SQUARE], 1)[:, :5].clone()},
    ),
    ("generators-ignored", entry_points.drawn, ("torch.Tensor.normal_", [], 5), {"x": NUMBERS}),
    ("orders-in-memory", memory_orders.laid_out, ("redistribute", [0, 2, 1], [Replicate()]), {"x": NUMBERS}),
    ("orders-in-memory", memory_orders.laid_out, ("distribute_tensor", [2, 1, 0], [Replicate()]), {"x": NUMBERS}),
    ("orders-in-memory", memory_orders.laid_out, ("from_local", [2, 1, 0], []), {"x": NUMBERS}),
    ("orders-in-memory", memory_orders.moved_between, ([4, 2, 3], [1, 2], [Shard(1)]), {"x": NUMBERS}),
    ("orders-in-memory", memory_orders.computed, ("torch.mul", [], [1, 0, 2], "moved first"), {"x": NUMBERS}),
    ("strides-of-kernels", memory_orders.computed, ("torch.Tensor.__rpow__", [2], [1, 0, 2], ""), {"x": NUMBERS}),
    ("strides-of-kernels", memory_orders.exchanged, ("torch.log_softmax", [1], [4, 2, 3], [1, 2]), {"x": NUMBERS}),
    (
        "strides-of-kernels",
        memory_orders.exchanged,
        (f"{FUNCTIONS}.layer_norm", [[2]], [4, 2, 3], [1, 2]),
        {"x": NUMBERS.square()},
    ),
    ("strides-of-kernels", memory_orders.computed, (f"{FUNCTIONS}.logsigmoid", [], [2, 1, 0], ""), {"x": NUMBERS}),
    (
        "strides-of-kernels",
        memory_orders.computed,
        (f"{FUNCTIONS}.batch_norm", [None, None, None, None, True], [0, 2, 1], ""),
        {"x": NUMBERS},
    ),
    ("orders-of-arguments", memory_orders.computed, ("torch.mul", [], [1, 0, 2], "expanded first"), {"x": NUMBERS}),
    ("orders-of-arguments", memory_orders.differentiated, ("torch.sum", [4, 2, 3], [1, 2]), {"x": NUMBERS}),
    (
        "memory-formats-cached",
        memory_orders.in_formats,
        ("torch.Tensor.to", [torch.float32], [Shard(0)], [torch.channels_last, None]),
        {"x": NUMBERS},
    ),
    (
        "memory-formats-cached",
        memory_orders.in_formats,
        ("torch.zeros_like", [], [Shard(0)], [None, torch.channels_last]),
        {"x": NUMBERS},
    ),
    ("meshes-ignored", handing_over.to_another_mesh, ([Shard(0)],), {"x": NUMBERS}),
    ("conjugates-that-are-sent", entry_points.distributed, ("torch.conj", [], [Shard(0)]), {"x": NUMBERS * 1j}),
    ("conjugates-that-are-sent", programs.chain, (CONJUGATE,), {"x": NUMBERS * 1j}),
    ("ranks-that-do-not-ascend", entry_points.reordered, ([1, 0], [Shard(0)]), {"x": NUMBERS}),
    ("callers-tensors-overwritten", entry_points.taken, (True, [Replicate()]), {"x": NUMBERS}),
    (
        "strided-shards-that-are-uneven",
        entry_points.distributed,
        ("torch.narrow", [0, 0, 3], [strided_shard(0, 2)]),
        {"x": NUMBERS},
    ),
    (
        "gradients-of-two-dtypes",
        parallel.fully_sharded,
        ([torch.bfloat16, torch.float32], {}, [False, True]),
        {"x": NUMBERS[:2] - 2, "y": NUMBERS[:2] - 3},
    ),
    (
        "gradients-of-two-dtypes",
        parallel.sharded_in_turns,
        (False, False, 0, "gradient_sync", [torch.bfloat16, torch.float32], ["a", "a"], True),
        {"x": NUMBERS[:2] - 2, "y": NUMBERS[:2] - 3},
    ),
    (
        "parameters-never-gathered",
        parallel.sharded_in_turns,
        (False, True, 0, "gradient_sync", [torch.bfloat16, torch.float32], ["a", "b"]),
        {"x": NUMBERS[:2] - 2, "y": NUMBERS[:2] - 3},
    ),
    (
        "flat-states-of-optimisers",
        handing_over.restored,
        ({"full_state_dict": True, "flatten_optimizer_state_dict": True}, True, [Shard(0)]),
        {"x": NUMBERS},
    ),
    (
        "models-left-out-of-states",
        handing_over.restored,
        ({"full_state_dict": True}, True, [Shard(0)], True),
        {"x": NUMBERS},
    ),
    (
        "gradients-between-all-reduces",
        parallel.sharded_in_turns,
        (True, False, 0, "all_reduce", [], ["ab", "b"]),
        {"x": NUMBERS, "y": -NUMBERS},
    ),
    (
        "dtypes-of-frozen-parameters",
        parallel.sharded_in_turns,
        (False, True, 0, "", [torch.bfloat16, torch.float32], ["ab", "frozen", "ab"]),
        {"x": NUMBERS, "y": -NUMBERS},
    ),
    pytest.param(
        "parameters-gathered-in-inference",
        parallel.sharded_in_turns,
        (False, True, 0, "", [], ["AB", "ab"]),
        {"x": NUMBERS, "y": -NUMBERS},
        marks=needs_torch("<2.15", "a later one runs this program rightly, and not that of the cause"),
    ),
    ("activations-taken-for-replicas", parallel.resharded, ("split", 0, False, 4), {"x": NUMBERS}),
    (
        "saved-tensors-of-other-sizes",
        parallel.resharded,
        ("replicated", 0, False, 4),
        {"x": NUMBERS.view(3, 4)[:2].clone()},
    ),
    (
        "sources-of-plans-for-the-module-itself",
        parallel.with_own_weights,
        ("", "ColwiseParallel", None),
        {"x": NUMBERS},
    ),
    pytest.param(
        "outputs-that-share-memory",
        buffers.written_to_views,
        ("torch.amax", [[0], True], ["torch.Tensor.transpose", 0, 1], False, []),
        {"x": SQUARE, "y": SQUARE[:, :1].clone()},
        marks=needs_torch("<2.14", "a later one raises for an output that is given to amax"),
    ),
    (
        "outputs-that-share-memory",
        buffers.written_to_views,
        ("torch.matmul", [], ["torch.Tensor.transpose", 0, 1], False, [Replicate()]),
        {"x": torch.stack([NUMBERS] * 2), "y": torch.stack([SQUARE[:3]] * 2), "z": torch.stack([SQUARE] * 2, 1)},
    ),
    (
        "views-of-copies",
        buffers.written_to_views,
        ("torch.mv", [], ["torch.Tensor.narrow", 0, 1, 3], False, []),
        {"x": SQUARE[:3].clone(), "y": SQUARE[0].clone(), "z": SQUARE[1].clone()},
    ),
    ("negative-dims-of-gradients", procedures.placed_gradients, ("to_local", ["from the end"]), {"x": NUMBERS}),
]
