"""Placements among a call's arguments: found, asked for, stored, printed, and cut to a smaller mesh."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.redistribution.programs import CHAIN, SEQUENCE
from verifier import programs as module
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.execution.packing import pack, unpack
from verifier.findings.failures import Failure
from verifier.findings.grouping import rule_class
from verifier.findings.script.render import render_script, run_script
from verifier.placements.alphabet import Alphabet
from verifier.programs import asked_placements, asks, keep_mesh_dims, targets
from verifier.records.schema import FAILS, GONE, CaseRecord
from verifier.records.values import case_record, load_case
from verifier.torch_internals.placements import Placements, strided_shard
from verifier.torch_internals.refusals import is_refusal

R, ROWS, STRIDED = Replicate(), Shard(0), strided_shard(0, 2)
TENSOR = torch.tensor([[3.0, -1.0], [2.0, 5.0]], dtype=torch.float64)


def chain(*made: list[object]) -> OpCase:
    return OpCase("dtensor.redistribute", CHAIN, (TENSOR, list(made)), family="redistribution")


def sequence(*steps: list[object]) -> OpCase:
    return OpCase("dtensor.sequence", SEQUENCE, (TENSOR, TENSOR, list(steps)), family="redistribution")


@pytest.fixture
def declared() -> Iterator[str]:
    call = "torch.neg"
    asks(call, lambda case: ((ROWS,),))
    yield call
    del module._asked[call]


def test_targets_are_found_at_any_depth() -> None:
    case = sequence(["redistribute", 0, [R, ROWS]], ["neg", 2], ["redistribute", 3, [STRIDED, R]])
    assert targets(case) == ((R, ROWS), (STRIDED, R))
    assert (
        targets(
            OpCase("op", "torch.sum", (TENSOR, [], [0])),
        )
        == ()
    )


def test_a_smaller_mesh_keeps_its_own_mesh_dims() -> None:
    case = keep_mesh_dims(sequence(["redistribute", 0, [R, ROWS, STRIDED]], ["sum", 2, 0]), (0, 2))
    assert targets(case) == ((R, STRIDED),)
    assert case.args[2] == [["redistribute", 0, [R, STRIDED]], ["sum", 2, 0]]
    assert case.args[0] is TENSOR


def test_a_chain_asks_for_its_last_target_as_dtensor_spells_it() -> None:
    assert asked_placements(chain([ROWS], [Shard(-1)])) == ((Shard(1),),)
    assert asked_placements(chain()) == (None,)


def test_a_sequence_asks_for_what_no_op_consumes() -> None:
    case = sequence(["redistribute", 0, [R]], ["neg", 2], ["redistribute", 1, [ROWS]])
    assert asked_placements(case) == (None, (ROWS,))


def test_other_calls_ask_for_nothing_until_they_declare_it(declared: str) -> None:
    assert asked_placements(OpCase("aten.neg.default", "torch.abs", (TENSOR,))) == ()
    assert asked_placements(OpCase("aten.neg.default", declared, (TENSOR,))) == ((ROWS,),)


@pytest.mark.parametrize("placement", [R, ROWS, Shard(-1), Partial("max"), STRIDED])
def test_placements_can_be_stored_and_sent(placement: object) -> None:
    case = chain([placement])
    stored = msgspec.json.decode(msgspec.json.encode(case_record(case)), type=CaseRecord)
    assert load_case(stored).args[1] == [[placement]]
    assert unpack(pack(case)).args[1] == [[placement]]


def test_a_stored_placement_that_is_none_is_refused() -> None:
    record = replace(case_record(chain([ROWS])), args=[{"placement": "T(0)"}])
    with pytest.raises(ValueError, match=r"args\[0\]: placement 'T\(0\)' is none of"):
        load_case(record)


@pytest.mark.processes
def test_a_process_that_only_reads_files_knows_strided_shards() -> None:
    program = """
from verifier.records.values import load_case
from verifier.records.schema import CaseRecord
print(load_case(CaseRecord(op="", call="", args=[{"placement": "_S(0, 2)"}], kwargs={})).args)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(_StridedShard(dim=0, sf=2),)"


def test_alphabet_has_strided_shards_if_asked_and_admits_them_always() -> None:
    assert STRIDED not in Alphabet().placements(1, torch.float64)
    assert STRIDED in Alphabet(strided=(2,)).placements(1, torch.float64)
    assert Alphabet.admits(STRIDED, 1, torch.bool)
    assert not Alphabet.admits(STRIDED, 0, torch.float64)
    assert Alphabet.admits(Partial("sum"), 1, torch.bool)
    assert not Alphabet.admits(Partial("avg"), 1, torch.bool)


def failure(case: OpCase, source: Placements, verdict: VerdictKind = VerdictKind.WRONG_VALUE) -> Failure:
    trial = Trial(case, MeshSpec((2,) * len(source)), (source,))
    return Failure(trial, Observation(trial, Fate.COMPLETED, ()), Verdict(verdict, phase=Phase.FORWARD))


def test_failures_are_grouped_by_the_kinds_of_placements() -> None:
    nested = failure(chain([R, Shard(1)]), (ROWS, ROWS))
    assert str(rule_class(nested)) == "dtensor.redistribute: S,S+S -> S"
    ordered = failure(chain([R, R], [STRIDED, ROWS]), (Partial("avg"), R))
    assert str(rule_class(ordered)) == "dtensor.redistribute: P(avg) -> S,S+S,_S"
    odd = failure(chain([R, STRIDED]), (Partial("avg"), R))
    assert str(rule_class(odd)) == "dtensor.redistribute: strided shards in no shard order"
    assert str(rule_class(failure(chain([R]), (R,)))) == "dtensor.redistribute: R -> R"


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (RuntimeError("Can not redistribute: redistributing to Partial is for internal use only!"), True),
        (RuntimeError("This needs redistribution. Please redistribute the input first."), True),
        (AssertionError("Please redistribute the input first."), False),
        (RuntimeError("Expected cond to be True, but got False."), False),
    ],
)  # fmt: skip
def test_what_dtensor_says_plainly_is_a_refusal(error: Exception, refusal: bool) -> None:
    assert is_refusal(error) == refusal


# -------------------------------------------------------------------------------------------------------------- script
def script(case: OpCase, source: Placements) -> str:
    return render_script(failure(case, source).trial, Verdict(VerdictKind.WRONG_VALUE, "x", Phase.FORWARD))


@pytest.mark.ranks
def test_script_has_targets_as_literals_and_shows_nothing_where_nothing_is_wrong() -> None:
    source = script(chain([STRIDED], [Partial("max")]), (ROWS,))
    assert 'chain(input, [[_StridedShard(0, split_factor=2)], [Partial("max")]])' in source
    source = script(chain([STRIDED], [R]), (ROWS,))
    assert "from torch.distributed.tensor.placement_types import _StridedShard" in source
    assert run_script(source)[0] == GONE


def test_script_without_a_strided_shard_imports_nothing_private() -> None:
    assert "_StridedShard" not in script(chain([ROWS]), (R,))


@pytest.mark.ranks
def test_script_shows_a_result_that_is_placed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._asked, CHAIN, lambda case: ((ROWS,),))
    status, output = run_script(script(chain([Shard(1)]), (R,)))
    assert status == FAILS
    assert "output 0: placed as (Shard(dim=1),), expected [Shard(dim=0)]" in output


@pytest.mark.ranks
def test_script_checks_the_ranks_of_a_strided_shard() -> None:
    tensor = torch.arange(1.0, 5.0, dtype=torch.float64)
    source = script(replace(chain(), args=(tensor, [[STRIDED]])), (R,))
    assert run_script(source)[0] == GONE
    wrong = source.replace("pieces = cut(whole, placement.dim, placement.split_factor)", "pieces = [whole]")
    assert run_script(wrong)[0] == FAILS
