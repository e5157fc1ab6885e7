"""A review's reading of lines against the plainest one, and what it passes over."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.common.events import FIELDS, PREFIX
from sm_train.toolkit.diagnose.log_scanner import whole_lines
from sm_train.toolkit.jobs.events import parse_event
from sm_train.toolkit.review.job_log import Table
from sm_train.toolkit.review.log_parser import parse_log

from tests.support.job_log_lines import hear, line

figures = (
    st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
)
text = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20)
others = st.dictionaries(text, st.lists(figures, max_size=2) | text | figures, max_size=2)


def some(*names: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Entries of which any may lack any figure and have more than these."""
    one = st.fixed_dictionaries({}, optional=dict.fromkeys(names, figures))
    return st.lists(st.builds(lambda known, more: more | known, one, others), max_size=3)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["step", "node", "heartbeat", "warning", "eval", "another"]))
    event = {name: draw(figures) for name in ("time", *sorted(FIELDS.get(kind, ())))}
    event |= {"kind": kind, "node": draw(st.integers(0, 3)), "rank": draw(st.integers(0, 1))}
    if kind == "node":
        event |= {"gpus": draw(some("gpu", "sm_clock", "power"))}
        event |= {"ranks": draw(some("rank", "p50", "data_wait_share", "max"))}
    if kind in ("warning", "eval"):
        event["time"] = draw(st.floats(0, 1e9))
    if draw(st.integers(0, 9)) == 0:
        del event[draw(st.sampled_from(sorted(FIELDS.get(kind, ("kind",)))))]
    return draw(others) | dict(draw(st.permutations(list(event.items()))))


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """An event behind some text, now and then cut short or with something behind it."""
    told = PREFIX + json.dumps(draw(events()), ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        told = draw(st.sampled_from([told[: draw(st.integers(0, len(told)))], told + " and on"]))
    said = f"{draw(text)}{told}{draw(st.sampled_from(['', ' ', chr(13)]))}".encode()
    return said.replace(b"\xc3", b"\xff") if draw(st.integers(0, 9)) == 0 else said


def plain(table: Table, names: list[str]) -> list[list[float]]:
    return np.array([table[name] for name in names]).T.tolist()


def rows(names: list[str], entries: list[dict[str, Any]]) -> list[list[float]]:
    return [
        [math.nan if (v := entry.get(name)) is None else float(v) for name in names]
        for entry in entries
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(lines() | text.map(str.encode), max_size=12), st.none() | st.integers(1, 400))
def test_every_figure_is_as_in_the_events_themselves(said: list[bytes], size: int | None) -> None:
    """In a file's blocks of ``size`` bytes, or one by one as CloudWatch gives them."""
    log = b"\n".join(said)
    pieces = [log[at : at + (size or 1)] for at in range(0, len(log), size or 1)]
    told = parse_log((None, block) for block in (whole_lines(pieces) if size else said))

    read = (parse_event(one.decode("utf-8", "replace")) for one in log.split(b"\n"))
    found = [event for event in read if event is not None]
    frequent = [event for event in found if event["kind"] in ("step", "node") and "time" in event]
    frequent.sort(key=lambda event: math.inf if event["time"] is None else event["time"])
    steps = [event for event in frequent if event["kind"] == "step"]
    same(plain(told.steps, [*told.steps]), rows([*told.steps], steps))
    nodes = {event["node"] for event in found if event["kind"] == "node"}
    assert told.nodes.keys() == told.ranks.keys() == told.gpus.keys() == nodes
    for node in nodes:
        own = [event for event in frequent if event["kind"] == "node" and event["node"] == node]
        names = [*told.nodes[node]]
        same(plain(told.nodes[node], names), rows(names, own))
        in_order = [one for one in found if one["kind"] == "node" and one["node"] == node]
        for tables, field in ((told.ranks, "ranks"), (told.gpus, "gpus")):
            names = [*tables[node]]
            entries = [entry for one in in_order for entry in one[field]]
            same(plain(tables[node], names), rows(names, entries))
    warned = [event for event in found if event["kind"] == "warning"]
    assert sum(one.count for one in told.warnings.values()) == len(warned)
    evals = [event for event in found if event["kind"] == "eval" and event["rank"] == 0]
    assert told.events["eval"] == sorted(evals, key=lambda event: float(event["time"]))


def same(ours: list[list[float]], plain: list[list[float]]) -> None:
    """Of the same bits, but for the many that mean NaN."""
    assert np.array(ours).tobytes() == np.array(plain).tobytes()


def test_what_nccl_says_is_kept_of_its_own_machine_and_events_are_not_its() -> None:
    told = hear(
        [
            ("algo-1", "algo-1:9:9 [0] NCCL INFO Using network Socket"),
            ("algo-1", "algo-1:9:9 [0] NCCL INFO NET/IB : No device found. " + line("epoch", 1)),
            ("algo-2", line("epoch", 2)),
            ("algo-2", "algo-2:9:9 [0] NCCL INFO via P2P/IPC"),
            (None, "go to the.net/page, using network drives"),
        ]
    )
    assert told.nccl.keys() == {"algo-1"}
    assert told.nccl["algo-1"].transport == "sockets"
    assert len(told.events["epoch"]) == 2


def test_a_line_that_is_no_event_by_its_types_is_passed_over() -> None:
    good = line("step", 1, step=1)
    bad = [good.replace('"step": 1', words) for words in ('"step": "one"', '"step": [1]')]
    bad += ['SMT {"kind": ["step"]}', "SMT {" + '"a":[' * 100_000, 'SMT {"kind": "step"}']
    assert len(hear([(None, one) for one in (*bad, good)]).steps["time"]) == 1
