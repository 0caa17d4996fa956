"""Who holds what under each layout, what is refused, and what is said of chunks that are no table."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.layouts.tables import Chunk, LayoutOptions, LayoutSource, TableLayout
from strategies.torchrec.checks import problems
from strategies.torchrec.family import layout_options
from strategies.torchrec.layouts import LAYOUTS, make_layout
from strategies.torchrec.tables import ChunkClaim

EIGHT = LayoutOptions(8, 4, 4)


def held(name: str, options: LayoutOptions) -> list[list[str]]:
    return [[str(chunk) for chunk in chunks] for chunks in make_layout(name, options).chunks]


def rows_of(name: str, options: LayoutOptions) -> list[int]:
    return [sum(chunk.shape[0] for chunk in chunks) for chunks in make_layout(name, options).chunks]


def claims(layout: TableLayout) -> list[ChunkClaim]:
    """Return what ranks say that hold ``layout`` as they should."""
    return [
        ChunkClaim(
            layout.shape, layout.placement, chunks, tuple(c.shape for c in chunks), ("float32",) * len(chunks), layout
        )
        for chunks in layout.chunks
    ]


@pytest.mark.parametrize(("rows", "expected"), [(10, [3, 3, 3, 1]), (5, [2, 2, 1, 0]), (8, [2, 2, 2, 2])])
def test_rows_are_cut_into_blocks_of_the_rounded_up_size(rows: int, expected: list[int]) -> None:
    assert rows_of("row-wise-even", replace(EIGHT, rows=rows)) == expected


def test_each_layout_gives_the_chunks_that_torchrec_gives() -> None:
    assert rows_of("row-wise-uneven", replace(EIGHT, splits=(1, 3, 0, 4))) == [1, 3, 0, 4]
    assert held("row-wise-uneven", EIGHT) == [["[0:1, 0:4]"], ["[1:4, 0:4]"], ["[4:5, 0:4]"], ["[5:8, 0:4]"]]
    assert held("table-wise", replace(EIGHT, owners=(2,))) == [[], [], ["[0:8, 0:4]"], []]
    apart = [["[0:8, 0:1]", "[0:8, 2:3]"], ["[0:8, 3:4]"], ["[0:8, 1:2]"], []]
    assert held("column-wise", replace(EIGHT, owners=(0, 2, 0, 1))) == apart
    assert held("table-column-wise", EIGHT) == [["[0:8, 0:2]"], ["[0:8, 2:4]"], [], []]
    assert held("table-row-wise", replace(EIGHT, rows=5, owners=(1,))) == [[], [], ["[0:3, 0:4]"], ["[3:5, 0:4]"]]
    assert held("grid", EIGHT) == [["[0:4, 0:2]"], ["[4:8, 0:2]"], ["[0:4, 2:4]"], ["[4:8, 2:4]"]]
    assert held("data-parallel", EIGHT) == [["[0:8, 0:4]"]] * 4


@given(data=st.data(), name=st.sampled_from(list(LAYOUTS)), rows=st.integers(1, 17), ranks=st.integers(1, 8))
def test_every_layout_covers_the_table_once(data: st.DataObject, name: str, rows: int, ranks: int) -> None:
    columns = data.draw(st.integers(1, 6))
    layout = make_layout(name, data.draw(layout_options(name, rows, columns, ranks)))
    owners = [
        [
            sum(c.rows[0] <= row < c.rows[1] and c.columns[0] <= at < c.columns[1] for c in chunks)
            for chunks in layout.chunks
        ]
        for row in range(rows)
        for at in range(columns)
    ]
    assert {sum(counts) for counts in owners} == {ranks if layout.replicated else 1}
    assert list(problems(claims(layout), layout.replicated)) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("colum-wise", EIGHT, "no layout is called 'colum-wise'; did you mean 'column-wise'?"),
        ("xyz", EIGHT, "no layout is called 'xyz'; layouts are row-wise-even, row-wise-uneven,"),
        ("grid", replace(EIGHT, splits=(1, 7)), "grid takes no splits=(1, 7); it is for row-wise-uneven"),
        ("row-wise-uneven", replace(EIGHT, splits=(1, 7)), "splits=[1, 7] has 2 parts; there are 4 ranks"),
        ("row-wise-uneven", replace(EIGHT, splits=(1, 3, 1, 2)), "must be counts that add up to 8 rows, not 7"),
        ("table-wise", replace(EIGHT, owners=(4,)), "owners=[4]: there is no rank 4; use 0 to 3"),
        ("table-wise", replace(EIGHT, owners=(0, 1)), "owners=[0, 1]: this layout has one rank as its owner"),
        ("table-row-wise", replace(EIGHT, owners=(2,)), "there is no host 2; use 0 to 1"),
        ("column-wise", replace(EIGHT, owners=(0, 1, 2)), "4 columns cannot be cut into 3 equal blocks; 2 would do"),
        ("column-wise", replace(EIGHT, columns=10**12, owners=(0, 1, 2)), "into 3 equal blocks; 2 would do"),
        ("column-wise", replace(EIGHT, columns=5, owners=(0, 1, 2, 3)), "into 4 equal blocks; 5 would do"),
        ("grid", replace(EIGHT, columns=5, ranks=8, owners=(0, 1, 2, 3)), "into 4 equal blocks; 1 would do"),
        ("column-wise", replace(EIGHT, columns=2, owners=(0, 1, 2)), "into 3 equal blocks; 2 would do"),
        ("column-wise", replace(EIGHT, owners=()), "owners is empty; name at least one rank of 0 to 3"),
        ("table-column-wise", replace(EIGHT, owners=(1, 2)), "owners=[1, 2] are on several hosts of 2 ranks"),
        ("grid", replace(EIGHT, ranks_per_host=3), "ranks_per_host=3 does not divide 4 ranks; use 1, 2, 4"),
        ("grid", replace(EIGHT, owners=(1, 1)), "owners=[1, 1]: a host holds one column block of a grid"),
        ("grid", replace(EIGHT, rows=0), "rows=0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(name: str, options: LayoutOptions, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layout(name, options)


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, {"chunks": (Chunk((0, 4), (0, 4)),)}, "rank 1 holds [0:4, 0:4], the layout on rank 0 says [1:4, 0:4]"),
        (1, {"shape": (9, 4)}, "ranks disagree: shape of the table is [9, 4] on rank 1 and [8, 4] on rank 0"),
        (2, {"placement": "R"}, "ranks disagree: placement is R on rank 2 and S(0) on rank 0"),
        (3, {"dtypes": ("float16",)}, "ranks disagree: the local tensors are float32 on rank 0 and float16 on rank 3"),
        (
            3,
            {"shapes": ((2, 4),)},
            "local tensor of rank 3: got shape [2, 4], expected [3, 4] for its chunk [5:8, 0:4]",
        ),
        (3, {"shapes": ()}, "local tensors of rank 3: got 0, expected 1 for its chunks [5:8, 0:4]"),
        (
            1,
            {"shapes": ((3, 4), (2, 4))},
            "local tensors of rank 1: got 2, expected 1 for its chunks [1:4, 0:4]; does the metadata list them all?",
        ),
        (3, {"plan": None}, "ranks disagree: layout is not given on rank 3 and row-wise-uneven"),
    ],
)
def test_each_problem_is_named_first(rank: int, change: dict[str, object], message: str) -> None:
    said = claims(make_layout("row-wise-uneven", EIGHT))
    said[rank] = replace(said[rank], **change)  # type: ignore[arg-type]
    assert message in next(problems(said))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk((0, 4), (0, 4)), "chunks overlap: [0:1, 0:4] is held by rank 0 ([0:1, 0:4]) and rank 1 ([0:4, 0:4])"),
        (Chunk((2, 4), (0, 4)), "a chunk is missing: [1:2, 0:4] is held by no rank"),
        (Chunk((1, 4), (0, 5)), "rank 1 holds [1:4, 0:5], which is outside of the table of [8, 4]"),
    ],
)
def test_chunks_without_a_layout_to_compare_with(chunk: Chunk, message: str) -> None:
    said = [replace(claim, plan=None) for claim in claims(make_layout("row-wise-uneven", EIGHT))]
    said[1] = replace(said[1], chunks=(chunk,), shapes=(chunk.shape,))
    assert message in next(problems(said))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("name", ["data-parallel", "column-wise"])
def test_a_layout_of_other_ranks_than_those_of_the_mesh(name: str, ranks: int) -> None:
    """Of more ranks the first may hold the same: all of it, or each a column block, of which there are no more."""
    other = make_layout(name, replace(EIGHT, ranks=ranks))
    said = [replace(claim, plan=other) for claim in claims(make_layout(name, EIGHT))]
    assert f"layout {name} on rank 0: got {ranks} ranks, expected 4, those of the mesh" in list(
        problems(said, other.replicated)
    )


def test_a_replicated_table_that_a_rank_has_in_part() -> None:
    said = [replace(claim, plan=None) for claim in claims(make_layout("data-parallel", EIGHT))]
    part = Chunk((0, 7), (0, 4))
    said[2] = replace(said[2], chunks=(part,), shapes=(part.shape,))
    found = next(problems(said, replicated=True))
    assert "[7:8, 0:4] is held not by rank 2, though it is replicated" in found


def test_the_layouts_follow_the_interface_of_the_command_line() -> None:
    from strategies.torchrec.family import SOURCE

    assert isinstance(SOURCE, LayoutSource)
    assert SOURCE.summaries().keys() == LAYOUTS.keys()
