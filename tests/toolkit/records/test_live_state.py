"""Folding events into a job's live state: pure, so any order and repetition can be tested."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.job_interface.events import FIELDS
from sm_train.toolkit.records.job_logs import Event
from sm_train.toolkit.records.live_state import (
    failed_saves,
    fold_events,
    merge,
    node_states,
    notices,
    progress_of,
    stragglers,
)

NOW = 1795260000.0
NodeEvent = tuple[str, Event]


def logged(kind: str, time: float, node: str = "algo-1", **fields: Any) -> NodeEvent:
    return node, {"kind": kind, "time": time} | dict.fromkeys(FIELDS[kind], 1) | fields


_kinds = st.sampled_from(sorted(FIELDS))
# Few times and values, so that equal ones are generated.
_events = st.builds(
    lambda kind, time, node, step: logged(
        kind,
        NOW + time,
        f"algo-{node}",
        step=step,
        code=f"c{step % 3}",
        seconds_since_step=step if step % 2 else None,
        ranks=[],
    ),
    _kinds,
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(0, 5),
)


@given(st.lists(_events, max_size=12), st.data())
def test_state_is_independent_of_order_and_repetition(
    events: list[NodeEvent], data: st.DataObject
) -> None:
    once = fold_events(events)
    assert fold_events(data.draw(st.permutations(events + events[: len(events) // 2]))) == once
    split = data.draw(st.integers(0, len(events)))
    overlap = data.draw(st.integers(0, split))
    assert merge(fold_events(events[:split]), fold_events(events[overlap:])) == once
    assert merge(fold_events(events[overlap:]), fold_events(events[:split])) == once
    assert merge(once, once) == once


@given(st.lists(_events, min_size=1, max_size=12))
def test_newest_event_of_each_kind_and_node_wins(events: list[NodeEvent]) -> None:
    live = fold_events(events)
    steps = [event for _, event in events if event["kind"] == "step"]
    if steps:
        assert live.newest["step"].time == max(event["time"] for event in steps)
    for node, heartbeat in live.heartbeats.items():
        times = [
            event["time"]
            for logging_node, event in events
            if (logging_node, event["kind"]) == (node, "heartbeat")
        ]
        assert heartbeat.time == max(times)


def test_only_the_newest_720_steps_are_kept() -> None:
    live = fold_events(logged("step", NOW + number, step=number) for number in range(2000))
    assert len(live.steps) == 720
    assert live.steps[-1].event["step"] == 1999
    merged = merge(live, fold_events([logged("step", NOW + 2000, step=2000)]))
    assert len(merged.steps) == 720
    assert merged.steps[-1].event["step"] == 2000


def test_heartbeat_counts_as_activity_at_its_reported_step() -> None:
    live = fold_events(
        [
            logged("step", NOW, step=7, steps_per_second=2.0, loss=0.5),
            logged("heartbeat", NOW + 300, step=7, seconds_since_step=299.0),
            logged("heartbeat", NOW + 310, step=7, seconds_since_step=None),
        ]
    )
    progress = progress_of(live)
    assert (progress.step, progress.steps_per_second, progress.loss) == (7, 2.0, 0.5)
    assert progress.last_activity == NOW + 1
    ended = progress_of(merge(live, fold_events([logged("end", NOW + 400, step=9, reason="done")])))
    assert (ended.step, ended.ended, ended.last_activity) == (9, "done", NOW + 400)


def test_progress_of_a_hanging_job_comes_from_heartbeats() -> None:
    progress = progress_of(
        fold_events([logged("heartbeat", NOW, step=7, seconds_since_step=4000.0)])
    )
    assert (progress.step, progress.last_activity, progress.loss) == (7, NOW - 4000, None)


def test_event_without_time_is_ignored() -> None:
    node, event = logged("step", NOW)
    assert fold_events([(node, event | {"time": None})]) == fold_events([])


def test_nodes_are_sorted_by_number_including_silent_ones() -> None:
    live = fold_events(
        [
            logged("heartbeat", NOW - 30, "algo-10", step=40),
            logged(
                "node",
                NOW - 20,
                "algo-2",
                gpu_utilization_mean=None,
                ranks=[],
                network_receive_bytes_per_second=5.0,
                efa_receive_bytes_per_second=7.0,
            ),
        ]
    )
    second, third, tenth = node_states(live, ["algo-2", "algo-3"], NOW, {"algo-2": 61.0})
    assert [rank_state.node for rank_state in (second, third, tenth)] == [
        "algo-2",
        "algo-3",
        "algo-10",
    ]
    assert (
        second.gpu_utilization,
        second.heartbeat_age_seconds,
        second.receive_bytes_per_second,
    ) == (61.0, None, 12.0)
    assert (third.gpu_utilization, third.step) == (None, None)
    assert (tenth.heartbeat_age_seconds, tenth.step) == (30.0, 40)


def test_logged_gpu_utilization_takes_precedence_over_cloudwatch() -> None:
    live = fold_events([logged("node", NOW, gpu_utilization_mean=97.0, ranks=[])])
    [node] = node_states(live, [], NOW, {"algo-1": 12.0})
    assert node.gpu_utilization == 97.0


def test_stragglers_are_those_that_the_first_node_has_found() -> None:
    slow = {"rank": 8, "node": 1, "busy_seconds": 0.8, "ratio": 1.6}
    whole_node = {"rank": None, "node": 7, "busy_seconds": 0.7, "ratio": 1.4}
    live = fold_events(
        [
            logged("node", NOW, "algo-1", stragglers=[slow, whole_node]),
            ("algo-2", logged("node", NOW, stragglers=None)[1] | {"node": 1}),
        ]
    )
    found = stragglers(live)
    assert found is not None
    assert [(rank_state.rank, rank_state.node, rank_state.ratio) for rank_state in found] == [
        (8, "algo-2", 1.6),
        (None, "algo-8", 1.4),
    ]


def test_stragglers_are_unknown_until_ranks_were_compared() -> None:
    assert stragglers(fold_events([logged("node", NOW, ranks=[])])) is None
    assert stragglers(fold_events([logged("node", NOW, stragglers=None)])) is None
    assert stragglers(fold_events([logged("node", NOW, stragglers=[])])) == []


def test_repeated_notices_are_counted_and_show_the_newest_message() -> None:
    live = fold_events(
        [
            logged("warning", NOW + 2, code="bad-sample", message="second\nof them"),
            logged("error", NOW + 1, code="stall", message="ended"),
            logged("warning", NOW, code="bad-sample", message="first"),
            logged("warning", NOW, "algo-2", code="bad-sample", message="other node"),
        ]
    )
    summary = [(notice.node, notice.code, notice.message, notice.count) for notice in notices(live)]
    assert summary == [
        ("algo-2", "bad-sample", "other node", 1),
        ("algo-1", "stall", "ended", 1),
        ("algo-1", "bad-sample", "second of them", 2),
    ]


def test_checkpoints_that_could_not_be_written_are_counted_since_the_newest_complete_one() -> None:
    def failed(time: float, message: str) -> NodeEvent:
        return logged("warning", time, code="checkpoint-failed", message=message)

    events = [failed(NOW, "a"), logged("checkpoint", NOW + 1, step=20)]
    assert failed_saves(fold_events(events)) is None
    events += [failed(NOW + 2, "b"), failed(NOW + 3, "disk full")]
    assert failed_saves(fold_events(events)) == (
        "2 checkpoints could not be written since that of step 20: disk full"
    )
    assert failed_saves(fold_events(events[3:])) == "a checkpoint could not be written: disk full"
