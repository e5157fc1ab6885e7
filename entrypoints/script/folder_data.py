"""How a folder of shards is read outside of a job: keys of the run file's section `data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.job_interface.job_config import (
    DEFAULT_COLOR,
    CaptionSource,
    DataConfig,
    ExtraConfig,
)

_DEFAULTS = DataConfig(
    image_key="jpg;jpeg;png;webp",
    caption_key="txt",
    crop="center",
    decode="fast",
    icc_profile=DEFAULT_COLOR.icc_profile,
    hdr=DEFAULT_COLOR.hdr,
    aspect_buckets=False,
    max_bad_fraction=0.01,
)

_OF_JOBS = frozenset(("sources", "synthetic_samples", "pipe"))
"""Keys that mean something in a job alone."""


def folder_config(data: Mapping[str, Any]) -> DataConfig:
    """Return how samples are read, with the keys that are given.

    Raises:
        Error: a key is unknown, or its value invalid.
    """
    hints = get_type_hints(DataConfig)
    known = [field.name for field in fields(DataConfig) if field.name not in _OF_JOBS]
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            similar = get_close_matches(key, known, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else f"; it takes {', '.join(known)}"
            raise Error(f"ShardDataset: {key}: not a key of `data` for a folder{hint}")
        values[key] = _READERS.get(key, lambda given: given)(value)
        _require_type(key, values[key], hints[key])
    return DataConfig(**(vars(_DEFAULTS) | values))


def _require_type(key: str, value: Any, hint: Any) -> None:
    kinds = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            choices = " or ".join(map(repr, get_args(hint)))
            raise Error(f"ShardDataset: {key}: {value!r} is neither {choices}")
        return
    allowed = tuple(kind for kind in (hint, *get_args(hint)) if kind in kinds)
    if not allowed or (value is None and type(None) in get_args(hint)):
        return
    fits = isinstance(value, (*allowed, int) if float in allowed else allowed)
    if not fits or (isinstance(value, bool) and bool not in allowed):
        raise Error(f"ShardDataset: {key}: {value!r} is not {kinds[allowed[0]]}")


def _captions(value: Any) -> tuple[CaptionSource, ...]:
    """Return the sources of `caption`: an extension with a weight, or with fields of JSON files."""
    try:
        return tuple(
            source
            for member, given in value.items()
            for source in (
                [CaptionSource(member, part["field"], float(part["weight"])) for part in given]
                if isinstance(given, list)
                else [CaptionSource(member, None, float(given))]
            )
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Error(
            f"ShardDataset: caption: {value!r}; write {{'txt': 1}} or {{'json': [{{'field': "
            "'alt_text', 'weight': 1}]}"
        ) from None


def _extras(value: Any) -> tuple[ExtraConfig, ...]:
    try:
        return tuple(
            ExtraConfig(name, extra["member"], extra["kind"], tuple(extra.get("shape", ())))
            for name, extra in value.items()
        )
    except (AttributeError, KeyError, TypeError):
        raise Error(
            f"ShardDataset: extras: {value!r}; write {{'depth': {{'member': 'depth.png', 'kind': "
            "'map'}}"
        ) from None


_READERS = {"caption": _captions, "extras": _extras}
