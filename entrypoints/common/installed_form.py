"""The command that adds an extra to this installation, in the form in which it was installed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

NAME = "sm-train"


def install_command(extra: str) -> str:
    """Return ``pip install "…[extra]"`` for the folder, wheel or repository that pip installed.

    pip records it in ``direct_url.json`` (Python Packaging User Guide, Recording the Direct URL
    Origin of installed distributions, 2026-11). Without that record the package is named.
    """
    return f"pip install {_form().format(extra=extra)}"


@cache
def _form() -> str:
    """Return pip's arguments, with ``{extra}`` for the extra's name."""
    # Imported for a message only: they take half as long as `sm-train --help` as a whole.
    from importlib.metadata import distributions
    from urllib.parse import unquote, urlsplit

    # A clone has metadata of its own, without the record, which is found first in its folder.
    texts = (found.read_text("direct_url.json") for found in distributions(name=NAME))
    try:
        recorded: dict[str, Any] = json.loads(next(filter(None, texts), "{}"))
    except ValueError:
        recorded = {}
    url = recorded.get("url", "")
    escaped = url.replace("{", "{{").replace("}", "}}")
    if "vcs_info" in recorded:
        vcs = recorded["vcs_info"]
        revision = vcs.get("requested_revision") or vcs.get("commit_id", "")
        return f'"{NAME}[{{extra}}] @ {vcs["vcs"]}+{escaped}@{revision}"'
    if not url:
        return f'"{NAME}[{{extra}}]"'
    if not url.startswith("file:"):
        return f'"{NAME}[{{extra}}] @ {escaped}"'
    path = unquote(urlsplit(url).path).replace("{", "{{").replace("}", "}}")
    editable = "-e " if recorded.get("dir_info", {}).get("editable") else ""
    return f'{editable}"{path}[{{extra}}]"'
