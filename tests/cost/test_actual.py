"""Billed dollars by purpose: parts computed by hand on simulated jobs."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.actual_cost import (
    FinishedJob,
    as_document,
    images_trained,
    measurements,
    observed,
)
from sm_train.cost.assumptions import Assumptions, learned
from sm_train.cost.prices import Price
from sm_train.cost.timeline import PARTS, Timeline, mean_speed, timeline

PRICE = Price("ml.p4de.24xlarge", "us-east-1", Decimal(36), "verified", "test", None)


def start(time: float, resumed: int | None = None) -> dict[str, Any]:
    return {
        "kind": "start",
        "time": time,
        "resumed_from_step": resumed,
        "effective_batch_size": 100,
        "world_size": 32,
        "resolution": 256,
    }


def step(time: float, number: int, its: float = 1.0, wait: float = 0.0) -> dict[str, Any]:
    return {
        "kind": "step",
        "time": time,
        "step": number,
        "steps_per_second": its,
        "data_wait_share": wait,
    }


def checkpoint(time: float, seconds: float) -> dict[str, Any]:
    return {"kind": "checkpoint", "time": time, "seconds": seconds}


END = {"kind": "end", "time": 0.0}


def parts(line: Timeline) -> dict[str, float]:
    return {name: seconds for name, seconds in line.seconds.items() if seconds}


def test_healthy_job() -> None:
    # 1 it/s; the image and the first batch take 300 + 50 s; a checkpoint of 20 s; 10 s at the end.
    events = [
        start(300),
        step(450, 100, 2 / 3),
        step(550, 200, wait=0.1),
        checkpoint(570, 20),
        step(670, 300),
        END | {"time": 670},
    ]
    line = timeline(events, 0, 680)
    assert parts(line) == pytest.approx(
        {"start_up": 350, "checkpoints": 20, "data_wait": 10, "shut_down": 10, "useful": 290}
    )
    assert line.steps_per_second == 1.0
    assert line.restarts == 0


def test_restart_loses_its_time_and_the_steps_after_the_checkpoint() -> None:
    events = [
        start(100),
        step(200, 100),
        step(300, 200),
        step(400, 300),
        start(1000, resumed=200),
        step(1100, 300),
        step(1200, 400),
        END | {"time": 1200},
    ]
    line = timeline(events, 0, 1200)
    assert parts(line) == pytest.approx(
        {"start_up": 100, "restarts": 600, "lost_work": 100, "useful": 400}
    )
    assert (line.restarts, line.restart_seconds) == (1, 600)


def test_compilation_is_learned_apart_from_start_up_and_restarts() -> None:
    """An estimate adds it to both again."""
    compiled = {"compile_seconds": 60.0}
    events = [
        start(100),
        step(300, 100) | compiled,
        step(400, 200) | {"compile_seconds": 0.0},
        start(1000, resumed=200),
        step(1200, 300) | compiled,
        step(1300, 400),
        END | {"time": 1300},
    ]
    line = timeline(events, 0, 1300)
    assert line.compile_seconds == 60
    assert line.seconds["start_up"] == pytest.approx(200)
    seen = observed([job("a", line, 1300)])
    assert (seen.start_up_seconds, seen.compile_seconds) == (140, 60)
    assert seen.restart_seconds == pytest.approx(700 - 60)
    assert learned(Assumptions(), seen).compile_seconds == 60
    # Logs of earlier versions say nothing of it.
    assert timeline([start(100), step(300, 100)], 0, 400).compile_seconds is None


def test_job_after_a_failed_one_reports_lost_work() -> None:
    line = timeline([start(50, resumed=1000), step(150, 1100), END | {"time": 150}], 0, 150, 1080)
    assert parts(line) == pytest.approx({"start_up": 50, "lost_work": 80, "useful": 20})


def test_time_without_progress_is_a_stall_but_a_slow_interval_is_not() -> None:
    events = [start(0), step(100, 100), step(200, 200), step(350, 300), step(1450, 400)]
    line = timeline(events, 0, 3450)
    # 1,000 s over the usual 100, and 2,000 s of silence without an end.
    assert parts(line) == pytest.approx({"stalls": 3000, "useful": 450})


def test_speed_counts_stalls_and_leaves_out_what_is_priced_separately() -> None:
    """A fifth of the intervals takes six times as long: the median would not notice."""
    events: list[dict[str, Any]] = [start(0), step(150, 100, 2 / 3)]
    time = 150.0
    for number in range(2, 52):
        slow = number % 5 == 0
        time += 600.0 if slow else 100.0
        events.append(step(time, 100 * number, 1 / 6 if slow else 1.0))
    for kind, seconds in (("checkpoint", 40.0), ("eval", 200.0)):
        time += seconds
        events.append({"kind": kind, "time": time, "seconds": seconds})
    time += 100.0
    events.append(step(time, 5200))
    speed = mean_speed(events)
    assert speed is not None
    # 51 intervals of 100 steps after the first: ten of them take 600 s, the others 100.
    assert speed.steps_per_second == pytest.approx(5100 / (10 * 600 + 41 * 100))
    assert speed.usual == 1.0
    assert speed.low is not None
    assert speed.high is not None
    assert speed.low <= speed.steps_per_second <= speed.high < 1.0
    line = timeline(events, 0, time)
    assert line.steps_per_second == speed.steps_per_second


def test_speed_of_a_restarted_job_is_that_of_its_training_time() -> None:
    events = [
        start(0),
        step(100, 100),
        step(200, 200),
        start(1000, resumed=100),
        step(1100, 200),
        step(1300, 300),
    ]
    speed = mean_speed(events)
    assert speed is not None
    assert speed.steps_per_second == pytest.approx(200 / 300)
    assert mean_speed([start(0)]) is None
    first = mean_speed([start(0), step(100, 50, 0.5)])
    assert first is not None
    assert first.steps_per_second == 0.5


def test_interval_in_progress_is_not_a_stall() -> None:
    events = [start(0), step(100, 100), step(200, 200)]
    assert parts(timeline(events, 0, 450)) == pytest.approx({"useful": 450})
    assert parts(timeline(events, 0, 550)) == pytest.approx({"stalls": 350, "useful": 200})


def test_job_that_never_trained_is_all_start_up() -> None:
    assert parts(timeline([], 0, 500)) == {"start_up": 500}


@st.composite
def event_logs(draw: st.DrawFn) -> list[dict[str, Any]]:
    clock, number, events = 0.0, 0, []
    for _ in range(draw(st.integers(0, 12))):
        clock += draw(st.floats(0, 5000))
        kind = draw(st.sampled_from(["start", "step", "checkpoint", "end"]))
        if kind == "start":
            events.append(start(clock, draw(st.integers(0, 500))))
        elif kind == "step":
            number += draw(st.integers(0, 300))
            events.append(step(clock, number, draw(st.floats(0.01, 10)), draw(st.floats(0, 1))))
        elif kind == "checkpoint":
            events.append(checkpoint(clock, draw(st.floats(0, 9000))))
        else:
            events.append(END | {"time": clock})
    return events


@settings(deadline=None, max_examples=300)
@given(event_logs(), st.floats(0, 20_000))
def test_parts_sum_to_the_billed_seconds_for_any_events(
    events: list[dict[str, Any]], billed: float
) -> None:
    line = timeline(events, 0, billed)
    assert set(line.seconds) == {*PARTS, "useful"}
    assert all(seconds >= 0 for seconds in line.seconds.values())
    assert sum(line.seconds.values()) == pytest.approx(billed, abs=1e-6)


def job(name: str, line: Timeline | None, billable: float | None, **changes: Any) -> FinishedJob:
    fields = {
        "stage": "256px",
        "status": "Completed",
        "instance_type": "ml.p4de.24xlarge",
        "instances": 4,
        "price": PRICE,
    }
    return FinishedJob(name=name, timeline=line, billable_seconds=billable, **fields | changes)


FIRST = timeline([start(100), step(200, 100), step(300, 200)], 0, 300)
SECOND = timeline([start(60, 150), step(160, 250), END | {"time": 160}], 0, 160, 200)


def test_billed_dollars_are_exact() -> None:
    jobs = [job("a", FIRST, 300, status="Failed"), job("b", SECOND, 160)]
    document = as_document(jobs, {})
    # (300 + 160) s × 4 × $36 ÷ 3600
    assert document["total"]["billed_usd"] == pytest.approx(18.4)
    for billed_job in jobs:
        assert (
            sum(part for part in billed_job.waterfall.values() if part is not None)
            == billed_job.billed
        )
    assert document["stages"][0]["steps_reached"] == 250
    # 250 steps of 100 images: the 50 that were done twice count once.
    assert images_trained(jobs) == 25_000
    assert document["total"]["per_million_images_usd"] == pytest.approx(18.4 / 0.025)
    assert document["total"]["goodput"] == pytest.approx((200 + 50) / 460)


def test_recomputed_steps_count_images_once() -> None:
    line = timeline([start(60, 1000), step(160, 1100)], 0, 200)
    assert images_trained([job("a", line, 200)]) == 10_000


def test_unknown_is_null_and_a_running_job_gives_a_lower_bound() -> None:
    document = as_document([job("a", FIRST, 300), job("b", None, None)], {})
    assert document["total"]["billed_usd"] is None
    assert document["total"]["billed_at_least_usd"] == pytest.approx(12)
    assert document["total"]["goodput"] is None
    assert document["jobs"][1]["waterfall_usd"]["useful"] is None


def test_pending_job_costs_nothing() -> None:
    document = as_document([job("a", FIRST, 300), job("b", None, 0.0, status="InProgress")], {})
    assert document["total"]["billed_usd"] == pytest.approx(12)
    assert document["total"]["goodput"] is not None
    assert document["total"]["images"] == 20_000


def test_observations_give_start_up_failures_and_speed() -> None:
    failed = job("a", FIRST, 300, status="Failed", infrastructure_failure=True)
    jobs = [failed, job("b", SECOND, 160)]
    seen = observed(jobs)
    assert (seen.jobs, seen.failures) == (2, 1)
    assert seen.gpu_hours == pytest.approx(460 * 32 / 3600)
    assert seen.start_up_seconds == pytest.approx(80)
    assumed = learned(Assumptions(), seen)
    assert assumed.start_up_seconds == pytest.approx(80)
    assert assumed.failures_per_gpu_hour > Assumptions().failures_per_gpu_hour
    assert assumed.source("start_up_seconds") == "measured over 2 jobs of this run"
    given_start = Assumptions().assuming(start_up_seconds=5)
    assert learned(given_start, seen).start_up_seconds == 5
    [speed] = measurements(jobs)
    assert (speed.label, speed.world_size, speed.steps_per_second) == ("b", 32, 1.0)


def test_mistakes_in_the_code_do_not_count_towards_the_failure_rate() -> None:
    typos = [job(f"typo-{number}", None, 300, status="Failed") for number in range(3)]
    seen = observed([*typos, job("b", SECOND, 160)])
    assert seen.failures == 0
    rate = learned(Assumptions(), seen).failures_per_gpu_hour
    assert rate <= Assumptions().failures_per_gpu_hour


def test_speeds_are_kept_by_instance_type() -> None:
    moved = job("b", SECOND, 160, instance_type="ml.p5.48xlarge")
    speeds = measurements([job("a", FIRST, 300), moved, job("c", SECOND, 160)])
    assert {(speed.instance_type, speed.label) for speed in speeds} == {
        ("ml.p4de.24xlarge", "c"),
        ("ml.p5.48xlarge", "b"),
    }
