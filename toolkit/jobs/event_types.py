"""The types of an event's values.

A program in the job may print any line, and no command that reads a log may fail because of it:
an event with a value of another type is none. Unknown fields may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from sm_train.cost.speed_model import TextEncoderPlacement
from sm_train.entrypoints.common.events import FIELDS, TEXTS

MAX_RANK = 100_000
"""Limit of ranks, nodes and their numbers, so that a list of all of them fits in memory."""

_MAX_NUMBER = 1e39
"""More than the largest value of float32, and so few digits that all of them can be printed."""

# Unix seconds, up to the year 5138.
_Time = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
_Number = Annotated[float, msgspec.Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
_Step = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


RankEntry = msgspec.defstruct(
    "RankEntry",
    [
        ("rank", _Rank),
        ("busy_seconds", _Number | None, None),
        ("data_wait_share", _Number | None, None),
    ],
    gc=False,
)
"""An entry of the field ``ranks``, with the values that a review uses."""

GpuEntry = msgspec.defstruct(
    "GpuEntry", [("gpu", _Rank), ("sm_clock", _Number | None, None)], gc=False
)
"""An entry of the field ``gpus``, with the values that a review uses."""


class StragglerEntry(msgspec.Struct, gc=False):
    """An entry of the field ``stragglers``; ``rank`` is None for a whole node."""

    rank: _Rank | None
    node: _Rank
    busy_seconds: _Number
    ratio: _Number


class _Figure(msgspec.Struct, array_like=True):
    measured: _Number | None
    expected: _Number | None
    unit: str


_HEADER: Mapping[str, Any] = {"time": _Time, "node": _Rank, "rank": _Rank}

_REQUIRED: Mapping[str, Any] = {
    "step": _Step,
    "nodes": _Rank,
    "world_size": _Rank,
    "effective_batch_size": _Number,
    "seconds": _Seconds | None,
    "seconds_since_step": _Seconds | None,
    "findings": list[str] | None,
    "ranks": list[RankEntry],  # type: ignore[valid-type]
    "gpus": list[GpuEntry],  # type: ignore[valid-type]
}
"""Types of required fields; of all others, numbers and texts that may be null."""

_OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "start": {
        "instance_type": str,
        "accelerator": str,
        "sharding": str,
        "reduce_dtype": str,
        "compile": bool,
        "activation_checkpointing": bool | Literal["selective"],
        "text_encoders": TextEncoderPlacement,
        "entry": str,
        "input_kind": str,
        "frozen_parameters": _Number,
    },
    "step": {
        "timed_steps": _Step,
        "timed_seconds": _Seconds,
        "waited_seconds": _Seconds,
        "compile_seconds": _Seconds | None,
    },
    "heartbeat": {
        "saves": list[tuple[_Step, _Seconds]],
        "unstored_seconds": _Seconds | None,
    },
    "node": {"stragglers": list[StragglerEntry]},
    "doctor": {"parts": dict[str, _Figure]},
    "warning": {
        "blamed_rank": _Rank,
        "blamed_node": _Rank,
        "rank_died": _Rank,
        "unread_rank": _Rank,
        "silent_seconds": _Seconds,
        "evidence": str,
    },
    "end": {"gpu_memory_peak": _Number},
}
"""Fields that a command reads if an event has them, by kind; each may be null."""


def field_types(kind: str) -> dict[str, Any]:
    """Return the types of an event's required fields and of those of its header, by name."""
    others = {name: str | None if name in TEXTS else _Number | None for name in FIELDS[kind]}
    required = {name: _REQUIRED[name] for name in FIELDS[kind] & _REQUIRED.keys()}
    return {**others, **required, **_HEADER}


def optional_types(kind: str) -> dict[str, Any]:
    """Return the types of the other fields that a command reads, by name; each may be missing."""
    return {name: type_ | None for name, type_ in _OPTIONAL.get(kind, {}).items()}


def _event_type(kind: str) -> type[msgspec.Struct]:
    fields: list[Any] = list(field_types(kind).items())
    fields += [(name, type_, None) for name, type_ in optional_types(kind).items()]
    return msgspec.defstruct(kind, fields)


_EVENT_TYPES = {kind: _event_type(kind) for kind in FIELDS}


def is_event(value: object) -> bool:
    """Return whether a JSON value is an event of a known kind with values of its types."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _EVENT_TYPES:
        return False
    try:
        msgspec.convert(value, _EVENT_TYPES[kind])
    except msgspec.ValidationError:
        return False
    return True
