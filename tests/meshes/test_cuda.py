"""The same meshes on GPUs, and on the CPU where there are none, so that what runs here is what runs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from command_processes import WRONG_GRADIENT_RULE
from fault_trials import CASE
from forked_commands import run_python

from strategies.tensors import filled
from verifier.campaign.request import Request, make_plan
from verifier.cli.app import app
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.verdict import VerdictKind
from verifier.core.wording import plural
from verifier.gate.baseline import Baseline
from verifier.meshes.crew import PoolKey
from verifier.meshes.hosts import Place, gpu_problem
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.torch_internals.placements import Placements

GPUS = torch.cuda.device_count()


class Kind(NamedTuple):
    """A mesh to run the tests on."""

    backend: str
    device: str
    gpus: int

    def spec(self, *shape: int) -> MeshSpec:
        return MeshSpec(shape, self.backend, self.device)  # type: ignore[arg-type]


def needs(kind: Kind) -> list[pytest.MarkDecorator]:
    if not kind.gpus:
        return []
    reason = f"{kind.backend} needs {plural(kind.gpus, 'GPU')}, torch sees {GPUS}"
    return [pytest.mark.gpu, pytest.mark.skipif(kind.gpus > GPUS, reason=reason)]


CPU = Kind("gloo", "cpu", 0)
SHARED = Kind("gloo", "cuda", 1)
OWN = Kind("nccl", "cuda", 2)
KINDS = [pytest.param(kind, id=f"{kind.backend}-{kind.device}", marks=needs(kind)) for kind in (CPU, SHARED, OWN)]
FOUR = [pytest.param(kind, id=f"{kind.backend}-{kind.device}", marks=needs(kind)) for kind in (CPU, SHARED)]

MATMUL = OpCase(
    "aten.mm.default",
    "torch.mm",
    (filled((5, 3), torch.float64, 1).requires_grad_(), filled((3, 4), torch.float64, 2).requires_grad_()),
)
DOUBLED = OpCase("aten.mul.Tensor", "torch.mul", (filled((5, 3), torch.float64, 3), torch.tensor(2.0)))
IN_PLACE = OpCase("aten.add_.Tensor", "torch.ops.aten.add_.Tensor", (filled((5, 3), torch.float64, 4), 1.0))
MOVED = OpCase(
    "aten._to_copy.default",
    "torch.ops.aten._to_copy.default",
    (filled((5, 3), torch.float64, 5),),
    {"dtype": torch.float32, "device": torch.device("cpu")},  # the device of the call, whichever that is
)


def verdicts(
    kind: Kind, shape: Sequence[int], wanted: Sequence[tuple[OpCase, str, str]], imports: Sequence[str] = ()
) -> list[VerdictKind]:
    """Return the verdicts on cases, each with its combination and the cotangent's placements, as text."""
    mesh = kind.spec(*shape)
    trials = [
        Trial(case, mesh, tuple(parse_placements(part) for part in combination.split(" ")), _passes(cotangent))
        for case, combination, cotangent in wanted
    ]
    with Pool(PoolKey.of(mesh), imports, trial_limit=60.0) as pool:
        return [_judged(observation) for observation in pool.run(trials)]


def _passes(cotangent: str) -> tuple[tuple[Placements, ...], ...]:
    return ((parse_placements(cotangent),),) if cotangent else ()


def _judged(observation: Observation) -> VerdictKind:
    verdict = judge(observation, make_reference(observation.trial.case))
    assert verdict.kind is not VerdictKind.TOOL_ERROR, verdict
    return verdict.kind


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(kind: Kind) -> None:
    """Gathers, reductions, random parts, masked partials and what is made anew, forward and backward."""
    wanted = [
        (CASE, "R R", "R"),
        (CASE, "S(0) R", "S(0)"),  # a masked partial, then a reduction
        (CASE, "S(1) R", "P(sum)"),
        (CASE, "P(sum) R", "S(1)"),
        (MATMUL, "S(0) R", "S(0)"),  # an uneven gather
        (MATMUL, "S(1) S(0)", "R"),
        (MATMUL, "P(sum) S(1)", "P(sum)"),
        (DOUBLED, "P(avg) R", ""),
        (DOUBLED, "P(max) R", ""),
        (IN_PLACE, "S(0)", ""),
        (IN_PLACE, "R", ""),
        (MOVED, "S(0)", ""),
    ]
    assert verdicts(kind, (2,), wanted) == [VerdictKind.PASS] * len(wanted)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", FOUR)
def test_a_mesh_of_two_dims(kind: Kind) -> None:
    wanted = [
        (MATMUL, "(S(0),R) (R,S(1))", "(R,S(0))"),
        (MATMUL, "(S(0),S(1)) (P(sum),S(0))", "(P(sum),R)"),
        (CASE, "(S(0),S(1)) (R,R)", "(S(0),S(1))"),
    ]
    assert verdicts(kind, (2, 2), wanted) == [VerdictKind.PASS] * len(wanted)


FREQUENT = OpCase(
    "aten.embedding.default",
    "torch.nn.functional.embedding",
    (torch.tensor([[3, 1], [3, 3]]), filled((5, 2), torch.float64, 6).requires_grad_()),
    {"scale_grad_by_freq": True},
)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_rules_are_found(kind: Kind) -> None:
    """A gradient called replicated that is pending, and torch's own rule that counts the ids of one rank alone."""
    assert verdicts(kind, (2,), [(CASE, "R S(0)", "S(0)")], [str(WRONG_GRADIENT_RULE)]) == [VerdictKind.WRONG_GRADIENT]
    assert verdicts(kind, (2,), [(FREQUENT, "R S(0)", "S(0)")]) == [VerdictKind.WRONG_GRADIENT]


INTEGERS = OpCase("aten.mm.default", "torch.mm", (torch.arange(1, 7).reshape(3, 2), torch.arange(1, 9).reshape(2, 4)))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_the_device_lacks_says_nothing_of_the_rule(kind: Kind) -> None:
    """CUDA multiplies no matrices of integers."""
    expected = VerdictKind.INCONCLUSIVE if kind.gpus else VerdictKind.PASS
    assert verdicts(kind, (2,), [(INTEGERS, "S(0) R", ""), (MATMUL, "S(0) R", "")]) == [expected, VerdictKind.PASS]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_mended(kind: Kind) -> None:
    """A dead rank costs its trial, also where processes hold a GPU."""
    mesh = kind.spec(2)
    combination = (parse_placements("P(sum)"), parse_placements("R"))
    good = Trial(CASE, mesh, combination)
    with Pool(PoolKey.of(mesh), trial_limit=60.0) as pool:
        faulty = Trial(CASE, mesh, combination, fault="kill:1")
        judged = [_judged(observation) for observation in pool.run([good, faulty, good])]
    assert judged == [VerdictKind.PASS, VerdictKind.DIED, VerdictKind.PASS]


# ---------------------------------------------------------------------------------------------------- what is asked for
@pytest.mark.skipif(GPUS > 0, reason=f"for machines without a GPU; torch sees {GPUS}")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="--device cuda: torch sees no GPU here"):
        app(["run", "embedding", "--device", "cuda"], standalone_mode=False)


def test_nccl_with_too_few_gpus_names_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    request = Request(["embedding"], ["2"], device="cuda")
    with pytest.raises(ValueError, match="2 ranks were asked for, and there is 1 GPU; --backend gloo shares them"):
        make_plan(request, Baseline())
    plan = make_plan(replace(request, backend="gloo"), Baseline())
    assert plan.meshes == (MeshSpec((2,), "gloo", "cuda"),)
    assert plan.header.places == "ranks share GPUs on mesh 2"
    assert make_plan(replace(request, meshes=["1"]), Baseline()).header.places == ""
    with pytest.raises(ValueError, match="simulated ranks have CPU tensors only"):
        make_plan(replace(request, meshes=["simulated:2"]), Baseline())


def test_gpus_are_counted_by_machine_and_by_what_each_rank_sees() -> None:
    one = [Place("m", "host", 0, "0"), Place("m", "host", 1, "1")]
    assert gpu_problem(one, "nccl") == ""
    assert gpu_problem([*one, Place("n", "other", 0, "0")], "nccl") == ""
    assert "3 ranks were asked for, and there are 2 GPUs" in gpu_problem([*one, Place("m", "host", 2, "0")], "nccl")
    assert gpu_problem([*one, Place("n", "other", 0)], "gloo") == "torch sees no GPU on other"


STAGED = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from verifier.torch_internals.groups import staged_collective

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
functional = torch.ops._c10d_functional
name = dist.group.WORLD.group_name
x = torch.arange(6.0).reshape(3, 2)


def staged(op, *args, **kwargs):
    return staged_collective(getattr(functional, op).default)(*args, **kwargs)


before = x.clone()
assert staged("all_reduce", x, "sum", name).equal(x)
assert staged("all_gather_into_tensor", x, 1, name).equal(x)
(gathered,) = staged("all_gather_into_tensor_coalesced", [x], 1, group_name=name)
assert gathered.equal(x)
assert staged("reduce_scatter_tensor", x, "sum", 1, name).equal(x)
assert staged("all_to_all_single", x, [3], [3], name).equal(x)
out = torch.empty(3, 2)
assert staged("all_gather_into_tensor_out", x, 1, name, out=out) is out
assert out.equal(x)
written = x.clone()
assert staged("all_reduce_", written, "sum", name) is written
assert written.equal(before)
assert x.equal(before)
assert staged_collective(torch.ops._dtensor.shard_dim_alltoall.default)(x, 0, 1, name).equal(x)
# or a thread of gloo's may let go of a tensor while Python ends, which aborts: pytorch/pytorch#190489
dist.destroy_process_group()
print("staged")
"""


@pytest.mark.processes
def test_collectives_by_way_of_the_host_do_what_they_do_otherwise() -> None:
    ended = run_python("-c", STAGED)
    assert ended.stdout == "staged\n", ended.stderr
