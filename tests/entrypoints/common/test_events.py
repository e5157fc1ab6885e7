"""Event lines: what the job formats, the laptop parses, and every kind has its fields."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.common.events import FIELDS, EventLog, format_event
from sm_train.toolkit.jobs.events import parse_event


@given(
    st.sampled_from(sorted(FIELDS)),
    st.dictionaries(st.text(min_size=1), st.floats() | st.integers() | st.text()),
)
def test_formatted_event_parses_back(kind: str, extra: dict[str, Any]) -> None:
    reserved = ("kind", "time", "node", "rank")
    fields = dict.fromkeys(FIELDS[kind], 1.5) | {
        key: value for key, value in extra.items() if key not in reserved
    }
    line = format_event(kind, fields, time=2.0, node=1, rank=9)
    assert "\n" not in line
    event = parse_event(f"[1,9]<stdout>: {line}")
    assert event is not None
    assert (event["kind"], event["node"], event["rank"]) == (kind, 1, 9)
    assert FIELDS[kind] <= event.keys()


def test_event_without_required_fields_is_rejected() -> None:
    with pytest.raises(ValueError, match="lacks loss"):
        format_event("step", dict.fromkeys(FIELDS["step"] - {"loss"}, 1), time=0, node=0, rank=0)
    with pytest.raises(ValueError, match="unknown event kind"):
        format_event("news", {}, time=0, node=0, rank=0)


def test_nan_becomes_null() -> None:
    fields = dict.fromkeys(FIELDS["step"], float("nan"))
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
