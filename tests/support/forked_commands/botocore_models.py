"""Keeps the parsed models of AWS's services, which every session of botocore parses for itself."""

from __future__ import annotations

from functools import cache
from typing import Any

from botocore.loaders import JSONFileLoader

_load = JSONFileLoader.load_file


@cache
def parse_models_once() -> None:
    """Make all sessions of this process and of its forks share the parsed files."""
    loader = JSONFileLoader()
    parsed = cache(lambda path: _load(loader, path))

    def load_once(_: JSONFileLoader, path: str) -> Any:
        return parsed(path)

    JSONFileLoader.load_file = load_once  # type: ignore[method-assign]
