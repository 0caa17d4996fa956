"""Loads the templates of pages."""

from __future__ import annotations

import jinja2

from verifier.core.wording import plain_text

__all__ = ["page_environment"]


def page_environment(package: str = "verifier.report") -> jinja2.Environment:
    """Return the template environment of ``package``, which escapes all values.

    An undefined name is an error. Unicode controls of text direction are shown as escapes, because HTML follows them.
    """
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in (package, "verifier.report")]),
        autoescape=True,
        finalize=lambda value: plain_text(value) if isinstance(value, str) else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
