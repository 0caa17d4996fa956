"""Which rules of sharded embeddings hold: a table of verdicts, one line for each rule and pooling mode.

    python benchmarks/embedding_rules.py [--meshes 2,3,4] [--cases 40] [--write FILE]

Each rule is tried by our own strategies (strategies.install) on gloo ranks: calls that the generators of the families
draw, placed as the rule says, forward and backward, each rank's part compared with the local op. The placements in the
table are those that DTensor gave to result and gradients. Wrong forms of the same rules follow, with what finds them
out. Exit status 1 if a rule does not hold or a wrong form is not found out.
docs/reference/embedding-rules.md is what it wrote.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import torch
from hypothesis import Phase as HypothesisPhase
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "mutants"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import bag_programs
import renorm_programs
from bag_mutants import MUTANTS, OPS
from embedding_strategy_calls import MUTANTS as LOOKUP_MUTANTS
from embedding_strategy_calls import run

from strategies.embedding import FAMILY as EMBEDDINGS
from strategies.embedding.inputs import EMBEDDING, NORM_TYPES
from strategies.embedding_bag import FAMILY as BAGS
from strategies.embedding_bag.inputs import FORWARD_ONLY, TRAINED
from strategies.tensors import filled
from strategies.torchrec.family import FAMILY as TABLES
from strategies.torchrec.layouts import LAYOUTS
from verifier.calls.arguments import make_combination
from verifier.calls.result import VerificationError
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.verdict import Phase, VerdictKind
from verifier.meshes.pool import Pool, PoolSet
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.planning.families import DrawContext, Family
from verifier.planning.trials import cotangent_placements
from verifier.torch_internals.registries import replaced_sharded_op


# ---------------------------------------------------------------------------------------------------------------- rules
@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Parameters
    ----------
    name
        What the field calls it.
    placements
        Of the arguments, by name; what is not named is replicated. An argument that a call does not have is left out.
    needs, without
        Classes of input, as the families name them, that a call must have, and must not have.
    arguments
        What arguments of a call, by name, have to be; None for those that it has to leave out.
    cotangent
        Placement of the cotangent of the first backward pass; ``columns`` cuts the last dim of it.
    refused
        Whether our strategy is to refuse it, since no rule holds.
    """

    name: str
    placements: dict[str, str]
    needs: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    arguments: dict[str, object] = field(default_factory=dict)
    cotangent: str = "R"
    refused: bool = False

    def fits(self, case: OpCase) -> bool:
        same = all(case.kwargs.get(name) == value for name, value in self.arguments.items())
        return same and self.needs <= case.tags and not (self.without | {"out-of-range ids"}) & case.tags


def bag_rules() -> Iterator[Rule]:
    """Yield the rules of ``aten._embedding_bag`` and of its gradients on a 1-D mesh, for each mode that they have."""
    flat, inference = frozenset({"ids of two dims"}), frozenset({"no grad"})

    def rule(name: str, placements: dict[str, str], *modes: str, **more: object) -> Iterator[Rule]:
        needs = frozenset(more.pop("needs", ()))  # type: ignore[call-overload]
        for mode in modes:
            yield Rule(f"{name}, {mode}", placements, needs | {mode}, **more)  # type: ignore[arg-type]

    every = ("sum", "mean", "max")
    yield from rule("replicated", {}, *every)
    yield from rule("column-wise", {"weight": "S(1)"}, *every, cotangent="S(1)")
    yield from rule("row-wise", {"weight": "S(0)"}, "sum", "mean")
    yield from rule("row-wise, inference", {"weight": "S(0)"}, "max", needs=inference)
    yield from rule("row-wise, training", {"weight": "S(0)"}, "max", without=inference)
    yield from rule("bag-wise by offsets", {"offsets": "S(0)"}, *every, without=flat, cotangent="S(0)")
    cut = {"input": "S(0)", "per_sample_weights": "S(0)"}
    yield from rule("bag-wise with the ids", cut, *every, needs=flat, cotangent="S(0)")
    yield from rule("position-wise", cut, "sum", "mean", without=flat)
    yield from rule("position-wise, inference", cut, "max", needs=inference, without=flat)
    yield from rule("position-wise, training", cut, "max", without=flat | inference)
    yield from rule("partial weight", {"weight": "P(sum)"}, "sum", "mean")
    yield from rule("partial max weight, inference", {"weight": "P(max)"}, "max", needs=inference)
    samples = {"per_sample_weights"}
    yield from rule("partial per-sample weights", {"per_sample_weights": "P(sum)"}, "sum", needs=samples)
    yield from rule("partial gradient", {}, *every, without=inference, cotangent="P(sum)")
    scaled = {"scale_grad_by_freq"}
    for name, placements in (("row-wise", {"weight": "S(0)"}), ("column-wise", {"weight": "S(1)"}), ("by ids", cut)):
        yield from rule(f"{name}, scale_grad_by_freq", placements, "sum", "mean", needs=scaled)
    bags = {"offsets": "S(0)"}
    yield from rule("bag-wise by offsets, scale_grad_by_freq", bags, "sum", "mean", needs=scaled, without=flat)


def lookup_rules() -> Iterator[Rule]:
    """Yield the rules of ``aten.embedding`` and of its gradient, with and without ``max_norm``."""
    rows, columns, ids, part = {"weight": "S(0)"}, {"weight": "S(1)"}, {"input": "S(0)"}, {"weight": "P(sum)"}
    plain = frozenset({"max_norm", "sparse", "0-d indices"})
    yield Rule("row-wise", rows, without=plain)
    yield Rule("column-wise", columns, without=plain, cotangent="columns")
    yield Rule("by ids", ids, without=plain, cotangent="S(0)")
    yield Rule("partial weight", part, without=plain)
    yield Rule("partial gradient", {}, without=plain | {"no grad"}, cotangent="P(sum)")
    yield Rule("by ids, scale_grad_by_freq", ids, frozenset({"scale_grad_by_freq"}), plain)
    renormed, scalars = frozenset({"max_norm"}), frozenset({"0-d indices"})
    for name, placements in (("row-wise", rows), ("column-wise", columns), ("by ids", ids)):
        for order in NORM_TYPES:
            given = {"norm_type": None if order == NORM_TYPES[0] else order}
            yield Rule(f"max_norm, norm {order:g}, {name}", placements, renormed, scalars, given)
    yield Rule("max_norm, partial weight", part, renormed, refused=True)


def refused_bags() -> Iterator[Rule]:
    """Yield what DTensor's own rules refuse of bags, which is all."""
    flat = frozenset({"ids of two dims"})
    cuts = ({}, {"weight": "S(0)"}, {"weight": "S(1)"}, {"weight": "P(sum)"}, {"input": "S(0)"})
    for placements in (*cuts, {"offsets": "S(0)"}):
        cut = ", ".join(f"{name} {text}" for name, text in placements.items()) or "all replicated"
        yield Rule(f"ids of one dim, {cut}", placements, without=flat, refused=True)
    yield Rule("ids of two dims, all replicated", {}, flat, refused=True)


def refused_lookups() -> Iterator[Rule]:
    """Yield what DTensor's own rules refuse of ``max_norm``, which is all."""
    for placements in ({}, {"weight": "S(0)"}, {"weight": "S(1)"}, {"input": "S(0)"}, {"weight": "P(sum)"}):
        cut = ", ".join(f"{name} {text}" for name, text in placements.items()) or "all replicated"
        yield Rule(f"max_norm, {cut}", placements, frozenset({"max_norm"}), frozenset({"0-d indices"}), refused=True)


@dataclass(frozen=True)
class Group:
    """A table of rules of one family; ``arguments`` are those whose placements it names."""

    title: str
    family: Family
    arguments: str
    rules: Callable[[], Iterator[Rule]]
    imports: tuple[str, ...] = ("strategies.install",)


_OF_BAGS = "weight, input, offsets, per_sample_weights"
GROUPS = (
    Group("aten._embedding_bag and its gradients", BAGS, _OF_BAGS, bag_rules),
    Group("aten.embedding, its gradient and embedding_renorm_", EMBEDDINGS, "weight, input", lookup_rules),
    Group("aten._embedding_bag by DTensor's own rules", BAGS, _OF_BAGS, refused_bags, ()),
    Group("aten.embedding_renorm_ by DTensor's own rules", EMBEDDINGS, "weight, input", refused_lookups, ()),
)


# ------------------------------------------------------------------------------------------------------------- verdicts
@dataclass
class Line:
    """What came of one rule."""

    rule: Rule
    verdicts: Counter[VerdictKind] = field(default_factory=Counter)
    placements: dict[str, set[str]] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)

    def take(self, observation: Observation, verdict: VerdictKind) -> None:
        self.verdicts[verdict] += 1
        report = observation.reports[0]
        if report is None or verdict is not VerdictKind.PASS:
            return
        for subject, text in report.placements:
            self.placements.setdefault(subject, set()).add(text)
        forward: Counter[str] = Counter()
        for phase, name, count in report.collectives:
            if phase == Phase.FORWARD:  # as text, which is what comes from the ranks
                forward[name] += count
        for name, count in forward.items():
            self.collectives[name] = max(count, self.collectives.get(name, 0))

    @property
    def holds(self) -> bool:
        """Whether no trial says otherwise, and one proves it; a refused rule must never give a result."""
        if any(kind.bad or kind is VerdictKind.TOOL_ERROR for kind in self.verdicts):
            return False
        return bool(self.verdicts[VerdictKind.UNSUPPORTED if self.rule.refused else VerdictKind.PASS])

    @property
    def verdict(self) -> str:
        counts = {kind: self.verdicts[kind] for kind in VerdictKind if self.verdicts[kind]}
        proofs, refused = counts.pop(VerdictKind.PASS, 0), counts.pop(VerdictKind.UNSUPPORTED, 0)
        if self.rule.refused:
            return f"{'refused' if self.holds and not proofs else 'FAILS'}: {refused} refusals, {proofs} results"
        texts = [f"{proofs} proofs", *([f"{refused} refusals"] if refused else [])]
        texts += [f"{count} {kind}" for kind, count in counts.items()]
        return ("holds: " if self.holds else "FAILS: ") + ", ".join(texts)

    def cells(self, names: Sequence[str]) -> list[str]:
        def seen(subject: str) -> str:
            return " or ".join(sorted(self.placements.get(subject, ()))) or "-"

        inputs = ", ".join(self.rule.placements.get(name, "R") for name in names)
        communication = ", ".join(f"{count} {name}" for name, count in sorted(self.collectives.items())) or "none"
        gradients = [seen(f"{name}.grad 0") for name in ("weight", "per_sample_weights") if name in names]
        return [self.rule.name, inputs, seen("output"), *gradients, communication, self.verdict]


def drawn(family: Family, ops: tuple[str, ...], mesh: MeshSpec, number: int) -> list[OpCase]:
    """Return so many calls as the family draws them for ``mesh``."""
    found: list[OpCase] = []

    @hypothesis.seed(0)
    @settings(max_examples=number, database=None, deadline=None, phases=(HypothesisPhase.generate,))
    @hypothesis.given(family.cases(DrawContext(mesh, (torch.float64,), ops)))
    def draw(case: OpCase) -> None:
        found.append(case)

    draw()
    return found


def trials(rule: Rule, cases: Sequence[OpCase], mesh: MeshSpec, most: int) -> Iterator[Trial]:
    """Yield trials of as many as ``most`` calls that fit ``rule``, chosen at random among ``cases``."""
    fitting = [case for case in cases if rule.fits(case)]
    for seed, case in enumerate(random.Random(rule.name).sample(fitting, min(most, len(fitting)))):
        given = {
            name: text for name, text in rule.placements.items() if isinstance(case.kwargs.get(name), torch.Tensor)
        }
        reference = make_reference(case)
        passes = cotangent_placements(reference, mesh, seed)
        if passes:
            (output,) = reference.differentiable
            text = f"S({reference.outputs[output].ndim - 1})" if rule.cotangent == "columns" else rule.cotangent
            passes = ((parse_placements(text),),) + (passes[1:] if rule.cotangent == "R" else ())
        yield Trial(case, mesh, make_combination(given, case, mesh), passes, seed, trace=True)


def try_rules(
    family: Family,
    rules: Sequence[Rule],
    meshes: Sequence[MeshSpec],
    most: int,
    imports: Sequence[str] = ("strategies.install",),
) -> list[Line]:
    """Return what came of each rule, on as many as ``most`` calls a mesh."""
    lines = [Line(rule) for rule in rules]
    ops = (EMBEDDING,) if family is EMBEDDINGS else (TRAINED, FORWARD_ONLY)
    for mesh in meshes:
        cases = [case for case in drawn(family, ops, mesh, 60 * most) if not case.args]  # no programs
        pools = PoolSet(lambda key: Pool(key, imports))
        try:
            for line in lines:
                pool = pools.of(mesh)
                for observation in pool.run(list(trials(line.rule, cases, mesh, most))):
                    line.take(observation, judge(observation, make_reference(observation.trial.case)).kind)
        finally:
            pools.close()
    return lines


def try_layouts(meshes: Sequence[MeshSpec], most: int) -> list[tuple[Line, str]]:
    """Return what came of training tables in each of TorchRec's layouts, and the classes of input among them.

    A trial puts the table into the layout, has every rank check the chunks, pools bags, takes one step of an optimiser
    and reads a checkpoint of the table into a drawn layout; all of it is compared with the table as a whole.
    """
    made = []
    pools = PoolSet(lambda key: Pool(key, ()))
    try:
        for name, op in zip(LAYOUTS, TABLES.ops, strict=True):
            line, tags = Line(Rule(name, {})), set[str]()
            for mesh in meshes:
                cases = drawn(TABLES, (op,), mesh, most)
                plans = [
                    Trial(case, mesh, make_combination({}, case, mesh), (), seed) for seed, case in enumerate(cases)
                ]
                for observation in pools.of(mesh).run(plans):
                    line.take(observation, judge(observation, make_reference(observation.trial.case)).kind)
                tags.update(*(case.tags for case in cases))
            made.append((line, ", ".join(sorted(tags))))
    finally:
        pools.close()
    return made


# ---------------------------------------------------------------------------------------------------------- wrong forms
IDS, OFFSETS = torch.tensor([0, 4, 3, 1, 1, 2, 4]), torch.tensor([0, 0, 3, 4])
TIED = torch.tensor([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)


def wrong_forms() -> Iterator[tuple[str, str]]:
    """Yield each wrong form and what found it out; an empty text if nothing did."""
    with ExitStack() as stack:
        for sharded in OPS.values():
            stack.enter_context(replaced_sharded_op(sharded))
        for mutant in MUTANTS:
            accused = mutant.accused in mutant.accusations()
            yield mutant.fault, f"level 1: {mutant.name}, {mutant.accused}" if accused else ""
    pools = PoolSet(lambda key: Pool(key, ["strategies.install"]))
    try:
        verify = Verifier(pools, MeshSpec.parse("simulated:2x2"))
        for program in (bag_programs.maximum_of_each_rank, bag_programs.maximum_without_tie_break):
            where = {"placements": ["(R, S(0))", "(R, R)", "(R, R)"], "exact": True, "record": False}
            calls = (f"bag_programs.{program.__name__}", TIED.clone().requires_grad_(), IDS, OFFSETS)
            yield fault_of(program), found_out(lambda calls=calls, where=where: verify(*calls, **where))
        table = filled((5, 3), torch.float64, 0)
        for program, order, where in (
            (renorm_programs.norm_of_own_columns, 2.0, ["(R, S(1))", "(R, R)"]),
            (renorm_programs.largest_entries_added, torch.inf, ["(S(1), R)", "(R, R)"]),
            (renorm_programs.rows_of_own_ids, 2.0, ["(R, R)", "(S(0), R)"]),
        ):
            scaled = (f"renorm_programs.{program.__name__}", table, torch.tensor([[0, 4, 3], [4, 1, 0]]), order)
            yield (
                fault_of(program),
                found_out(lambda scaled=scaled, where=where: verify(*scaled, placements=where, record=False)),
            )
        for function, (call, _) in LOOKUP_MUTANTS.items():
            yield fault_of(function), found_out(lambda function=function, call=call: run(verify, function, call))
    finally:
        pools.close()


def fault_of(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").splitlines()[0].rstrip(".")


def found_out(call: Callable[[], object]) -> str:
    try:
        call()
    except VerificationError as error:
        return f"level 2: {error.kind}"
    return ""


# ---------------------------------------------------------------------------------------------------------------- pages
LAYOUT_TEXT = (
    "Each rank gets its chunks as a `LocalShardsWrapper` in a DTensor. A proof is a table whose chunks cover every row",
    "and column. Its pooled bags, gradient, rows after one step, and checkpoint read into a drawn layout equal those",
    "of the unsharded table.",
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", default="2,3,4", metavar="N,N", help="1-D meshes [default: 2,3,4]")
    parser.add_argument("--cases", type=int, default=40, help="calls of each rule and mesh [default: 40]")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there instead of printing it")
    arguments = parser.parse_args()
    meshes = [MeshSpec.parse(text) for text in arguments.meshes.split(",")]
    if any(mesh.ndim > 1 for mesh in meshes):
        parser.error("--meshes are of one dim, as 2,3,4")
    if arguments.write and not arguments.write.parent.is_dir():
        parser.error(f"--write: there is no folder {arguments.write.parent}")
    torch.set_num_threads(1)
    page = [
        "# Which rules of sharded embeddings hold",
        "",
        f"Written by `python benchmarks/embedding_rules.py --meshes {arguments.meshes} --cases {arguments.cases}` with"
        f" torch {torch.__version__}.",
        "The strategies are ours (`strategies.install`), on gloo ranks. The families draw the calls. Each call runs",
        "forward and up to three times backward. Results and gradients have the placements that DTensor gave them;",
        "the cotangent of a gradient is placed as the result of the rule. Several placements in a cell differ by call.",
        "Communication is the most that one forward call needed, training included. A proof is a trial in which",
        "everything agrees and that could have failed. Ids of two dims that are sharded unevenly are replicated before",
        "they are flattened.",
        "",
    ]
    failed = False
    for group in GROUPS:
        lines = try_rules(group.family, list(group.rules()), meshes, arguments.cases, group.imports)
        names = group.arguments.split(", ")
        gradients = ["weight.grad", "per_sample_weights.grad"][: 1 + (len(names) > 2)]
        header = ["rule", group.arguments, "result", *gradients, "communication", "verdict"]
        page += [f"## {group.title}", "", *table(header, (line.cells(names) for line in lines)), ""]
        failed |= not all(line.holds for line in lines)
    layouts = try_layouts(meshes, arguments.cases)
    failed |= not all(line.holds for line, _ in layouts)
    rows = [(line.rule.name, LAYOUTS[line.rule.name].summary, tags or "-", line.verdict) for line, tags in layouts]
    page += ["## TorchRec's layouts", "", *LAYOUT_TEXT, ""]
    page += [*table(["layout", "who holds what", "among the cases", "verdict"], rows), ""]
    forms = list(wrong_forms())
    failed |= not all(found for _, found in forms)
    rows = [(name, found or "NOT FOUND OUT") for name, found in forms]
    page += ["## Wrong forms", "", *table(["wrong form", "found out by"], rows), ""]
    if arguments.write:
        arguments.write.write_text("\n".join(page))
    else:
        print("\n".join(page))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
