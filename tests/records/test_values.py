"""Both encodings give back what they were given, bit for bit, and refuse what they would lose."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Contribution, Fate, Observation, ProcessReport
from verifier.core.verdict import Phase
from verifier.execution.packing import pack, unpack
from verifier.records.schema import CaseRecord, TrialRecord
from verifier.records.trials import surely_loads
from verifier.records.values import case_record, load_case, load_trial, trial_record

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGER = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64)


# --------------------------------------------------------------------------------------------------------- generators
@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Dense tensors of any bits: denormal numbers, both zeros, infinities and NaN, in any order of strides."""
    dtype = draw(st.sampled_from(FLOATING + COMPLEX + INTEGER))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        bits = bytearray(bit & 1 for bit in bits)
    flat = torch.frombuffer(bits, dtype=dtype).clone() if size else torch.empty(0, dtype=dtype)
    tensor = one_nan(flat).reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()) and tensor.numel():
        tensor = torch.stack([tensor, tensor], -1)[..., 1]
    differentiable = dtype in FLOATING + COMPLEX
    if draw(st.booleans()):
        return nn.Parameter(tensor, requires_grad=differentiable and draw(st.booleans()))
    return tensor.requires_grad_(differentiable and draw(st.booleans()))


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with every NaN of one and the same payload, the one thing that a file does not keep."""
    if tensor.is_complex():
        return torch.view_as_complex(one_nan(torch.view_as_real(tensor)))
    return torch.where(tensor.isnan(), torch.nan, tensor) if tensor.is_floating_point() else tensor


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.sampled_from((torch.float32, torch.bool, torch.strided, torch.channels_last))
    | st.sampled_from((torch.device("cpu"), torch.device("cuda", 1)))
)
values = st.recursive(
    tensors() | scalars,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=6,
)
placement = st.sampled_from([Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")])


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    mesh = draw(st.sampled_from([MeshSpec((4,)), MeshSpec((2, 2), "simulated"), MeshSpec((3,), "nccl", "cuda")]))
    one: st.SearchStrategy[tuple[Placement, ...]] = st.tuples(*[placement] * mesh.ndim)
    return Trial(
        OpCase(
            op="aten.embedding.default",
            call="torch.nn.functional.embedding",
            args=tuple(draw(st.lists(values, max_size=3))),
            kwargs=draw(st.dictionaries(st.text(max_size=3), values, max_size=2)),
            family="embedding",
            exact=draw(st.booleans()),
            tags=draw(st.frozensets(st.text(max_size=4), max_size=3)),
        ),
        mesh,
        combination=tuple(draw(st.lists(one, max_size=3))),
        cotangents=tuple(draw(st.lists(st.tuples(one), max_size=2))),
        seed=draw(st.integers(0, 2**63)),
    )


# --------------------------------------------------------------------------------------------------------- comparison
def bits(tensor: torch.Tensor) -> bytes:
    # A copy, because torch calls one element with a stride of 2 contiguous and then will not show its bytes.
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: Any, expected: Any, strides: bool) -> None:
    """Compare values, types and bits; ``==`` would call -0.0 equal to 0.0, 1 equal to True, and a tensor ambiguous."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
        assert bits(got) == bits(expected)
        assert got.is_contiguous() == expected.is_contiguous()
        assert got.is_leaf
        if strides:
            assert got.stride() == expected.stride()
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other, strides)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key], strides)
    else:
        assert repr(got) == repr(expected)


def assert_same_trial(got: Trial, expected: Trial, strides: bool) -> None:
    assert_same([got.case.args, got.case.kwargs], [expected.case.args, expected.case.kwargs], strides)
    case, other = got.case, expected.case
    assert (case.op, case.call, case.family) == (other.op, other.call, other.family)
    assert (case.exact, case.tags) == (other.exact, other.tags)
    assert replace(got, case=other) == expected


def through_json(case: OpCase) -> OpCase:
    return load_case(msgspec.json.decode(msgspec.json.encode(case_record(case)), type=CaseRecord))


def call(*args: object, **kwargs: object) -> OpCase:
    return OpCase("aten.op.default", "torch.op", args, kwargs)


# -------------------------------------------------------------------------------------------------------------- files
@settings(deadline=None, max_examples=150)
@given(trials())
def test_trial_round_trips_through_json(trial: Trial) -> None:
    record = trial_record(trial)
    read = msgspec.json.decode(msgspec.json.encode(record), type=TrialRecord)
    assert read == record
    assert surely_loads(read)
    assert_same_trial(load_trial(read), trial, strides=False)


@settings(deadline=None, max_examples=50)
@given(trials())
def test_storing_what_was_loaded_gives_the_same_record(trial: Trial) -> None:
    record = trial_record(trial)
    assert msgspec.json.encode(trial_record(load_trial(record))) == msgspec.json.encode(record)


@pytest.mark.parametrize("dtype", FLOATING)
def test_extreme_floats_keep_their_bits(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = [0.0, -0.0, float("inf"), -float("inf"), info.max, info.min, info.tiny, info.smallest_normal / 2, 0.1]
    tensor = torch.tensor([*special, float("nan")], dtype=dtype)
    [loaded] = through_json(call(tensor)).args
    assert isinstance(loaded, torch.Tensor)
    assert bits(loaded) == bits(tensor)


def test_numbers_that_json_has_no_word_for_are_strings() -> None:
    tensor = torch.tensor([float("nan"), -float("inf"), -0.0])
    stored = case_record(call(tensor, float("inf"), complex(0, float("-inf")))).args
    assert stored[0]["tensor"]["values"] == ["nan", "-inf", -0.0]
    assert str(stored[0]["tensor"]["values"][2]) == "-0.0"
    assert stored[1:] == [{"float": "inf"}, {"complex": [0.0, "-inf"]}]


def test_text_that_looks_like_a_tag_stays_text() -> None:
    case = call("nan", {"tensor": [1]}, [{"dtype": "float32"}])
    assert through_json(case).args == ("nan", {"tensor": [1]}, [{"dtype": "float32"}])


@pytest.mark.parametrize("dtype", COMPLEX)
def test_conjugate_and_negated_views_keep_their_values(dtype: torch.dtype) -> None:
    lazy = torch.tensor([1 + 2j], dtype=dtype).conj()
    assert lazy.is_conj()
    assert lazy.imag.is_neg()
    stored: Any = through_json(call(lazy, lazy.imag)).args
    for back in (stored, unpack(pack((lazy, lazy.imag)))):
        assert torch.equal(back[0], torch.tensor([1 - 2j], dtype=dtype))
        assert back[1].tolist() == [-2.0]


def test_shape_stays_a_shape() -> None:
    [shape] = through_json(call(torch.Size([2, 3]))).args
    assert type(shape) is torch.Size
    assert shape == (2, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.arange(8)[::2],
        torch.arange(6).reshape(3, 2)[:, :1],
        torch.ones(1).expand(4),
    ],
    ids=["transposed", "strided vector", "column", "expanded"],
)
def test_not_contiguous_stays_so_in_a_file(tensor: torch.Tensor) -> None:
    [loaded] = through_json(call(tensor)).args
    assert isinstance(loaded, torch.Tensor)
    assert not loaded.is_contiguous()
    assert loaded.tolist() == tensor.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3)[:, None].expand(3, 4),
        torch.arange(6).unfold(0, 3, 1),
        torch.arange(12).reshape(3, 4)[:, :3],
        torch.arange(8)[::2],
    ],
    ids=["expanded", "windows", "part", "every other"],
)
def test_gaps_and_shared_elements_in_memory_stay_in_a_file(tensor: torch.Tensor) -> None:
    [loaded] = through_json(call(tensor)).args
    assert isinstance(loaded, torch.Tensor)
    assert loaded.stride() == tensor.stride()
    assert loaded.tolist() == tensor.tolist()


@pytest.mark.parametrize("strides", [[-1, 1], [1], [1 << 50, 1], [1 << 20, 1]])
def test_strides_that_fit_no_stored_tensor_are_refused(strides: list[int]) -> None:
    record = case_record(call(torch.arange(3)[:, None].expand(3, 2)))
    record.args[0]["tensor"]["strides"] = strides
    with pytest.raises(ValueError, match="do not fit a tensor of shape"):
        load_case(record)


@pytest.mark.parametrize("order", [(1, 0), (0, 2, 1), (1, 0, 2), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_the_order_of_dims_in_memory_stays_in_a_file(order: tuple[int, ...]) -> None:
    back = [order.index(dim) for dim in range(len(order))]
    tensor = torch.arange(math.prod(range(2, 2 + len(order)))).reshape([dim + 2 for dim in order]).permute(back)
    [loaded] = through_json(call(tensor)).args
    assert isinstance(loaded, torch.Tensor)
    assert loaded.stride() == tensor.stride()
    assert torch.equal(loaded, tensor)


class _Colour(IntEnum):
    RED = 1


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (call(1, [object]), r"args\[1\]\[0\] cannot be stored: <class 'object'> is a type"),
        (call(weight={"a": {1, 2}}), r"kwargs\['weight'\]\['a'\] cannot be stored: \{1, 2\} is a set"),
        (call({1: 2}), r"args\[0\] cannot be stored: its key 1 is a int, not a str"),
        (call(np.float64(1.0)), r"args\[0\] .* is a float64"),
        (call(_Colour.RED), r"args\[0\] .* is a _Colour"),
        (call("\ud800"), r"args\[0\] .* not valid Unicode"),
        (call(torch.ones(2).to_sparse()), r"args\[0\] .* its layout is torch.sparse_coo"),
        (call(torch.ones(2, device="meta")), r"args\[0\] .* meta device"),
        (call(torch.ones(2).as_subclass(_Subclass)), r"args\[0\] .* it is a _Subclass"),
    ],
)
def test_what_cannot_be_stored_is_named(case: OpCase, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        case_record(case)


def test_placements_that_cannot_be_read_back_are_named() -> None:
    class Odd(Placement):
        def __str__(self) -> str:
            return "Odd(1)"

    with pytest.raises(TypeError, match=r"placements Odd\(1\) cannot be stored"):
        trial_record(Trial(call(), MeshSpec((2,)), ((Odd(),),)))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"tensr": 1}, r"args\[0\]: 'tensr' is none of .*; did you mean 'tensor'\?"),
        ({"tensor": 1, "tuple": 2}, r"args\[0\]: expected one of the keys"),
        ({"dtype": "float23"}, r"torch has no dtype 'float23'; did you mean 'float32'\?"),
        ({"tuple": 3}, r"args\[0\]: expected a list, got 3"),
        ({"device": "gpu"}, r"args\[0\]: no device of torch: .*gpu"),
        ({"float": "infinity"}, r"'infinity' is neither a number nor one of nan, inf, -inf"),
        ({"tensor": {"dtype": "int64", "shape": [3], "values": [1]}}, r"1 values do not fill a tensor of shape \[3\]"),
        (
            {"tensor": {"dtype": "int64", "shape": [1, 1], "values": [1], "order": [0, 0]}},
            r"order \[0, 0\] does not have each of 2 dims once",
        ),
        ({"tensor": {"dtype": "int64", "shape": [1], "values": [1.5]}}, r"1.5 is no value of a tensor of dtype int64"),
        (
            {"tensor": {"dtype": "int64", "shape": [1], "values": [True]}},
            r"True is no value of a tensor of dtype int64",
        ),
        ({"tensor": {"dtype": "bool", "shape": [1], "values": [1]}}, r"1 is no value of a tensor of dtype bool"),
        ({"tensor": {"dtype": "uint8", "shape": [1], "values": [300]}}, r"not a tensor that torch can hold"),
        ({"tensor": {"dtype": "int64", "shape": [], "values": [1], "requires_grad": True}}, r"torch can hold"),
        ({"tensor": {"shape": [1]}}, r"args\[0\]: not a stored tensor: .*dtype"),
    ],
)
def test_malformed_records_are_named(stored: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_case(CaseRecord("op", "call", [stored], {}))


# --------------------------------------------------------------------------------------------------------------- pipe
@settings(deadline=None, max_examples=150)
@given(trials())
def test_trial_round_trips_through_a_pipe_with_its_strides(trial: Trial) -> None:
    assert_same_trial(unpack(pack(trial)), trial, strides=True)


@pytest.mark.parametrize(
    "one", [Replicate(), Shard(0), Shard(3), *(Partial(op) for op in ("sum", "avg", "product", "min", "max"))], ids=str
)
def test_placements_survive_a_pipe(one: Placement) -> None:
    back = unpack(pack(one))
    assert type(back) is type(one)
    assert back == one
    assert hash(back) == hash(one)
    assert [other for other in (Replicate(), Shard(1), Partial("other")) if back == other] == (
        [one] if one == Replicate() else []
    )


def test_nan_payload_and_sign_survive_a_pipe() -> None:
    tensor = torch.frombuffer(bytearray(b"\x01\x00\xc0\xff\x00\x00\x80\x7f"), dtype=torch.float32)
    assert bits(unpack(pack(tensor))) == bits(tensor)


def test_received_tensor_owns_its_memory_and_can_grow() -> None:
    back = unpack(pack(torch.ones(2, 3)))
    assert back._base is None
    assert back.resize_(4, 5).shape == (4, 5)


def test_only_the_memory_of_a_view_is_sent() -> None:
    assert len(pack(torch.zeros(1000, 1000)[3])) < 10_000


def test_one_tensor_in_two_places_stays_one() -> None:
    weight = torch.ones(2)
    first, second = unpack(pack((weight, [weight])))
    assert first is second[0]


def test_observation_with_contributions_survives_a_pipe() -> None:
    trial = Trial(call(torch.ones(2)), MeshSpec((2,)), ((Shard(0),),))
    part = Contribution(Phase.GATHER, "output", 1, "P(sum)", torch.tensor([2.0, -0.0]))
    report = ProcessReport((1,), Phase.DONE, contributions=(part,), seconds=(("op", 0.5),))
    back = unpack(pack(Observation(trial, Fate.COMPLETED, (None, report))))
    assert back.fate is Fate.COMPLETED
    assert back.reports[0] is None
    assert back.reports[1].reached is Phase.DONE
    assert bits(back.reports[1].contributions[0].local) == bits(part.local)


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2).as_subclass(_Subclass)])
def test_pack_refuses_tensors_that_it_would_change(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="the tensor cannot be stored"):
        pack({"a": tensor})


def test_mapping_of_another_type_is_loaded_as_a_dict() -> None:
    assert through_json(call(OrderedDict(b=1, a=(2,)))).args == ({"b": 1, "a": (2,)},)


def test_pack_keeps_attributes_of_parameters() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.sequence_parallel = True  # type: ignore[attr-defined]
    again, same = unpack(pack([parameter, parameter]))
    assert again is same
    assert again.sequence_parallel is True


@pytest.mark.processes
def test_another_process_can_unpack() -> None:
    trial = Trial(call(torch.arange(6.0).reshape(2, 3).T), MeshSpec((2,)), ((Shard(0),),))
    script = (
        "import sys; from verifier.execution.packing import pack, unpack; "
        "t = unpack(sys.stdin.buffer.read()); sys.stdout.buffer.write(pack((t.case.args[0] + 1, t.combination)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pack(trial), capture_output=True, check=True, timeout=120
    )
    tensor, combination = unpack(done.stdout)
    assert tensor.tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert combination == trial.combination


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts the open files of the process in /proc")
def test_pack_opens_no_files() -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [unpack(pack(torch.ones(3))) for _ in range(50)]
    assert len(kept) == 50
    assert len(os.listdir("/proc/self/fd")) == before
