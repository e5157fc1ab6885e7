"""Renders the HTML pages and tables from the templates in toolkit/templates, and writes pages."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.toolkit.base.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment

STATIC_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
"""Content security policy of a page without scripts: it loads nothing and sends nothing."""


def template(name: str) -> str:
    """Return the content of a file in toolkit/templates."""
    return (files("sm_train.toolkit") / "templates" / name).read_text("utf-8")


def render(name: str, /, **values: Any) -> str:
    """Return the template ``name`` with ``values``.

    All text is escaped, as names and log lines are untrusted. ``markup`` in a template exempts what
    is HTML already: an SVG that this package drew.
    """
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    # Slow to import, and only pages need it.
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        markup=Markup, style=Markup(template("page.css")), policy=Markup(STATIC_PAGE_POLICY)
    )
    return environment


def write_html(path: Path, page: str) -> None:
    """Write ``page`` to ``path`` atomically.

    Raises:
        UserError: the folder does not exist, or the file cannot be written.
    """
    try:
        write_atomic(path, page.encode(errors="replace"))  # names of files may be no Unicode
    except FileNotFoundError:
        raise UserError(f"--html: {path.parent}: no such folder; create it first") from None
    except OSError as error:
        raise UserError(f"--html: {path}: {error.strerror}; name another file") from None
