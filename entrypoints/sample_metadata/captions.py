"""Chooses one of a sample's captions by weight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sm_train.entrypoints.job_interface.job_config import CaptionSource


def choose_caption(
    members: Mapping[str, memoryview], sources: Sequence[CaptionSource], uniform: float
) -> str | None:
    """Return a caption of the sample; None if it has none of ``sources``.

    A field that is a list of texts shares its weight among them. Weights of missing and empty
    captions do not count. ``uniform``, in (0, 1), chooses.

    Raises:
        UnicodeDecodeError: a caption is not UTF-8.
        json.JSONDecodeError: a JSON file is damaged.
    """
    captions = list(_captions(members, sources))
    target = uniform * sum(weight for _, weight in captions)
    for caption, weight in captions:
        target -= weight
        if target < 0:
            return caption
    return captions[-1][0] if captions else None


def caption_text(content: memoryview) -> str:
    """Return the caption in a text file, without white space around it and a byte order mark.

    Editors on Windows write that mark, and all of them a line end, which `sm-train pack` leaves
    out.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return bytes(content).decode("utf-8-sig").strip()


def describe_source(source: CaptionSource) -> str:
    """Return a source as the user knows it: ``txt``, or ``alt_text in json``."""
    return source.member if source.field is None else f"{source.field} in {source.member}"


def _captions(
    members: Mapping[str, memoryview], sources: Sequence[CaptionSource]
) -> Iterator[tuple[str, float]]:
    documents = {
        name: _document(members[name])
        for name in {source.member for source in sources if source.field is not None}
        if name in members
    }
    for source in sources:
        if source.field is not None:
            value = _field(documents.get(source.member), source.field)
        else:
            content = members.get(source.member)
            value = None if content is None else caption_text(content)
        texts = value if isinstance(value, list) else [value]
        present = [text for text in texts if isinstance(text, str) and text.strip()]
        for text in present:
            yield text, source.weight / len(present)


def _document(content: memoryview) -> Any:
    try:
        return json.loads(bytes(content))
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:  # also of integers with thousands of digits
        raise json.JSONDecodeError(str(error), "", 0) from None


def _field(document: Any, field: str) -> Any:
    """Return what ``field`` leads to, such as ``meta.texts[0]``; None if it does not exist."""
    for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        if number:
            is_there = isinstance(document, list) and int(number) < len(document)
            document = document[int(number)] if is_there else None
        else:
            document = document.get(name) if isinstance(document, dict) else None
    return document
