"""Output of the command ``layouts``: the layouts of installed packages as text and as a page, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed.tensor import Replicate

from strategies.layouts.drawing import layout_lines, render_layouts
from strategies.layouts.tables import LayoutOptions, LayoutSource, TableLayout, installed_layouts
from verifier.core.case import MOST_RANKS, MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.core.wording import did_you_mean, plural
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.torch_internals.placements import Placements

__all__ = ["ShownLayouts", "show_layouts"]

_MOST_RANKS = 1024
"""Each rank has a line under every layout; more lines would be unreadable."""
_MOST_ELEMENTS = 1 << 24
"""Largest table that is checked: every rank gets all of it, and float32 is exact up to this count."""


@dataclass(frozen=True)
class ShownLayouts:
    """Layouts in order, each with its summary and a function that returns the case which checks the layout."""

    entries: tuple[tuple[TableLayout, str, Callable[[], OpCase]], ...]
    left_out: tuple[str, ...] = ()
    """One line for each layout that cannot be shown, with the reason."""

    @property
    def lines(self) -> list[str]:
        """Return the layouts as text, with empty lines between them."""
        blocks = ["\n".join(layout_lines(layout, summary)) for layout, summary, _ in self.entries]
        return "\n\n".join([*blocks, *self.left_out]).splitlines()

    @property
    def page(self) -> str:
        """Return the layouts as an HTML page."""
        return render_layouts([(layout, summary) for layout, summary, _ in self.entries])

    def refuse_check(self) -> None:
        """Refuse layouts that are too large for a check on one machine.

        Raises
        ------
        ValueError
            If there are too many ranks or elements; the message has the limit.
        """
        layout = self.entries[0][0]
        if layout.ranks > MOST_RANKS:
            raise ValueError(
                f"--check: {layout.ranks} ranks are to be started; at most {MOST_RANKS} run on one machine"
            )
        elements = layout.shape[0] * layout.shape[1]
        if elements > _MOST_ELEMENTS:
            raise ValueError(f"--check: the table has {elements:,} elements; it tries {_MOST_ELEMENTS:,} at most")

    def checked(self) -> Iterator[tuple[str, VerdictKind]]:
        """Yield the outcome of each layout's check on gloo ranks, as text and as a kind of verdict.

        Raises
        ------
        PoolError
            If the ranks do not start.
        """
        mesh = MeshSpec((self.entries[0][0].ranks,))
        everywhere: Placements = (Replicate(),)
        with Pool(PoolKey.of(mesh)) as pool:
            for layout, _, make_case in self.entries:
                case = make_case()
                reference = make_reference(case)
                (observation,) = pool.run([Trial(case, mesh, (everywhere,) * len(reference.inputs))])
                verdict = judge(observation, reference)
                where = plural(layout.ranks, "gloo rank")
                yield f"{layout.name} on {where}: {verdict.kind} {verdict.message}".rstrip(), verdict.kind


def show_layouts(name: str | None, options: LayoutOptions) -> ShownLayouts:
    """Return the layout that ``name`` names, or all of them, with ``options``.

    Raises
    ------
    ValueError
        If there is no such layout (the message has the nearest name), if an option does not fit the layout, if there
        are more ranks than can be shown, or if no installed package declares layouts.
    """
    sources = installed_layouts().values()
    known = {layout: (source, summary) for source in sources for layout, summary in source.summaries().items()}
    if not known:
        raise ValueError("no installed package brings layouts; install this one, as `pip install -e .`")
    if name is not None and name not in known:
        hint = did_you_mean(name, known) or f"; layouts are {', '.join(known)}"
        raise ValueError(f"no layout is called {name!r}{hint}")
    if options.ranks > _MOST_RANKS:
        raise ValueError(
            f"--ranks {options.ranks} is more than is shown, since each rank has its line; give {_MOST_RANKS} at most"
        )
    if name is not None:
        source, summary = known[name]
        return ShownLayouts((_entry(source, name, options, summary),))
    entries, left_out = [], {}
    # If all layouts are shown, each has its default splits, owners and hosts.
    plain = replace(options, splits=None, owners=None, ranks_per_host=None)
    if plain != options:
        raise ValueError("--splits, --owners and --ranks-per-host are of one layout; name it")
    for layout, (source, summary) in known.items():
        try:
            entries.append(_entry(source, layout, plain, summary))
        except ValueError as error:
            left_out[layout] = str(error)
    if not entries:
        raise ValueError("; ".join(dict.fromkeys(left_out.values())))
    return ShownLayouts(tuple(entries), tuple(f"{layout}: {reason}" for layout, reason in left_out.items()))


def _entry(
    source: LayoutSource, name: str, options: LayoutOptions, summary: str
) -> tuple[TableLayout, str, Callable[[], OpCase]]:
    return source.make(name, options), summary, partial(source.case, name, options)
