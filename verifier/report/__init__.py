"""Writers: each turns a :class:`~verifier.records.RunRecord` into something to read. None of them runs anything."""

from verifier.report.github import github_lines
from verifier.report.html import render_html, write_html
from verifier.report.json import read_json, render_json, schema, write_json
from verifier.report.rules_text import header_line, op_lines, total_lines
from verifier.report.terminal import print_summary
from verifier.report.words import with_folder

__all__ = [
    "github_lines",
    "header_line",
    "op_lines",
    "print_summary",
    "read_json",
    "render_html",
    "render_json",
    "schema",
    "total_lines",
    "with_folder",
    "write_html",
    "write_json",
]
