"""The page of the newest run."""

from __future__ import annotations

from pathlib import Path

from verifier.records.files import out_option
from verifier.records.schema import RunRecord
from verifier.report.html import write_html
from verifier.report.json import write_json
from verifier.runs.graph import RedistributionGraph
from verifier.runs.store import RunStore

__all__ = [
    "write_report",
]


def write_report(run: RunRecord, store: RunStore) -> Path:
    """Write ``latest/index.html`` and ``latest/run.json`` of ``run`` and return the path of the page.

    Raises
    ------
    RunStoreError
        If the file system refuses. Each file is then unchanged or complete.
    """
    folder = store.root / "latest"
    page = folder / "index.html"
    command = f"python -m verifier report{out_option(store.root)}"
    kept = f"the records in {store.directory} are whole; once it can be written: {command}"
    write_html(run, page, store.root, kept)
    write_json(run, folder / "run.json", kept)
    graph = RedistributionGraph.from_record(run.graph)
    graph.write_json(folder / "graph.json", kept)
    graph.write_graphml(folder / "graph.graphml", kept)
    return page
