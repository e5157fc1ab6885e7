"""Chooses one of a sample's captions by weight."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

JSON_PREFIX = "json."
"""Sources that start with it are fields of the sample's ``.json`` member; dots lead deeper."""


def choose_caption(
    members: Mapping[str, memoryview], sources: Sequence[tuple[str, float]], uniform: float
) -> str | None:
    """Return a caption of the sample; None if it has none of ``sources``.

    ``sources`` are (source, weight): a member's extension, or a field of the JSON member. A field
    that is a list of texts shares its weight among them. Weights of missing and empty captions do
    not count. ``uniform``, in (0, 1), chooses.

    Raises:
        UnicodeDecodeError: a caption is not UTF-8.
        json.JSONDecodeError: the JSON member is damaged.
    """
    captions = list(_captions(members, sources))
    target = uniform * sum(weight for _, weight in captions)
    for caption, weight in captions:
        target -= weight
        if target < 0:
            return caption
    return captions[-1][0] if captions else None


def _captions(
    members: Mapping[str, memoryview], sources: Sequence[tuple[str, float]]
) -> Iterator[tuple[str, float]]:
    document: Any = None
    if "json" in members and any(source.startswith(JSON_PREFIX) for source, _ in sources):
        try:
            document = json.loads(bytes(members["json"]))
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
    for source, weight in sources:
        if source.startswith(JSON_PREFIX):
            value = _field(document, source.removeprefix(JSON_PREFIX).split("."))
        else:
            value = bytes(members[source]).decode("utf-8") if source in members else None
        texts = value if isinstance(value, list) else [value]
        present = [text for text in texts if isinstance(text, str) and text.strip()]
        for text in present:
            yield text, weight / len(present)


def _field(document: Any, path: Sequence[str]) -> Any:
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document
