"""Verdicts of real processes on the rules that torch's own validator calls incorrect.

    python benchmarks/peer_accusations.py [--draws 8] [--op linalg.vector_norm] [--markdown]

``peer_accusations.json`` holds what ``python -m torch.distributed.tensor._ops.strategy_validation`` accuses on
torch 2.13.0 and the calls on which it does so. Here two gloo processes run each of these calls through DTensor, with
exactly the accused input placements and with parts that differ from rank to rank. A rule counts as tried only where
DTensor executed it: nothing was communicated, the local kernel was given this rank's own local tensors, and the output
has the accused placements. It is right if then, in every draw, each rank's local output is what the output placements
promise and ``full_tensor()`` is the result of the same call on the whole tensors. Nothing but torch is needed.

Exit status: 0 if the verdicts are those that the stored causes explain, 1 if one differs, 2 if a rule was not executed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

ACCUSATIONS = Path(__file__).with_suffix(".json")
RANKS = 2

# Kernels that are exact on small integers, the triangular solve because its diagonal is drawn from powers of two: their
# results are compared bit for bit.
EXACT = {
    "baddbmm",
    "bmm",
    "expand",
    "expand_copy",
    "index_fill",
    "index_select",
    "linalg.solve_triangular",
    "reshape",
    "to",
    "view",
    "view_copy",
}

DOMAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geometric": lambda values: (values >= 1) & (values == values.round()),
    "log_normal": lambda values: (values > 0) & values.isfinite(),
}

CAUSES = {
    "unread-placement": "It has no parser for the output placement, never runs the rule, and counts it as incorrect.",
    "product-split": "It gives each rank a whole copy of a `P(product)` input, whose product is the square.",
    "size-arguments": "It calls the kernel on the shard with the sizes of the whole tensor; DTensor rewrites them.",
    "random": "It compares two draws of random numbers.",
    "tolerance": "Rounding: it allows 1e-5 in float32, whatever the size of the parts; in float64 it has no complaint.",
    "magnitude": "None, the rule is wrong: a norm is taken of magnitudes, and a rank whose value is not the maximum "
    "(minimum) may have the largest (smallest) one.",
    "broadcast": "None, the rule is wrong: A has that batch dim too and stays whole, so each rank pairs its part of B "
    "with all of A.",
}
HOLDS = {"magnitude", "broadcast"}


@dataclass(frozen=True)
class Accusation:
    """A rule that the validator calls incorrect, with its reasons and the calls on which it does so."""

    op: str
    aten: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cause: str
    reasons: tuple[str, ...]
    samples: int
    calls: tuple[dict[str, Any], ...]

    @property
    def rule(self) -> str:
        """The rule as the validator prints it."""
        outputs = ", ".join(self.outputs)
        return f"{', '.join(self.inputs)} -> {outputs if len(self.outputs) == 1 else f'({outputs})'}"


@dataclass(frozen=True)
class Trial:
    """What the ranks saw of one call with one draw of values."""

    executed: bool
    failure: str
    local_call: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What all trials of one accused rule come to."""

    accusation: Accusation
    trials: tuple[Trial, ...]

    @property
    def word(self) -> str:
        """``right``, ``wrong``, or ``not executed`` where DTensor did something else than the rule."""
        if any(trial.executed and trial.failure for trial in self.trials):
            return "wrong"
        return "right" if all(trial.executed for trial in self.trials) else "not executed"

    @property
    def counted(self) -> str:
        """How many of the trials agree with the verdict."""
        failed = sum(bool(trial.failure) for trial in self.trials)
        if self.word == "wrong":
            return f"{failed} of {len(self.trials)} fail"
        return f"{len(self.trials) - failed} of {len(self.trials)} agree"

    @property
    def evidence(self) -> str:
        """A failure if there is one, otherwise what the kernels were called with."""
        failures = [trial.failure for trial in self.trials if trial.failure]
        if failures:
            return failures[0]
        notes = Counter(trial.note for trial in self.trials if trial.note)
        call = self.trials[0].local_call
        seen = [f"rank 0 runs `{call}`" if call else "the kernel is not called on the given local tensors"]
        return "; ".join([*seen, *(f"{note} in {count} of {len(self.trials)}" for note, count in notes.items())])


def load_accusations(path: Path = ACCUSATIONS) -> list[Accusation]:
    """Return the accused rules in the order of the file."""
    stored = json.loads(path.read_text())
    assert stored["format_version"] == 1, path
    return [
        Accusation(
            op=entry["op"],
            aten=entry["aten"],
            inputs=tuple(entry["inputs"]),
            outputs=tuple(entry["outputs"]),
            cause=entry["cause"],
            reasons=tuple(entry["reasons"]),
            samples=entry["samples"],
            calls=tuple(entry["calls"]),
        )
        for entry in stored["accusations"]
    ]


# Placements, as the validator prints them.


def input_placement(text: str) -> Placement:
    """Return the placement that ``text`` names; ``R``, ``S(d)`` and ``P(op)`` occur in accused inputs."""
    if text == "R":
        return Replicate()
    kind, _, argument = text.removesuffix(")").partition("(")
    assert kind in ("S", "P"), text
    return Shard(int(argument)) if kind == "S" else Partial(argument)


def whole(text: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor that local tensors ``parts`` stand for under the placement that ``text`` names."""
    kind, _, argument = text.removesuffix(")").partition("(")
    if kind == "R":
        return parts[0]
    if kind == "S":
        return torch.cat(list(parts), int(argument))
    if kind == "_S":  # each of the `factor` pieces of the tensor dim was sharded by itself
        dim, factor = map(int, argument.split(","))
        pieces = [part.chunk(factor, dim) for part in parts]
        return torch.cat([pieces[rank][piece] for piece in range(factor) for rank in range(len(parts))], dim)
    stacked = torch.stack(list(parts))
    if kind == "_NormP":
        order = float(argument)
        return (stacked.double().abs() ** order).sum(0) ** (1 / order)
    assert kind == "P", text
    match argument:
        case "sum":
            return stacked.sum(0)
        case "avg":
            return stacked.mean(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0)
    raise ValueError(f"no rule to combine {text!r}; known are R, S, _S, _NormP and P")


def local_share(text: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return what ``rank`` must hold of ``tensor``, or None where a placement leaves that open."""
    kind, _, argument = text.removesuffix(")").partition("(")
    if kind == "R":
        return tensor
    if kind not in ("S", "_S"):
        return None
    dim, factor = map(int, argument.split(",")) if kind == "_S" else (int(argument), 1)
    shares = []
    for piece in tensor.chunk(factor, dim):
        chunks = piece.chunk(RANKS, dim)
        shares.append(chunks[rank] if rank < len(chunks) else piece.narrow(dim, 0, 0))
    return torch.cat(shares, dim)


# Values.


def draw(
    described: dict[str, Any], placement: str, op: str, position: int, seed: torch.Generator
) -> list[torch.Tensor]:
    """Return the local tensors of an argument, one per rank: integers of both signs, none of them zero.

    Parts of a ``Partial`` are drawn rank by rank, so that each rank decides some of the elements and none decides all.
    """
    shape, dtype = described["shape"], getattr(torch, described["dtype"])
    if "values" in described:  # indices
        return [torch.tensor(described["values"], dtype=dtype).reshape(shape) for _ in range(RANKS)]

    def integers(largest: int) -> torch.Tensor:
        size = torch.randint(1, largest + 1, shape, generator=seed)
        return (size * (torch.randint(0, 2, shape, generator=seed) * 2 - 1)).to(dtype)

    if placement.startswith("P("):
        return [integers(9) for _ in range(RANKS)]
    tensor = integers(9)
    if op == "linalg.solve_triangular" and position == 0:
        diagonal = tensor.diagonal(dim1=-2, dim2=-1)
        diagonal.copy_(diagonal.sign() * 2 ** (diagonal.abs() % 2))  # powers of two keep the solution exact
    shares = [local_share(placement, tensor, rank) for rank in range(RANKS)]
    return [share.clone(memory_format=torch.contiguous_format) for share in shares if share is not None]


def is_tensor(argument: Any) -> bool:
    """Tell a stored tensor from every other stored argument."""
    return isinstance(argument, dict) and "shape" in argument


def stored_tensors(argument: Any) -> Iterator[dict[str, Any]]:
    """Yield the tensors of a stored argument from left to right."""
    if is_tensor(argument):
        yield argument
    elif isinstance(argument, list):
        for item in argument:
            yield from stored_tensors(item)


def filled(argument: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return a stored argument as torch takes it, with the next of ``tensors`` for each stored one."""
    if is_tensor(argument):
        return next(tensors)
    if isinstance(argument, list):
        return [filled(item, tensors) for item in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, text),) = argument.items()
    match kind:
        case "float":
            return float(text)
        case "device":
            return torch.device(text)
    return getattr(torch, text)  # a dtype or a memory format


def allowed_error(accusation: Accusation, call: dict[str, Any], seen: Sequence[torch.Tensor]) -> float:
    """Return how far a result may be from the reference: 0 where it is exact, else 64 units of the largest value."""
    if accusation.op in EXACT and not any(isinstance(value, float) for value in call["kwargs"].values()):
        return 0.0
    largest = max(1.0, *(float(tensor.abs().max()) for tensor in seen if tensor.numel()))
    return 64 * torch.finfo(torch.float32).eps * largest


def difference(got: torch.Tensor, expected: torch.Tensor, allowed: float, what: str) -> str:
    """Return what tells ``got`` from ``expected``, or nothing where they agree."""
    if got.shape != expected.shape:
        return f"{what} has shape {list(got.shape)}, expected {list(expected.shape)}"
    agree = (got.double() - expected.double()).abs() <= allowed
    if bool(agree.all()):
        return ""
    first = int((~agree).flatten().nonzero()[0])
    values = f"got {got.flatten()[first].item():g}, expected {expected.flatten()[first].item():g}"
    return f"{what}: {values} ({int((~agree).sum())} of {agree.numel()} elements differ)"


# One call.


class LocalCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernels that DTensor calls, with their positional arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def spelled(func: Any, args: Sequence[Any]) -> str:
    """Return a call in one line, with the shapes of its tensors."""
    shown = [f"T{list(item.shape)}" if isinstance(item, torch.Tensor) else repr(item) for item in args]
    return f"{func.__name__.partition('.')[0]}({', '.join(shown)})"


def gathered(item: Any) -> list[Any]:
    """Return the item of each rank."""
    items: list[Any] = [None] * RANKS
    dist.all_gather_object(items, item)
    return items


def as_list(result: Any) -> list[Any]:
    """Return the tensors that an op returned."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def was_executed(func: Any, calls: LocalCalls, shards: Sequence[torch.Tensor]) -> str:
    """Return the local call of ``func`` if it was given these very ``shards``, or nothing."""
    for seen, args in calls.seen:
        tensors = [item for item in args if type(item) is torch.Tensor]  # no FakeTensor, which has no data
        if seen is func and [t.data_ptr() for t in tensors] == [shard.data_ptr() for shard in shards]:
            return spelled(func, args)
    return ""


def judge_values(
    accusation: Accusation,
    call: dict[str, Any],
    expected: Sequence[torch.Tensor],
    outputs: Sequence[DTensor],
) -> str:
    """Return how ``outputs`` break the promise of the accused output placements, or nothing."""
    failures = []
    for text, reference, output in zip(accusation.outputs, expected, outputs, strict=True):
        local = output.to_local()
        parts = gathered(local)
        allowed = allowed_error(accusation, call, [reference, *parts])
        share = local_share(text, reference, dist.get_rank())
        if share is not None:
            failures.append(difference(local, share, allowed, f"rank {dist.get_rank()}'s local tensor"))
        else:
            failures.append(difference(whole(text, parts), reference, allowed, "the local tensors together"))
        if len({part.shape for part in parts}) > 1 and any(gathered(failures[-1])):
            continue  # shapes that differ where they should not could hang the collective
        try:
            failures.append(difference(output.full_tensor(), reference, allowed, "full_tensor()"))
        except RuntimeError as error:
            failures.append(f"full_tensor() raises {error}")
    return "; ".join(failure for failure in failures if failure)


def judge_draws(op: str, drawn: torch.Tensor, kernel: Callable[[], torch.Tensor]) -> tuple[str, str]:
    """Return what is wrong with this rank's random numbers, and a note on how they relate to those of other ranks.

    No value is promised. What is: each rank draws its own shard, in place, from the distribution that was asked for.
    """
    parts = gathered(drawn)
    if not bool(DOMAINS[op](drawn).all()):
        return "numbers that the distribution cannot give", ""
    note = "equal seeds give equal shards" if torch.equal(parts[0], parts[1]) else ""
    return difference(drawn, kernel(), 0.0, "the kernel on a tensor of this size, with this seed"), note


def try_once(accusation: Accusation, call: dict[str, Any], number: int, mesh: DeviceMesh) -> Trial:
    """Run one call through DTensor on all ranks and return what came of it; the same on every rank."""
    rank, seed = dist.get_rank(), torch.Generator().manual_seed(number)
    stored = list(stored_tensors([*call["args"], *call["kwargs"].values()]))
    globals_, shards, inputs = [], [], []
    for position, (text, described) in enumerate(zip(accusation.inputs, stored, strict=True)):
        parts = draw(described, text, accusation.op, position, seed)
        globals_.append(whole(text, parts))
        shards.append(parts[rank])
        size, stride = globals_[-1].shape, globals_[-1].stride()
        placements = (input_placement(text),)
        inputs.append(DTensor.from_local(parts[rank], mesh, placements, run_check=False, shape=size, stride=stride))
    name, _, overload = accusation.aten.removeprefix("aten.").partition(".")
    func = getattr(getattr(torch.ops.aten, name), overload)

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        left = iter(tensors)
        args = [filled(argument, left) for argument in call["args"]]
        return func(*args, **{key: filled(argument, left) for key, argument in call["kwargs"].items()})

    torch.manual_seed(number)
    result, error, calls, communication = None, "", LocalCalls(), CommDebugMode()  # type: ignore[no-untyped-call]
    with communication, calls:
        try:
            result = run(inputs)
        except RuntimeError as exception:  # what a kernel raises
            error = f"rank {rank} raises {exception}"
    local_call = was_executed(func, calls, shards)
    outputs = as_list(result) if not error else []
    promised = tuple(str(output.placements[0]) for output in outputs)
    executed = bool(local_call) and communication.get_total_counts() == 0
    executed = executed and (bool(error) or promised == accusation.outputs)
    failure, note = error, ""
    if not any(gathered(error)) and all(gathered(executed)):
        if accusation.op in DOMAINS:

            def kernel() -> torch.Tensor:
                torch.manual_seed(number)
                return torch.as_tensor(run([torch.empty_like(shards[0])]))

            failure, note = judge_draws(accusation.op, shards[0], kernel)
        else:
            failure = judge_values(accusation, call, as_list(run(globals_)), outputs)
    failures = [each for each in gathered(failure) if each]
    return Trial(all(gathered(executed)), failures[0] if failures else "", local_call, note)


def run_rank(rank: int, folder: str, accusations: Sequence[Accusation], draws: int) -> None:
    """Be one rank: try everything, and on rank 0 leave the trials in ``folder``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    tried = [
        [try_once(accusation, call, number, mesh) for call in accusation.calls for number in range(draws)]
        for accusation in accusations
    ]
    if rank == 0:
        torch.save([[astuple(trial) for trial in trials] for trials in tried], f"{folder}/trials")
    dist.barrier()
    dist.destroy_process_group()


def try_all(accusations: Sequence[Accusation], draws: int) -> list[Verdict]:
    """Return the verdicts of real processes on ``accusations``, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder, accusations, draws), nprocs=RANKS)  # type: ignore[no-untyped-call]
        stored = torch.load(f"{folder}/trials")
    return [
        Verdict(accusation, tuple(Trial(*trial) for trial in trials))
        for accusation, trials in zip(accusations, stored, strict=True)
    ]


# Output.


def says(accusation: Accusation) -> str:
    """Return what the validator says of a rule."""
    samples = f"in {accusation.samples} sample{'s' if accusation.samples > 1 else ''}"
    if not accusation.reasons:
        return f"nothing: it cannot read {' '.join(accusation.outputs)} and did not run the rule, {samples}"
    more = len(accusation.reasons) - 1
    reason = accusation.reasons[0].replace("`", "'")
    return f"{reason}{f' (and {more} more like it)' if more else ''}, {samples}"


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """Return the table of docs/peer-accusations.md."""
    lines = [
        "| op | accused rule | what the validator says | real processes | its mistake | seen on the ranks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for verdict in verdicts:
        accusation = verdict.accusation
        overload = accusation.aten.removeprefix("aten.").removesuffix(".default")
        op = f"`{accusation.op}`" + (f" (`{overload}`)" if overload != accusation.op else "")
        cells = [
            op,
            f"`{accusation.rule}`",
            says(accusation),
            f"{verdict.word if verdict.word == 'right' else f'**{verdict.word}**'}, {verdict.counted}",
            "none" if accusation.cause in HOLDS else accusation.cause,
            verdict.evidence,
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def as_text(verdicts: Sequence[Verdict]) -> str:
    """Return one block of lines for each verdict."""
    blocks = []
    for verdict in verdicts:
        accusation = verdict.accusation
        head = f"{verdict.word.upper():5}  {accusation.op} [{accusation.aten}]  {accusation.rule}"
        body = [
            f"validator: {says(accusation)}",
            f"processes: {verdict.counted}; {verdict.evidence}",
            f"its mistake: {CAUSES[accusation.cause]}",
        ]
        blocks.append("\n".join([head, *(f"       {textwrap.shorten(line, 200)}" for line in body)]))
    return "\n".join(blocks)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the last line: how many rules are right and how many are wrong."""
    counted = Counter(verdict.word for verdict in verdicts)
    wrong = {(v.accusation.aten, v.accusation.rule) for v in verdicts if v.word == "wrong"}
    ops = len({verdict.accusation.op for verdict in verdicts})
    trials = sum(len(verdict.trials) for verdict in verdicts)
    words = ", ".join(f"{count} {word}" for word, count in sorted(counted.items()))
    return f"{len(verdicts)} accused rules on {ops} ops, {trials} trials: {words} ({len(wrong)} distinct wrong rules)"


def main() -> int:
    """Try the accused rules and print the verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=8, help="draws of values for each call (default 8)")
    parser.add_argument("--op", help="only the rules of this op, as the validator names it")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/peer-accusations.md")
    options = parser.parse_args()
    accusations = [each for each in load_accusations() if options.op in (None, each.op)]
    if not accusations or options.draws < 1:
        known = ", ".join(sorted({each.op for each in load_accusations()}))
        parser.error(f"nothing to try: --draws must be at least 1, --op one of {known}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a full_tensor() that raises leaves a collective unwaited
    print(f"torch {torch.__version__}, gloo, {RANKS} processes, {options.draws} draws a call", file=sys.stderr)
    verdicts = try_all(accusations, options.draws)
    print(as_markdown(verdicts) if options.markdown else as_text(verdicts))
    print(summary(verdicts), file=sys.stderr)
    if any(verdict.word == "not executed" for verdict in verdicts):
        return 2
    unexplained = [v for v in verdicts if (v.word == "wrong") != (v.accusation.cause in HOLDS)]
    for verdict in unexplained:
        print(f"{verdict.accusation.op} {verdict.accusation.rule} is {verdict.word}, unlike before", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
