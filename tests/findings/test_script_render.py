"""Scripts of findings as texts: each is Python, calls what the trial called, and decides by what its ranks say."""

from __future__ import annotations

import keyword
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.ops import argument_names
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.findings.failures import Failure
from verifier.findings.grouping import Group
from verifier.findings.record import finding_record
from verifier.findings.script import render as module
from verifier.findings.script import runtime
from verifier.findings.script.render import NoScriptError, render_script
from verifier.findings.script.source import needs_its_module
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements

SQUARE = torch.arange(1.0, 5.0, dtype=torch.float64).reshape(2, 2)
R = parse_placements("R")


def trial_of(call: str, /, *args: object, **kwargs: object) -> Trial:
    case = OpCase(call.removeprefix("torch.ops."), call, args, kwargs)
    return Trial(case, MeshSpec((2,)), (R,) * len(argument_names(case)))


def render(call: str, *args: object, kind: VerdictKind = VerdictKind.WRONG_VALUE, **kwargs: object) -> str:
    return render_script(trial_of(call, *args, **kwargs), Verdict(kind, "as it was"))


def run_here(source: str) -> dict[str, Any]:
    """Return what a script defines, without what it does as a program."""
    names: dict[str, Any] = {"__name__": "the_script"}
    hook = sys.excepthook
    try:
        exec(compile(source, "the_script", "exec", dont_inherit=True), names)
    finally:
        sys.excepthook = hook
    return names


def unlike(source: str) -> str:
    """Return how the local call of a script differs from that of the finding."""
    script = run_here(source)
    local: runtime.Local = script["Local"](script["call"], script["GLOBAL"], script["WRITTEN"])
    return local.unlike(script["LOCALLY_RAISED"])


# ------------------------------------------------------------------------------------------------------ it is Python
def from_(input: torch.Tensor, lambda_: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    return input + lambda_ + sum(others.values())


class Holder:
    @staticmethod
    def doubled(input: torch.Tensor) -> torch.Tensor:
        return input * 2


FACTOR = 3.0


def scaled(input: torch.Tensor, factor: float = FACTOR) -> torch.Tensor:
    return input * factor


def check(input: torch.Tensor) -> torch.Tensor:
    return input + 5


@pytest.mark.parametrize(
    ("call", "args", "kwargs", "text"),
    [
        ("torch.add", (SQUARE, SQUARE), {"alpha": 2}, "torch.add(argument_0, argument_1, alpha=2)"),
        ("torch.Tensor.__matmul__", (SQUARE, SQUARE), {}, "torch.Tensor.__matmul__(argument_0, argument_1)"),
        ("torch.ops.aten.add.Tensor", (SQUARE, SQUARE), {}, "torch.ops.aten.add.Tensor(self, other)"),
        ("torch.ops.aten.add", (SQUARE,), {"other": SQUARE}, "torch.ops.aten.add("),
        ("torch.ops.aten.add.out", (SQUARE, SQUARE), {"out": SQUARE + 1}, "aten.add.out(self, other, out=out)"),
        ("torch.ops.aten.random_.from", (SQUARE,), {"from": 0, "to": 5}, "getattr(torch.ops.aten.random_, 'from')("),
        ("torch.cat", ([SQUARE, SQUARE],), {"dim": 1}, "torch.cat([argument_0_0, argument_0_1], dim=1)"),
        ("torch.ops.aten.cat.default", ([SQUARE, SQUARE],), {}, "torch.ops.aten.cat.default([tensors_0, tensors_1])"),
        ("torch.nn.functional.linear", (SQUARE, SQUARE), {}, "torch.nn.functional.linear(argument_0, argument_1)"),
        ("torch.nn.functional.embedding", (), {"input": SQUARE.long() % 2, "weight": SQUARE}, "input=input, weight="),
        (f"{__name__}.from_", (SQUARE, SQUARE), {"from": SQUARE, "torch": SQUARE}, "(input, lambda_, torch=torch_, **"),
        (f"{__name__}.from_", (SQUARE, SQUARE), {"x_0": SQUARE, "x": [SQUARE]}, "x_0=x_0, x=[x_0_]"),
        (f"{__name__}.Holder.doubled", (SQUARE,), {}, "PROGRAM(input)"),
        (f"{__name__}.scaled", (SQUARE,), {}, "PROGRAM(input)"),  # what its default is called is not in its source
        (f"{__name__}.check", (SQUARE,), {}, "PROGRAM(input)"),  # a function of the script has this name
    ],
)  # fmt: skip
def test_every_call_is_python_and_does_what_it_did(
    call: str, args: tuple[object, ...], kwargs: dict[str, object], text: str
) -> None:
    source = render(call, *args, **kwargs)
    assert text in source
    script = run_here(source)
    names = argument_names(trial_of(call, *args, **kwargs).case)
    assert len(script["GLOBAL"]) == len(names)  # none has taken the name of another
    assert unlike(source) == ""


NUMBERS = st.one_of(
    st.integers(-3, 3), st.floats(), st.complex_numbers(), st.booleans(), st.none(), st.text(max_size=5)
)
PARAMETERS = st.sampled_from(
    [
        *keyword.kwlist,
        "input",
        "self",
        "torch",
        "float",
        "call",
        "GLOBAL",
        "x",
        "x_0",
        "",
        "a b",
        "é",
        "__debug__",
        "1x",
    ]
)
DTYPES = st.sampled_from(
    [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.uint8, torch.float8_e5m2]
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(DTYPES), draw(st.lists(st.integers(0, 2), max_size=3))
    values = [draw(st.complex_numbers() if dtype.is_complex else st.floats(width=16)) for _ in range(math.prod(shape))]
    if not (dtype.is_complex or dtype.is_floating_point):
        values = [value == value and abs(value) > 1 for value in values]
    made = torch.tensor(values, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype).reshape(shape)
    made = made.mT if made.ndim >= 2 and draw(st.booleans()) else made
    return made.requires_grad_() if dtype == torch.float64 and draw(st.booleans()) else made


ARGUMENTS = st.one_of(tensors(), NUMBERS, st.lists(tensors(), max_size=2), st.tuples(tensors(), NUMBERS))


@settings(max_examples=150)
@given(st.lists(ARGUMENTS, max_size=3), st.dictionaries(PARAMETERS, ARGUMENTS, max_size=3), tensors(), st.text())
def test_no_call_is_beyond_what_a_script_can_say(
    args: list[object], kwargs: dict[str, object], tensor: torch.Tensor, message: str
) -> None:
    """Whatever it is, the local call raises what it raised, and what the script holds are the same tensors."""
    asked = trial_of("torch.add", tensor, *args, **kwargs)
    source = render_script(asked, Verdict(VerdictKind.WRONG_VALUE, message))
    script = run_here(source)
    for held, given_ in zip(
        script["GLOBAL"].values(), tensor_arguments(asked.case.args, asked.case.kwargs), strict=True
    ):
        assert repr(held) == repr(given_)
        assert held.stride() == given_.stride() or not held.numel() or held.is_contiguous() == given_.is_contiguous()
    assert unlike(source) == ""


def test_what_is_no_python_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_call_text", lambda *_: "argument 0")
    with pytest.raises(NoScriptError, match="SyntaxError: invalid syntax"):
        render("torch.add", SQUARE, SQUARE)
    asked = trial_of("torch.ops.aten.neg.default", SQUARE)
    raised = Raised(Phase.FORWARD, "RuntimeError", "no")
    reports = tuple(ProcessReport((rank,), Phase.FORWARD, raised) for rank in range(2))
    observation = Observation(asked, Fate.COMPLETED, reports)
    failure = Failure(asked, observation, judge(observation, module.make_reference(asked.case)))
    assert failure.verdict.raised == "RuntimeError"
    finding = finding_record(Group("key", failure), failure, "", True, None, "", "")
    assert finding.script == ""
    assert finding.script_status.startswith("none could be written: SyntaxError")


@pytest.mark.parametrize(
    ("name", "needed"), [("from_", False), ("scaled", True), ("check", True), ("Holder.doubled", True)]
)
def test_source_is_taken_only_where_it_says_everything(name: str, needed: bool) -> None:
    assert needs_its_module(f"{__name__}.{name}") == needed


# -------------------------------------------------------------------------------------------------- exit status
@pytest.mark.processes
@pytest.mark.parametrize(
    "ends_it",
    [
        "raise RuntimeError('no')",
        "import there_is_no_such_module",
        "raise KeyboardInterrupt",
        # tests that run in the background ignore SIGINT
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        "os.close(1); raise AssertionError",
    ],
)
def test_nothing_that_is_not_caught_ends_with_status_1_or_0(ends_it: str, tmp_path: Path) -> None:
    header = render("torch.neg", SQUARE).partition("import contextlib")[0]
    (tmp_path / "script.py").write_text(f"{header}\n{ends_it}\n")
    done = subprocess.run([sys.executable, "-S", tmp_path / "script.py"], capture_output=True, check=False)
    assert done.returncode == 2, done
    (tmp_path / "script.py").write_text(f"import os\n{ends_it.replace('os.close(1); ', '')}\n")  # as Python has it
    done = subprocess.run([sys.executable, "-S", tmp_path / "script.py"], capture_output=True, check=False)
    assert done.returncode != 2


READY = ((0, "ready", None), (1, "ready", None))
RAISES = ("raised", ("the call", "ValueError", "no"))
OTHER = ("raised", ("the call", "KeyError", "no"))


@pytest.mark.parametrize(
    ("kind", "said", "seen", "doubtful"),
    [
        ("WRONG_VALUE", [(0, "right", None), (1, "right", None)], False, False),
        ("WRONG_VALUE", [(0, "problem", "it differs"), (0, "right", None), (1, "right", None)], True, False),
        ("WRONG_VALUE", [(0, *RAISES), (1, *RAISES)], False, True),
        ("WRONG_VALUE", [(0, "problem", "it differs"), (0, *RAISES), (1, *RAISES)], True, True),
        ("WRONG_VALUE", [(0, "undecided", "an error of the script")], False, True),
        ("WRONG_VALUE", [(0, "right", None), "lost"], False, True),
        ("WRONG_VALUE", [(0, "right", None), "silent"], False, True),
        ("CRASH", [(0, *RAISES), "silent"], True, False),
        ("CRASH", [(0, *OTHER), (1, *OTHER)], False, True),
        ("CRASH", [(0, *OTHER), (1, *RAISES)], True, True),
        ("CRASH", ["lost", "silent"], False, True),
        ("DIED", ["lost"], True, False),
        ("DIED", ["silent"], True, False),
        ("DIED", [(0, *OTHER), (1, *OTHER)], False, True),
        ("HANG", ["silent"], True, False),
        ("HANG", [(0, "undecided", "it cannot be imported"), "silent"], False, True),
        ("HANG", [(0, "right", None), (1, "right", None)], False, False),
        ("RANKS_DISAGREE", [(0, "placements", ["R"]), (1, "placements", ["S(0)"])], True, False),
        ("RANKS_DISAGREE", [(0, "placements", ["R"]), (1, "placements", ["R"]), (0, "right", None)], False, False),
    ],
)
@pytest.mark.parametrize("began", [True, False])
def test_what_ranks_say_decides(kind: str, said: list[Any], seen: bool, doubtful: bool, began: bool) -> None:
    """Before the sharded call has begun on all ranks, neither silence nor a rank's end is a defect."""
    source = render_script(
        trial_of("torch.neg", SQUARE), Verdict(VerdictKind(kind), "x", Phase.FORWARD, raised="ValueError")
    )
    script = run_here(source)
    heard = runtime.Heard(2, script["VERDICT"] == "CRASH", script["RAISED"], script["SILENT"])
    for one in READY if began else ():
        heard.take(*one)
    for one in said:
        if one == "silent":
            heard.silent()
        elif one == "lost":
            heard.lose(1, -9)
        else:
            heard.take(*one)
    assert heard.decide() == (1 if heard.seen else 2 if heard.doubts else 0)
    rests_on_silence = {"lost", "silent"} & {one for one in said if isinstance(one, str)} and kind in ("DIED", "HANG")
    if began or not rests_on_silence:
        assert (heard.seen, bool(heard.doubts)) == (seen, doubtful)
    else:
        assert (heard.seen, bool(heard.doubts)) == (False, True)


@pytest.mark.parametrize("refusal", runtime.REFUSALS)
def test_a_plain_refusal_is_not_the_crash_of_a_finding_unless_that_reads_as_one(refusal: str) -> None:
    """Another version of torch may refuse what crashes here: ``no-rule-left`` does from 2.14 on."""
    said = ("raised", ("the call", "RuntimeError", f"aten.neg.default: {refusal}."))
    for crash, seen in ("min() arg is an empty sequence", False), (f"all ranks raised: {refusal}", True):
        verdict = Verdict(VerdictKind.CRASH, crash, Phase.FORWARD, raised="RuntimeError")
        source = render_script(trial_of("torch.neg", SQUARE), verdict)
        script = run_here(source)
        assert (", plain=True)" in source) == seen
        heard = script["Heard"](1, script["VERDICT"] == "CRASH", script["RAISED"], script["SILENT"], plain=seen)
        heard.take(0, *said)
        assert heard.decide() == (1 if seen else 2)


def test_a_local_call_that_does_something_else_decides_nothing() -> None:
    source = render("torch.ops.aten.neg.default", SQUARE)
    missing = unlike(source.replace("torch.ops.aten.neg.default(", "torch.ops.nowhere.neg.default("))
    assert "raised AttributeError" in missing
    assert "expected no exception" in missing
    raising = render("torch.ops.aten.mm.default", SQUARE, SQUARE[:1], kind=VerdictKind.SILENT_ERROR)
    assert unlike(raising) == ""
    assert "did not raise" in unlike(raising.replace(".mm.default(self, mat2)", ".mm.default(self, self)"))
