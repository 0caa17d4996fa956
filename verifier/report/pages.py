"""How the templates of pages are read."""

from __future__ import annotations

import jinja2

__all__ = ["page_environment"]


def page_environment() -> jinja2.Environment:
    """Return where templates of pages come from: what they show is escaped, and a name without a value is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("verifier.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
