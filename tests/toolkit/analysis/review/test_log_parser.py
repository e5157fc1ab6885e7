"""Tests of the log parser against a simple reference implementation."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.job_interface.events import FIELDS, PREFIX
from sm_train.toolkit.analysis.diagnose.log_scanner import whole_lines
from sm_train.toolkit.analysis.review.job_log import Table
from sm_train.toolkit.analysis.review.log_parser import parse_log
from sm_train.toolkit.records.job_logs import parse_event

from tests.support.job_log_lines import line, parse_lines

numbers = (
    st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
)
text = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20)
others = st.dictionaries(text, st.lists(numbers, max_size=2) | text | numbers, max_size=2)


def entries_with(*names: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Generate entries with any subset of the fields ``names`` and others."""
    known_fields = st.fixed_dictionaries({}, optional=dict.fromkeys(names, numbers))
    return st.lists(st.builds(lambda known, more: more | known, known_fields, others), max_size=3)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["step", "node", "heartbeat", "warning", "eval", "another"]))
    event = {name: draw(numbers) for name in sorted(FIELDS.get(kind, ()))}
    event |= {"time": draw(st.floats(0, 1e9) | numbers)}
    event |= {"kind": kind, "node": draw(st.integers(0, 3)), "rank": draw(st.integers(0, 1))}
    if kind == "node":
        event |= {"gpus": draw(entries_with("gpu", "sm_clock", "power"))}
        event |= {"ranks": draw(entries_with("rank", "steps", "busy_seconds", "max"))}
        if draw(st.booleans()):
            event["stragglers"] = draw(st.none() | entries_with("rank", "node", "ratio"))
    if kind in ("warning", "eval"):
        event["time"] = draw(st.floats(0, 1e9))
    if draw(st.integers(0, 9)) == 0:
        del event[draw(st.sampled_from(sorted(FIELDS.get(kind, ("kind",)))))]
    return draw(others) | dict(draw(st.permutations(list(event.items()))))


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Generate an event after some text, sometimes truncated or followed by other text."""
    event = PREFIX + json.dumps(draw(events()), ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        cut = event[: draw(st.integers(0, len(event)))]
        event = draw(st.sampled_from([cut, event + " and more"]))
    raw = f"{draw(text)}{event}{draw(st.sampled_from(['', ' ', chr(13)]))}".encode()
    return raw.replace(b"\xc3", b"\xff") if draw(st.integers(0, 9)) == 0 else raw


def as_rows(table: Table, names: list[str]) -> list[list[float]]:
    return np.array([table[name] for name in names]).T.tolist()


def expected_rows(names: list[str], entries: list[dict[str, Any]]) -> list[list[float]]:
    return [
        [math.nan if (v := entry.get(name)) is None else float(v) for name in names]
        for entry in entries
    ]


def single_precision(rows: list[list[float]]) -> list[list[float]]:
    with np.errstate(over="ignore"):
        return [np.array(row).astype(np.float32).tolist() for row in rows]


@pytest.mark.integration
@settings(max_examples=200, deadline=None)
@given(st.lists(lines() | text.map(str.encode), max_size=12), st.none() | st.integers(1, 400))
def test_tables_match_reference_parser(raw_lines: list[bytes], size: int | None) -> None:
    """Lines come in a file's blocks of ``size`` bytes, or one by one as from CloudWatch."""
    content = b"\n".join(raw_lines)
    blocks = [content[at : at + (size or 1)] for at in range(0, len(content), size or 1)]
    log = parse_log((None, block) for block in (whole_lines(blocks) if size else raw_lines))

    parsed = (parse_event(part.decode("utf-8", "replace")) for part in content.split(b"\n"))
    events = [event for event in parsed if event is not None]
    frequent = [event for event in events if event["kind"] in ("step", "node")]
    frequent.sort(key=lambda event: event["time"])
    steps = [event for event in frequent if event["kind"] == "step"]
    same(as_rows(log.steps, [*log.steps]), expected_rows([*log.steps], steps))
    nodes = {event["node"] for event in events if event["kind"] == "node"}
    assert log.nodes.keys() == log.ranks.keys() == log.gpus.keys() == nodes
    for node in nodes:
        of_node = [event for event in frequent if event["kind"] == "node" and event["node"] == node]
        names = [*log.nodes[node]]
        same(as_rows(log.nodes[node], names), expected_rows(names, of_node))
        in_order = [event for event in events if event["kind"] == "node" and event["node"] == node]
        for tables, field in ((log.ranks, "ranks"), (log.gpus, "gpus")):
            names = [*tables[node]]
            entries = [entry for record in in_order for entry in record[field]]
            same(as_rows(tables[node], names), single_precision(expected_rows(names, entries)))
    warnings = [event for event in events if event["kind"] == "warning"]
    assert sum(warning.count for warning in log.warnings.values()) == len(warnings)
    evals = [event for event in events if event["kind"] == "eval" and event["rank"] == 0]
    assert log.events["eval"] == sorted(evals, key=lambda event: float(event["time"]))


def same(rows: list[list[float]], expected: list[list[float]]) -> None:
    """Compare bit by bit, as NaN is not equal to NaN."""
    assert np.array(rows).tobytes() == np.array(expected).tobytes()


def test_nccl_lines_are_kept_per_node_without_events() -> None:
    log = parse_lines(
        [
            ("algo-1", "algo-1:9:9 [0] NCCL INFO Using network Socket"),
            ("algo-1", "algo-1:9:9 [0] NCCL INFO NET/IB : No device found. " + line("epoch", 1)),
            ("algo-2", line("epoch", 2)),
            ("algo-2", "algo-2:9:9 [0] NCCL INFO via P2P/IPC"),
            (None, "see the.net/page, using network drives"),
        ]
    )
    assert log.nccl.keys() == {"algo-1"}
    assert log.nccl["algo-1"].fabric == "sockets"
    assert len(log.events["epoch"]) == 2


def test_events_with_invalid_types_are_skipped() -> None:
    good = line("step", 1, step=1)
    bad = [good.replace('"step": 1', invalid) for invalid in ('"step": "one"', '"step": [1]')]
    bad += ['SMT {"kind": ["step"]}', "SMT {" + '"a":[' * 100_000, 'SMT {"kind": "step"}']
    assert len(parse_lines([(None, line) for line in (*bad, good)]).steps["time"]) == 1
