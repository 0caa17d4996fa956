"""Writers: each turns a :class:`~verifier.records.RunRecord` into something to read. None of them runs anything."""

from verifier.report.html import render_html, write_html
from verifier.report.json import read_json, render_json, schema, write_json
from verifier.report.terminal import print_summary

__all__ = ["print_summary", "read_json", "render_html", "render_json", "schema", "write_html", "write_json"]
