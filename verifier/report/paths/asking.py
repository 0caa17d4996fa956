"""Answers ``graph --all-pairs`` and ``graph --source --target``, which need no run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from verifier.core.case import MOST_RANKS, MeshSpec
from verifier.core.wording import plural
from verifier.redistribution.judging import Judge, Judgement
from verifier.redistribution.layouts import Space, parse_layout
from verifier.redistribution.models import AlphaBeta, Link, links_for
from verifier.redistribution.properties import check_properties
from verifier.redistribution.torch_side import PlannerName, TorchSide
from verifier.report.paths.documents import as_dict, dot, graphml, mermaid, svg
from verifier.report.paths.text import all_pairs, one_pair, properties

__all__ = ["Question", "answer", "answer_on_properties", "judge_for"]

_MOST_LAYOUTS = 200
_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "bool")


@dataclass(frozen=True)
class Question:
    """What is asked on the command line.

    Parameters
    ----------
    mesh
        As ``2x4``, or ``2x4+flat`` for a mesh with all its flattened submeshes.
    shape
        Sizes of the tensor dims, as ``8,8``.
    source, target
        Layouts; None for all pairs.
    links
        Texts of links, see :func:`~verifier.redistribution.models.parse_link`; torch's own if there are none.
    """

    mesh: str
    shape: str
    dtype: str = "float32"
    source: str | None = None
    target: str | None = None
    planner: PlannerName = "default"
    worst: int = 5
    links: Sequence[str] = ()
    partial: str = "sum"
    strided: Sequence[str] = ()


def judge_for(question: Question) -> Judge:
    """Return the judge of the tensor and mesh of ``question``.

    Raises
    ------
    ValueError
        If the question is not one that can be answered.
    """
    mesh = MeshSpec.parse(question.mesh)
    if mesh.world_size > MOST_RANKS:
        raise ValueError(f"mesh {question.mesh!r} has {mesh.world_size} ranks; at most {MOST_RANKS} are judged")
    shape = _shape(question.shape)
    if question.dtype not in _DTYPES:
        raise ValueError(f"dtype {question.dtype!r} is none of {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, question.dtype)
    ends = [parse_layout(end, len(shape), mesh.ndim) for end in (question.source, question.target) if end is not None]
    texts = {placement for end in ends for placement in end.placements}
    partials = {placement[2:-1] for placement in texts if placement.startswith("P")} or {question.partial}
    if len(partials) > 1:
        raise ValueError(f"P({') and P('.join(sorted(partials))}) are asked for; one reduction is supported")
    given = [parse_layout(text, len(shape), 1).placements[0] for text in question.strided]
    if plain := [text for text in given if not text.startswith("_S")]:
        raise ValueError(f"--strided {plain[0]!r} is no strided shard, as '_S(0, 2)'")
    strided = sorted({placement for placement in (*texts, *given) if placement.startswith("_S")})
    space = Space(mesh.shape, shape, dtype.itemsize, partials.pop(), strided)
    if (count := len(space.layouts)) > _MOST_LAYOUTS:
        raise ValueError(
            f"a tensor of {len(shape)} dims has {count:,} layouts on mesh {mesh.shape_text}; at most {_MOST_LAYOUTS} "
            "are judged: take fewer tensor dims or mesh dims"
        )
    torch_side = TorchSide(space, dtype, mesh.flat)
    links = links_for(question.links, mesh.ndim) if question.links else tuple(
        Link(*torch_side.link(mesh_dim)) for mesh_dim in range(mesh.ndim)
    )  # fmt: skip
    return Judge(space, torch_side, AlphaBeta(links))


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise ValueError(f"shape {text[:80]!r} is no list of sizes such as 8,8")
    return tuple(map(int, text.split(",")))


def answer(question: Question, output: str) -> str:
    """Return the answer in the format ``output``: ``text``, ``json``, ``graphml``, ``dot``, ``mermaid`` or ``svg``.

    Raises
    ------
    ValueError
        If the question is not one that can be answered.
    """
    judge = judge_for(question)
    if output == "graphml":
        return graphml(judge, _about(question))
    judgements = _judged(judge, question)
    if output == "json":
        document = {**_about(question), "judgements": [as_dict(judge, one) for one in judgements]}
        return json.dumps(document, indent=2) + "\n"
    writers: dict[str, Callable[[Judge, Sequence[Judgement]], str]] = {"dot": dot, "mermaid": mermaid, "svg": svg}
    if output in writers:
        return writers[output](judge, judgements)
    return "\n".join([*_header(judge, question), "", *_lines(judge, judgements, question), ""])


def answer_on_properties(question: Question, output: str) -> tuple[str, bool]:
    """Return what holds of torch's planners as ``text`` or ``json``, and whether all properties hold.

    Raises
    ------
    ValueError
        If the question is not one that can be answered.
    """
    if output not in ("text", "json"):
        raise ValueError(f"--properties are printed as text or json, not as {output}")
    judge = judge_for(question)
    outcomes = list(check_properties(judge.space, judge.torch_side))
    holds = not any(one.violations for one in outcomes)
    if output == "text":
        return "\n".join([*_header(judge, question)[:2], "", *properties(outcomes), ""]), holds
    found = [
        {
            "name": one.name,
            "statement": one.statement,
            "checked": one.checked,
            "violations": [
                {"layouts": [*map(str, each.layouts)], "what": each.what, "seconds": each.seconds}
                for each in one.violations
            ],
        }
        for one in outcomes
    ]
    return json.dumps({**_about(question), "properties": found}, indent=2) + "\n", holds


def _judged(judge: Judge, question: Question) -> list[Judgement]:
    if question.source is None or question.target is None:
        return list(judge.all_pairs(question.planner))
    ends = [
        parse_layout(end, len(judge.space.shape), len(judge.space.mesh_shape))
        for end in (question.source, question.target)
    ]
    return [judge.judge(ends[0], ends[1], question.planner)]


def _about(question: Question) -> dict[str, str | int]:
    return {
        "format_version": 1, "torch": str(torch.__version__), "mesh": question.mesh, "shape": question.shape,
        "dtype": question.dtype, "planner": question.planner,
    }  # fmt: skip


def _header(judge: Judge, question: Question) -> list[str]:
    uneven = [
        f"tensor dim {dim} of {size}"
        for dim, size in enumerate(judge.space.shape)
        if any(size % extent for extent in judge.space.mesh_shape)
    ]
    links = sorted({(link.latency, link.bandwidth) for link in judge.model.links})
    said = " and ".join(f"{latency * 1e6:g} us and {bandwidth / 1e9:.3g} GB/s" for latency, bandwidth in links)
    flat = ", with its flattened submeshes" if judge.torch_side.flattened else ""
    planner = {"default": "as torch chooses its planner"}.get(question.planner, f"{question.planner} planner")
    shape = question.shape.replace(",", ", ")
    return [
        f"{question.dtype}[{shape}] on mesh {question.mesh.partition('+')[0]}{flat}; "
        f"torch {torch.__version__}, {planner}",
        f"uneven: {', '.join(uneven)}" if uneven else "all shards are even on each mesh dim",
        f"alpha-beta model: {judge.model.launch * 1e6:g} us for a collective, then {said} on "
        f"{plural(len(judge.model.links), 'mesh dim')}" + ("" if question.links else ", as torch's model has them"),
    ]


def _lines(judge: Judge, judgements: Sequence[Judgement], question: Question) -> Sequence[str]:
    if question.source is None:
        return list(all_pairs(judge, judgements, question.worst))
    (judgement,) = judgements
    return [f"{judgement.source} -> {judgement.target}", *one_pair(judge, judgement)]
