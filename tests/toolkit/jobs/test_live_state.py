"""A job's state from its event lines: pure, so every order and repetition can be tried."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.common.events import FIELDS
from sm_train.toolkit.jobs.events import Event
from sm_train.toolkit.jobs.live_events import last_words
from sm_train.toolkit.jobs.live_state import (
    fold_events,
    merge,
    node_states,
    notices,
    stragglers,
)

NOW = 1795260000.0
Line = tuple[str, Event]


def line(kind: str, time: float, host: str = "algo-1", **fields: Any) -> Line:
    return host, {"kind": kind, "time": time} | dict.fromkeys(FIELDS[kind], 1) | fields


_kinds = st.sampled_from(sorted(FIELDS))
# Few moments and values, so that the same ones meet.
_lines = st.builds(
    lambda kind, time, host, step: line(
        kind,
        NOW + time,
        f"algo-{host}",
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


@given(st.lists(_lines, max_size=12), st.data())
def test_neither_order_nor_repetition_matters(lines: list[Line], data: st.DataObject) -> None:
    once = fold_events(lines)
    assert fold_events(data.draw(st.permutations(lines + lines[: len(lines) // 2]))) == once
    cut = data.draw(st.integers(0, len(lines)))
    overlap = data.draw(st.integers(0, cut))
    assert merge(fold_events(lines[:cut]), fold_events(lines[overlap:])) == once
    assert merge(fold_events(lines[overlap:]), fold_events(lines[:cut])) == once
    assert merge(once, once) == once


@given(st.lists(_lines, min_size=1, max_size=12))
def test_the_newest_word_of_each_counts(lines: list[Line]) -> None:
    live = fold_events(lines)
    steps = [event for _, event in lines if event["kind"] == "step"]
    if steps:
        assert live.newest["step"].time == max(event["time"] for event in steps)
    for host, beat in live.beats.items():
        theirs = [e["time"] for h, e in lines if (h, e["kind"]) == (host, "heartbeat")]
        assert beat.time == max(theirs)


def test_only_so_much_is_kept_and_it_is_the_newest() -> None:
    live = fold_events(line("step", NOW + number, step=number) for number in range(2000))
    assert len(live.steps) == 720
    assert live.steps[-1].event["step"] == 1999
    more = merge(live, fold_events([line("step", NOW + 2000, step=2000)]))
    assert len(more.steps) == 720
    assert more.steps[-1].event["step"] == 2000


def test_a_heartbeat_counts_as_the_step_that_it_tells_of() -> None:
    live = fold_events(
        [
            line("step", NOW, step=7, steps_per_second=2.0, loss=0.5),
            line("heartbeat", NOW + 300, step=7, seconds_since_step=299.0),
            line("heartbeat", NOW + 310, step=7, seconds_since_step=None),
        ]
    )
    words = last_words(live)
    assert (words.step, words.steps_per_second, words.loss) == (7, 2.0, 0.5)
    assert words.sign == NOW + 1
    ended = last_words(merge(live, fold_events([line("end", NOW + 400, step=9, reason="done")])))
    assert (ended.step, ended.ended, ended.sign) == (9, "done", NOW + 400)


def test_where_training_hangs_is_known_from_heartbeats_alone() -> None:
    words = last_words(fold_events([line("heartbeat", NOW, step=7, seconds_since_step=4000.0)]))
    assert (words.step, words.sign, words.loss) == (7, NOW - 4000, None)


def test_an_event_without_a_time_is_left_out() -> None:
    host, event = line("step", NOW)
    assert fold_events([(host, event | {"time": None})]) == fold_events([])


def test_machines_come_by_their_number_whether_they_were_heard_or_not() -> None:
    live = fold_events(
        [
            line("heartbeat", NOW - 30, "algo-10", step=40),
            line(
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
    assert [one.host for one in (second, third, tenth)] == ["algo-2", "algo-3", "algo-10"]
    assert (second.gpu_utilization, second.heartbeat_age, second.receive) == (61.0, None, 12.0)
    assert (third.gpu_utilization, third.step) == (None, None)
    assert (tenth.heartbeat_age, tenth.step) == (30.0, 40)


def test_what_a_machine_says_of_its_gpus_goes_before_cloudwatch() -> None:
    live = fold_events([line("node", NOW, gpu_utilization_mean=97.0, ranks=[])])
    [node] = node_states(live, [], NOW, {"algo-1": 12.0})
    assert node.gpu_utilization == 97.0


def test_ranks_that_keep_others_waiting_are_named_with_their_machine() -> None:
    usual = [{"rank": rank, "p50": 0.5} for rank in range(7)]
    live = fold_events(
        [
            line("node", NOW, "algo-1", ranks=usual),
            line("node", NOW, "algo-2", ranks=[{"rank": 8, "p50": 0.8}, {"rank": 9, "p50": None}]),
        ]
    )
    [slow] = stragglers(live)
    assert (slow.rank, slow.host, slow.step_seconds) == (8, "algo-2", 0.8)
    assert slow.ratio == 0.8 / 0.5


def test_a_repeated_warning_is_one_with_its_number_and_its_newest_words() -> None:
    live = fold_events(
        [
            line("warning", NOW + 2, code="bad-sample", message="second\nof them"),
            line("error", NOW + 1, code="stall", message="ended"),
            line("warning", NOW, code="bad-sample", message="first"),
            line("warning", NOW, "algo-2", code="bad-sample", message="elsewhere"),
        ]
    )
    shown = [(one.host, one.code, one.message, one.count) for one in notices(live)]
    assert shown == [
        ("algo-2", "bad-sample", "elsewhere", 1),
        ("algo-1", "stall", "ended", 1),
        ("algo-1", "bad-sample", "second of them", 2),
    ]
