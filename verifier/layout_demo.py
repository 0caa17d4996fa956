"""What the command ``layouts`` shows: layouts that packages bring, as text and as a page, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.distributed.tensor import Replicate

from verifier.cases import MeshSpec, OpCase, Placements, Trial, VerdictKind
from verifier.layouts import LayoutOptions, TableLayout, installed_layouts
from verifier.meshes import Pool, PoolKey
from verifier.oracle import judge
from verifier.reference import make_reference
from verifier.report.layouts import layout_lines, render_layouts
from verifier.wording import did_you_mean

__all__ = ["ShownLayouts", "show_layouts"]


@dataclass(frozen=True)
class ShownLayouts:
    """Layouts in order, each with its summary and the case that checks it."""

    entries: tuple[tuple[TableLayout, str, OpCase], ...]
    left_out: tuple[str, ...] = ()
    """Why a layout cannot be shown, one line each."""

    @property
    def lines(self) -> list[str]:
        """The layouts as text, an empty line between them."""
        blocks = ["\n".join(layout_lines(layout, summary)) for layout, summary, _ in self.entries]
        return "\n\n".join([*blocks, *self.left_out]).splitlines()

    @property
    def page(self) -> str:
        """The layouts as an HTML page."""
        return render_layouts([(layout, summary) for layout, summary, _ in self.entries])

    def checked(self) -> Iterator[tuple[str, bool]]:
        """Yield for each layout what its check on gloo ranks says, and whether it passed.

        Raises
        ------
        PoolError
            If the ranks do not start.
        """
        mesh = MeshSpec((self.entries[0][0].ranks,))
        everywhere: Placements = (Replicate(),)
        with Pool(PoolKey.of(mesh)) as pool:
            for layout, _, case in self.entries:
                reference = make_reference(case)
                (observation,) = pool.run([Trial(case, mesh, (everywhere,) * len(reference.inputs))])
                verdict = judge(observation, reference)
                text = f"{layout.name} on {layout.ranks} gloo ranks: {verdict.kind} {verdict.message}".rstrip()
                yield text, verdict.kind is VerdictKind.PASS


def show_layouts(name: str | None, options: LayoutOptions) -> ShownLayouts:
    """Return the layout that ``name`` names, or all of them, with ``options``.

    Raises
    ------
    ValueError
        If there is no such layout, with the nearest name; if an option does not fit the one that is named; or if no
        package brings any.
    """
    sources = installed_layouts().values()
    known = {layout: (source, summary) for source in sources for layout, summary in source.summaries().items()}
    if not known:
        raise ValueError("no installed package brings layouts; install this one, as `pip install -e .`")
    if name is not None:
        if name not in known:
            hint = did_you_mean(name, known) or f"; layouts are {', '.join(known)}"
            raise ValueError(f"no layout is called {name!r}{hint}")
        source, summary = known[name]
        return ShownLayouts(((source.make(name, options), summary, source.case(name, options)),))
    entries, left_out = [], []
    # Of all, each has those splits, owners and hosts that it has by itself.
    plain = replace(options, splits=None, owners=None, ranks_per_host=None)
    if plain != options:
        raise ValueError("--splits, --owners and --ranks-per-host are of one layout; name it")
    for layout, (source, summary) in known.items():
        try:
            entries.append((source.make(layout, plain), summary, source.case(layout, plain)))
        except ValueError as error:
            left_out.append(f"{layout}: {error}")
    if not entries:
        raise ValueError("; ".join(left_out))
    return ShownLayouts(tuple(entries), tuple(left_out))
