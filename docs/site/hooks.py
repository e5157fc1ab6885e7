"""Adds the generated pages to the site: nothing of them is committed, so none can be outdated."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import api_reference
import cli_reference
import event_reference
import failure_reference
import json_reference
import schema_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    "reference/run-file.md": schema_reference.render,
    "reference/cli.md": cli_reference.render,
    "reference/events.md": event_reference.render,
    "reference/json.md": json_reference.render,
    "reference/failures.md": failure_reference.render,
    "reference/api.md": api_reference.render,
    "index.md": lambda: _page("README.md"),
    "contributing.md": lambda: _page("CONTRIBUTING.md"),
    "changelog.md": lambda: _page("CHANGELOG.md"),
}
"""Page → the function that returns its text."""


def on_startup(**_: object) -> None:
    """Link the package for mkdocstrings, which does not read the map of an editable installation.

    mkdocstrings drops missing folders when it is configured: ``on_config`` is too late.
    """
    package = ROOT / "build" / "site-packages" / "sm_train"
    package.mkdir(parents=True, exist_ok=True)
    links = {name: ROOT / name for name in ("toolkit", "estimators", "cost", "entrypoints")}
    links["__init__.py"] = ROOT / "entrypoints" / "api" / "__init__.py"
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            (package / name).symlink_to(target)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, render in PAGES.items():
        files.append(File.generated(config, name, content=render()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Show links from pages to files outside of ``docs/`` as the names of these files."""
    return re.sub(r"\[(`?[^\]\n]+`?)\]\(\.\./(?!\w+\.md)(?!reference)[^)]*\)", r"\1", markdown)


def _page(name: str) -> str:
    """Return a page at the root of the repository, with links as seen from ``docs/``."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"(\]\(|src=\")docs/", r"\1", text)
    for page, target in (("CONTRIBUTING", "contributing"), ("CHANGELOG", "changelog")):
        text = text.replace(f"]({page}.md", f"]({target}.md")
    return text
