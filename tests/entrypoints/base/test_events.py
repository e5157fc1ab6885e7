"""Event lines: what the job formats, the laptop parses, and every kind has its fields."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.job_interface.events import FIELDS, TEXTS, EventLog, format_event
from sm_train.toolkit.records.job_logs import optional_types, parse_event

LISTS = ("findings", "gpus", "ranks")


@given(
    st.sampled_from(sorted(FIELDS)),
    st.dictionaries(st.text(min_size=1), st.floats() | st.integers() | st.text()),
)
def test_formatted_event_parses_back(kind: str, extra: dict[str, Any]) -> None:
    reserved = {"kind", "time", "node", "rank", *FIELDS[kind], *optional_types(kind)}
    fields = valid_fields(kind) | {
        key: value for key, value in extra.items() if key not in reserved
    }
    line = format_event(kind, fields, time=2.0, node=1, rank=9)
    assert "\n" not in line
    event = parse_event(f"[1,9]<stdout>: {line}")
    assert event is not None
    assert (event["kind"], event["node"], event["rank"]) == (kind, 1, 9)
    assert FIELDS[kind] <= event.keys()


def valid_fields(kind: str) -> dict[str, Any]:
    special: dict[str, Any] = dict.fromkeys(TEXTS, "text") | {name: [] for name in LISTS}
    special |= {"nodes": 2, "world_size": 16}
    return {name: special.get(name, 1.5) for name in FIELDS[kind]}


HOSTILE: list[Any] = [True, "9", {"a": 1}, [None], [[]], [1], [{"rank": "x"}], 1e300, 10**400]
"""Values that no field has."""

OPTIONAL: dict[str, dict[str, Any]] = {
    "start": {"instance_type": "ml.p4d.24xlarge", "frozen_parameters": 7},
    "node": {"stragglers": [{"rank": None, "node": 1, "busy_seconds": 0.5, "ratio": 1.4}]},
    "doctor": {"parts": {"GPU": [1.0, None, "FLOP/s"]}},
    "warning": {"blamed_rank": 1, "rank_died": 1, "silent_seconds": 3.5, "evidence": "stall/1"},
    "end": {"gpu_memory_peak": 2**36},
}


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_event_with_a_value_of_another_type_is_none(kind: str) -> None:
    """User code may print any line; no command that reads a log may fail because of it."""
    header = {"kind": kind, "time": 1.5, "node": 0, "rank": 0}
    event = header | valid_fields(kind) | OPTIONAL.get(kind, {})
    assert parse_event(f"SMT {json.dumps(event)}") == event
    for name, good in event.items():
        for wrong in HOSTILE:
            if wrong != good and not (isinstance(good, str) and isinstance(wrong, str)):
                line = f"SMT {json.dumps(event | {name: wrong})}"
                assert parse_event(line) is None, (name, wrong)
    for name, wrong in {"time": -1, "node": -1, "rank": 10**6, "step": -1, "nodes": 10**6}.items():
        if name in event:
            assert parse_event(f"SMT {json.dumps(event | {name: wrong})}") is None, name


def test_event_with_unknown_fields_is_an_event() -> None:
    event = {"kind": "epoch", "time": 1.5, "node": 0, "rank": 0, "more": {"a": [1]}}
    event |= valid_fields("epoch")
    assert parse_event(f"SMT {json.dumps(event)}") == event


def test_event_without_required_fields_is_rejected() -> None:
    with pytest.raises(ValueError, match="lacks loss"):
        format_event("step", dict.fromkeys(FIELDS["step"] - {"loss"}, 1), time=0, node=0, rank=0)
    with pytest.raises(ValueError, match="unknown event kind"):
        format_event("news", {}, time=0, node=0, rank=0)


def test_nan_becomes_null() -> None:
    fields = dict.fromkeys(FIELDS["step"], float("nan")) | {"step": 7}
    event = parse_event(format_event("step", fields, time=0, node=0, rank=0))
    assert event is not None
    assert event["loss"] is None


def test_recent_events_are_kept_on_disk_for_stall_reports(tmp_path: Path) -> None:
    stream, recent = io.StringIO(), tmp_path / "events.log"
    events = EventLog(node=0, rank=3, stream=stream, clock=lambda: 5.0, recent_events_file=recent)
    for number in range(150):
        events.warn("code", f"message {number}")
    kept = [json.loads(line.removeprefix("SMT ")) for line in recent.read_text().splitlines()]
    assert [event["message"] for event in kept] == [f"message {n}" for n in range(50, 150)]
    assert stream.getvalue().startswith("warning: message 0\nSMT {")
