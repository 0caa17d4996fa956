"""How the templates of pages are read."""

from __future__ import annotations

import jinja2

from verifier.core.wording import plain_text

__all__ = ["page_environment"]


def page_environment(package: str = "verifier.report") -> jinja2.Environment:
    """Return where the templates of ``package`` come from: what they show is escaped.

    A name without a value is an error. Controls of the order of text, which HTML obeys, are shown as escapes.
    """
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in (package, "verifier.report")]),
        autoescape=True,
        finalize=lambda value: plain_text(value) if isinstance(value, str) else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
