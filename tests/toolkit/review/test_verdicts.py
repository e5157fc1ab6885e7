"""What a review says of jobs whose trouble is known, and that it is silent about healthy ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.instances import instance_type
from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import stated_speed
from sm_train.toolkit.aws.cloudwatch_metrics import Series
from sm_train.toolkit.review.job_facts import JobOutcome, Money

from tests.support.job_log_lines import BEGIN, Life, facts, hear, line, verdicts

INFO = "algo-1:9:9 [0] NCCL INFO"
PROVIDER = ("algo-1", f"{INFO} NET/OFI Selected provider is efa, fabric is efa (found 4 nics)")
CHANNEL = ("algo-1", f"{INFO} Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0")
EFA = (PROVIDER, (CHANNEL[0], f"{CHANNEL[1]}/GDRDMA"))
SOCKETS = ("algo-2", f"{INFO} Using network Socket")


def test_a_healthy_job_is_well_in_every_respect() -> None:
    found = verdicts(Life(says=EFA))
    assert {code: one.level for code, one in found.items() if one.level != "good"} == {
        "cost": "unknown"
    }


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), noise=st.floats(0, 0.04))
def test_no_chance_is_taken_for_trouble(seed: int, noise: float) -> None:
    found = verdicts(Life(nodes=1, seed=seed, noise=noise, intervals=480))
    assert found["speed"].level == "good"
    assert found["loss"].level == "good"


def test_of_a_job_without_lines_nothing_is_claimed() -> None:
    told = hear([])
    found = verdicts(
        Life(), log=told, line=None, ending=JobOutcome("InProgress", "Starting", "", None)
    )
    assert found.pop("end").level == "good"
    assert {one.level for one in found.values()} == {"unknown"}


# Whether time was used


def test_the_waterfall_names_what_took_most_and_its_dollars() -> None:
    slow = [
        line("checkpoint", 120 + 60 * n + 59, step=n, path="", bytes=1, seconds=20.0)
        for n in range(1, 240)
    ]
    found = verdicts(Life(others=tuple(slow)))["time"]
    assert found.level == "bad"
    assert "checkpoints" in found.sentence
    assert found.fix == "save less often: raise checkpoint.every_steps"
    assert any(one.startswith("checkpoints: ") and "$" in one for one in found.evidence)


def test_a_stall_names_what_its_monitor_blamed() -> None:
    stall = line(
        "warning",
        5000,
        code="stall",
        message="rank 3 on algo-1 is silent in step",
        step=90,
        section="step",
        silent_seconds=900,
        blamed_rank=3,
        ends=True,
        evidence="stalls/1",
    )
    found = verdicts(Life(others=(stall,)))["stalls"]
    assert found.level == "bad"
    assert "once" in found.sentence
    assert "rank 3 on algo-1" in found.evidence[0]
    assert "stalls/1" in found.evidence[0]


@pytest.mark.parametrize(
    ("ending", "level", "words"),
    [
        (JobOutcome("Failed", "Failed", "AlgorithmError: exit 1", None), "bad", "AlgorithmError"),
        (JobOutcome("Stopped", "MaxRuntimeExceeded", "", None), "bad", "MaxRuntimeExceeded"),
        (JobOutcome("Stopped", "Stopped", "", "budget"), "good", "budget"),
        (JobOutcome("InProgress", "Training", "", None), "good", "InProgress"),
    ],
)
def test_how_it_ended(ending: JobOutcome, level: str, words: str) -> None:
    found = verdicts(Life(), ending=ending)["end"]
    assert (found.level, words in found.sentence) == (level, True)


def test_a_log_without_an_end_may_be_of_a_job_that_was_killed() -> None:
    lines = [one for one in Life().lines() if '"kind": "end"' not in one[1]]
    found = verdicts(Life(), ending=None, log=hear(lines))["end"]
    assert found.level == "warning"
    assert "diagnose" in (found.fix or "")


ESTIMATE = estimate(
    [
        CostStage(
            name="256px",
            resolution=256,
            instance_type="ml.p4de.24xlarge",
            instances=2,
            per_device_batch_size=32,
            gradient_accumulation_steps=1,
            max_steps=25_000,
            checkpoint_every=1000,
            speed=stated_speed(1.8, "published"),
        )
    ],
    Purchase("us-east-1"),
)


@pytest.mark.parametrize(
    ("usd", "level", "words"),
    [
        (0.5, "good", "50% less than"),
        (1.0, "good", "as the estimated"),
        (None, "warning", "more than"),
        (3.0, "bad", "200% more than"),
    ],
)
def test_dollars_are_held_against_the_estimate_and_its_range(
    usd: float | None, level: str, words: str
) -> None:
    assert ESTIMATE.cost is not None
    assert ESTIMATE.high is not None
    billed = float(ESTIMATE.high) * 1.1 if usd is None else float(ESTIMATE.cost) * usd
    found = verdicts(Life(), money=Money(billed, ESTIMATE, "billed seconds"))["cost"]
    assert (found.level, words in found.sentence) == (level, True)


# The speed


@pytest.mark.parametrize("fall", [0.1, 0.3])
def test_a_speed_that_falls_at_once_is_dated(fall: float) -> None:
    life = Life(speed=lambda share: 1.8 if share < 0.6 else 1.8 * (1 - fall))
    found = verdicts(life)["speed"]
    assert found.level == ("warning" if fall < 0.15 else "bad")
    assert f"fell by {fall:.0%} about 2026-11-18" in found.sentence
    # 60 % of four hours after 10:06:40, the start-up of two minutes with it.
    said = found.sentence.partition("2026-11-18 ")[2]
    hours, minutes = int(said[:2]), int(said[3:5])
    assert abs(60 * hours + minutes - (11 * 60 + 6 + 2 + 144)) < 12


def test_a_speed_that_drifts_is_told_apart_from_one_that_falls() -> None:
    found = verdicts(Life(speed=lambda share: 1.8 * (1 - 0.12 * share)))["speed"]
    assert found.level == "warning"
    assert "little by little" in found.sentence


def test_a_speed_that_changed_with_a_restart_says_so() -> None:
    again = line(
        "start",
        120 + 60 * 120,
        run="demo",
        stage="256px",
        nodes=2,
        world_size=16,
        max_steps=9,
        backend="nccl",
        resumed_from_step=100,
        effective_batch_size=512,
    )
    life = Life(speed=lambda share: 1.8 if share < 0.5 else 1.2, others=(again,))
    assert "started again" in verdicts(life)["speed"].sentence


def test_single_slow_intervals_are_not_a_drift() -> None:
    chance = random.Random(1)
    slow = {chance.random() for _ in range(12)}
    life = Life(speed=lambda share: 0.4 if any(abs(share - one) < 2e-3 for one in slow) else 1.8)
    assert verdicts(life)["speed"].level == "good"


@pytest.mark.parametrize(("mfu", "level"), [(None, "unknown"), (0.05, "bad"), (0.2, "warning")])
def test_mfu(mfu: float | None, level: str) -> None:
    assert verdicts(Life(mfu=mfu))["mfu"].level == level


# Data, machines, network


@pytest.mark.parametrize(("waits", "level"), [(0.05, "warning"), (0.4, "bad")])
def test_data_that_hold_training_up(waits: float, level: str) -> None:
    found = verdicts(Life(waits=lambda share: waits))["data"]
    assert found.level == level
    assert f"{waits:.1%}" in found.sentence


def test_cloudwatchs_sum_over_gpus_is_divided_by_their_number() -> None:
    times = BEGIN + 60.0 * np.arange(240)
    metrics = {
        ("algo-1", "GPUUtilization"): Series(times, np.full(240, 792.0)),
        ("algo-2", "GPUUtilization"): Series(times, np.full(240, 400.0)),
    }
    found = verdicts(Life(), metrics=metrics)["gpu"]
    assert found.level == "warning"
    assert found.sentence.startswith("74.5%")
    assert found.evidence[1] == "algo-2: 50.0%"


def test_idle_time_before_the_first_step_is_no_idle_gpu() -> None:
    times = BEGIN + 60.0 * np.arange(242)
    shares = np.where(times < BEGIN + 120, 0.0, 800.0)
    metrics = {("algo-1", "GPUUtilization"): Series(times, shares)}
    assert verdicts(Life(), metrics=metrics)["gpu"].sentence.startswith("100.0%")


def test_a_full_disk_is_seen() -> None:
    disk = {("algo-2", "DiskUtilization"): Series(np.array([BEGIN]), np.array([97.0]))}
    found = verdicts(Life(), metrics=disk)["health"]
    assert (found.level, found.sentence) == ("warning", "algo-2: disk 97 % full")


@pytest.mark.parametrize(
    "odd",
    [
        Life(rank=lambda rank: {"p50": 0.8} if rank == 11 else {}),
        Life(rank=lambda rank: {"data_wait_share": 0.3} if rank == 11 else {}),
    ],
)
def test_the_straggler_is_named(odd: Life) -> None:
    found = verdicts(odd)["stragglers"]
    assert found.level in ("warning", "bad")
    assert "rank 11 on node 1" in found.sentence


def test_a_throttled_gpu_is_named() -> None:
    life = Life(clock=lambda node, gpu: 900.0 if (node, gpu) == (1, 6) else 1410.0)
    found = verdicts(life)["stragglers"]
    assert found.level == "warning"
    assert "GPU 6 of node 1 runs at 900 MHz" in found.sentence


def test_memory_errors_ask_for_other_machines() -> None:
    found = verdicts(Life(node={"gpu_ecc_uncorrected": 2}))["health"]
    assert found.level == "bad"
    assert "resume" in (found.fix or "")


@pytest.mark.parametrize(
    ("says", "level", "words"),
    [
        ((), "unknown", "do not say"),
        (EFA, "good", "GPUDirect RDMA"),
        ((SOCKETS,), "bad", "sockets: the fast network is not used"),
        ((*EFA, SOCKETS), "bad", "sockets on algo-2"),
        ((PROVIDER, CHANNEL), "warning", "no GDRDMA"),
    ],
)
def test_the_networks_way(says: tuple[tuple[str, str], ...], level: str, words: str) -> None:
    found = verdicts(Life(says=says))["network"]
    assert (found.level, words in found.sentence) == (level, True)


def test_sockets_are_no_fault_of_machines_without_efa_and_of_single_ones() -> None:
    plain = verdicts(Life(says=(SOCKETS,)), machine=instance_type("ml.g5.2xlarge"))
    assert plain["network"].level == "good"
    assert verdicts(Life(nodes=1, says=(SOCKETS,)))["network"].level == "good"


def test_the_doctors_verdict_is_shown() -> None:
    said = line(
        "doctor",
        60,
        level="fail",
        sentence="network at 12% of expected: 5.9 × slower",
        slowdown=5.9,
        findings=["transport-sockets"],
        seconds=80,
        parts={"all-reduce": [4.0e9, 3.6e10, "B/s"]},
    )
    found_slow = line(
        "warning", 60, code="doctor-transport-sockets", message="NCCL uses sockets; mend the image"
    )
    found = verdicts(Life(others=(said, found_slow)))["doctor"]
    assert found.level == "bad"
    assert found.sentence == "network at 12% of expected: 5.9 × slower"
    assert found.evidence == (
        "all-reduce: 4 GB/s of 36 GB/s expected",
        "NCCL uses sockets; mend the image",
    )
    assert "doctor" not in verdicts(Life())


# The loss


@pytest.mark.parametrize(
    ("life", "words"),
    [
        (Life(loss=lambda share: 0.1 + 0.2 * abs(share - 0.5)), "rises again"),
        (Life(loss=lambda share: 3.0 if 0.7 < share < 0.705 else 0.1), "1 spikes, at step 1"),
        (Life(gradient=lambda share: 1.0 + 20 * share**3), "the gradient's norm grew"),
        (Life(loss=lambda share: math.nan if share > 0.9 else 0.1), "no number in"),
    ],
)
def test_an_ill_loss(life: Life, words: str) -> None:
    found = verdicts(life)["loss"]
    assert found.level in ("warning", "bad")
    assert words in found.sentence


def test_rollbacks_are_told() -> None:
    back = line("warning", 900, code="rolled-back", message="back to 100", step=100)
    found = verdicts(Life(others=(back,)))["loss"]
    assert found.level == "bad"
    assert "went back to a checkpoint" in found.sentence


def test_warnings_of_no_other_question_are_counted() -> None:
    bad = [line("warning", 60 * n, code="bad-sample", message=f"no {n}") for n in range(30)]
    found = verdicts(Life(others=tuple(bad)))["warnings"]
    assert (found.level, found.sentence) == ("warning", "bad-sample (30 ×)")
    assert found.evidence == ("bad-sample: no 0",)


# The reading


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_order_of_lines_does_not_matter(data: Any) -> None:
    """CloudWatch gives the streams of several machines one after another."""
    life = Life(intervals=6, others=(line("warning", 3, code="x", message="y"),))
    lines = life.lines()
    shuffled = data.draw(st.permutations(lines))
    first, second = hear(lines), hear(shuffled)
    for name, column in first.steps.items():
        assert column.tolist() == second.steps[name].tolist()
    assert first.nodes.keys() == second.nodes.keys()
    assert first.warnings == second.warnings
    assert first.span == second.span


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=60) | st.just('SMT {"kind": "step"'), max_size=20))
def test_other_text_is_passed_over(noise: list[str]) -> None:
    lines = Life(intervals=3).lines()
    told = hear([*((None, one) for one in noise), *lines])
    assert len(told.steps["time"]) == 3


def test_unknown_figures_are_gaps_and_not_zeros() -> None:
    life = Life(mfu=None)
    known = facts(life)
    assert np.isnan(known.log.steps["mfu"]).all()
    assert replace(known, billed=False).usd(10) is not None
