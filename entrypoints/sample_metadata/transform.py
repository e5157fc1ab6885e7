"""Applies the user's ``data.transform`` to the files of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from sm_train.entrypoints.job_interface.user_function import load_user_function

KEY = "data.transform"


class TransformError(ValueError):
    """The function gave no sample; ``reason`` is a fixed code, the message adds the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def apply_transform(
    name: str, key: str, members: Mapping[str, memoryview]
) -> dict[str, memoryview]:
    """Return the files that the function ``name`` returns for a sample, by extension.

    The function gets the files as bytes, and the sample's key as ``__key__``, as webdataset's
    ``map`` gives them. It returns bytes or text; None skips the sample.

    Raises:
        TransformError: it raised an error, skips the sample, or returned something else.
        JobConfigError: the function does not exist.
    """
    function = _loaded(name)
    sample: dict[str, Any] = {extension: bytes(content) for extension, content in members.items()}
    try:
        result = function({"__key__": key} | sample)
    except Exception as error:
        detail = f"{name}: {type(error).__name__}: {error}"
        raise TransformError("transform-failed", " ".join(detail.split())) from error
    if result is None:
        raise TransformError("transform-skipped", f"{name} returned None")
    if not isinstance(result, Mapping):
        detail = f"{name} returned {type(result).__name__}, not a dict"
        raise TransformError("transform-failed", detail)
    return {
        extension: _content(name, extension, value)
        for extension, value in result.items()
        if not extension.startswith("__")
    }


@cache
def _loaded(name: str) -> Callable[..., Any]:
    return load_user_function(KEY, name)


def _content(name: str, extension: str, value: object) -> memoryview:
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        kind = type(value).__name__
        raise TransformError("transform-failed", f"{name} returned {kind} for {extension}")
    return memoryview(value)
