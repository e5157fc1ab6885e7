"""Opens pages in the user's browser."""

from __future__ import annotations

import webbrowser

from sm_train.toolkit.terminal.console import note


def open_in_browser(url: str) -> None:
    """Open ``url`` in the user's browser; print it where there is none."""
    if not webbrowser.open(url):
        note(f"no browser to open; the page is {url}")
