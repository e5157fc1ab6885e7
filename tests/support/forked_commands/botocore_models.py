"""Keeps what botocore reads of AWS's services, which every session reads for itself."""

from __future__ import annotations

from functools import cache
from typing import Any

from botocore.loaders import JSONFileLoader, Loader

_load = JSONFileLoader.load_file
_list = Loader.list_available_services


@cache
def parse_models_once() -> None:
    """Make all sessions of this process and of its forks share parsed files and their names."""
    loader = JSONFileLoader()
    parsed = cache(lambda path: _load(loader, path))
    listed: dict[tuple[str, ...], Any] = {}

    def load_once(_: JSONFileLoader, path: str) -> Any:
        return parsed(path)

    def list_once(self: Loader, type_name: str) -> Any:
        folders = (type_name, *self.search_paths)
        if folders not in listed:
            listed[folders] = _list(self, type_name)
        return listed[folders]

    JSONFileLoader.load_file = load_once  # type: ignore[method-assign]
    Loader.list_available_services = list_once  # type: ignore[method-assign]
