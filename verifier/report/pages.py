"""How the templates of pages are read."""

from __future__ import annotations

import jinja2

from verifier.core.wording import plain_text

__all__ = ["page_environment"]


def page_environment() -> jinja2.Environment:
    """Return where templates of pages come from: what they show is escaped.

    A name without a value is an error. Controls of the order of text, which HTML obeys, are shown as escapes.
    """
    return jinja2.Environment(
        loader=jinja2.PackageLoader("verifier.report", ""),
        autoescape=True,
        finalize=lambda value: plain_text(value) if isinstance(value, str) else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
