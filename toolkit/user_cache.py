"""Where this user's files may be kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again (XDG Base Directory)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sm-train"
