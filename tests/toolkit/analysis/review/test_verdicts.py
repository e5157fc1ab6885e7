"""Tests of the verdicts on simulated jobs with known problems, and on healthy ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.instances import instance_type
from sm_train.cost.speed import stated_speed
from sm_train.cost.stage import CostStage
from sm_train.toolkit.analysis.review.build import review_job
from sm_train.toolkit.analysis.review.job_facts import JobCost, JobOutcome
from sm_train.toolkit.aws.cloudwatch_metrics import Series

from tests.support.job_log_lines import BEGIN, SimulatedJob, facts, line, parse_lines, verdicts
from tests.support.log_lines import diagnosed

INFO = "algo-1:9:9 [0] NCCL INFO"
PROVIDER = ("algo-1", f"{INFO} NET/OFI Selected provider is efa, fabric is efa (found 4 nics)")
CHANNEL = ("algo-1", f"{INFO} Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0")
EFA = (PROVIDER, (CHANNEL[0], f"{CHANNEL[1]}/GDRDMA"))
INFINIBAND = tuple(
    (f"algo-{node}", f"{INFO} Channel {index:02}/0 : 0[0] -> 8[0] [send] via NET/IB/0{rdma}")
    for node, rdmas in ((1, ["/GDRDMA"] * 16), (2, ["/GDRDMA", *[""] * 15]))
    for index, rdma in enumerate(rdmas)
)
NO_MODULE = ("algo-2", f"{INFO} NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)")
SOCKETS = ("algo-2", f"{INFO} Using network Socket")


def test_healthy_job_has_only_good_verdicts() -> None:
    found = verdicts(SimulatedJob(other_lines=EFA))
    assert {code: verdict.level for code, verdict in found.items() if verdict.level != "good"} == {
        "cost": "unknown"
    }


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), noise=st.floats(0, 0.04))
def test_noise_is_not_reported_as_a_problem(seed: int, noise: float) -> None:
    found = verdicts(SimulatedJob(nodes=1, seed=seed, noise=noise, intervals=480))
    assert found["speed"].level == "good"
    assert found["loss"].level == "good"


def test_checkpoints_that_do_not_reach_storage_are_found() -> None:
    """A checkpoint every five minutes; after the second one nothing is stored."""

    def saved(number: int, stored: int | None) -> str:
        step, at = 500 * number, 300.0 * number
        values = {"path": "p", "bytes": 1, "seconds": 0.1}
        return line("checkpoint", at, step=step, stored_step=stored, **values)

    stuck = [saved(number, 1000 if number > 2 else None) for number in range(1, 13)]
    found = verdicts(SimulatedJob(), log=parse_lines([(None, line) for line in stuck]))["storage"]
    assert found.level == "bad"
    assert "storage holds step 1,000 while the job saved step 6,000, for 40 min" in found.sentence
    assert found.evidence == ("when step 6,000 was saved, step 1,000 was stored",)
    slow = [saved(number, 500 * (number - 2) or None) for number in range(1, 13)]
    found = verdicts(SimulatedJob(), log=parse_lines([(None, line) for line in slow]))["storage"]
    assert found.level == "good"
    none = [saved(number, None) for number in range(1, 13)]
    found = verdicts(SimulatedJob(), log=parse_lines([(None, line) for line in none]))["storage"]
    assert "storage holds no checkpoint" in found.sentence


def test_job_without_log_lines_is_unknown() -> None:
    log = parse_lines([])
    found = verdicts(
        SimulatedJob(),
        log=log,
        timeline=None,
        outcome=JobOutcome("InProgress", "Starting", "", None),
    )
    assert found.pop("end").level == "good"
    assert {verdict.level for verdict in found.values()} == {"unknown"}


# Goodput, outcome and cost


def test_goodput_names_the_largest_loss_and_its_cost() -> None:
    slow = [
        line("checkpoint", 120 + 60 * n + 59, step=n, path="", bytes=1, seconds=20.0)
        for n in range(1, 240)
    ]
    found = verdicts(SimulatedJob(extra_events=tuple(slow)))["time"]
    assert found.level == "bad"
    assert "checkpoints" in found.sentence
    assert found.fix == "save less often: raise checkpoint.every_steps"
    assert any(text.startswith("checkpoints: ") and "$" in text for text in found.evidence)


def test_stall_names_the_rank_the_watchdog_blamed() -> None:
    stall = line(
        "warning",
        5000,
        code="stall",
        message="rank 3 on algo-1 is silent in step",
        step=90,
        phase="step",
        silent_seconds=900,
        blamed_rank=3,
        ends=True,
        evidence="stalls/1",
    )
    found = verdicts(SimulatedJob(extra_events=(stall,)))["stalls"]
    assert found.level == "bad"
    assert "once" in found.sentence
    assert "rank 3 on algo-1" in found.evidence[0]
    assert "stalls/1" in found.evidence[0]


@pytest.mark.parametrize(
    ("outcome", "level", "phrase"),
    [
        (JobOutcome("Failed", "Failed", "AlgorithmError: exit 1", None), "bad", "AlgorithmError"),
        (JobOutcome("Stopped", "MaxRuntimeExceeded", "", None), "bad", "MaxRuntimeExceeded"),
        (JobOutcome("Stopped", "Stopped", "", "budget"), "good", "budget"),
        (JobOutcome("InProgress", "Training", "", None), "good", "InProgress"),
    ],
)
def test_outcome(outcome: JobOutcome, level: str, phrase: str) -> None:
    found = verdicts(SimulatedJob(), outcome=outcome)["end"]
    assert (found.level, phrase in found.sentence) == (level, True)


@pytest.mark.parametrize(
    ("outcome", "how"),
    [(None, "ended"), (JobOutcome("Completed", "Completed", "", None), "completed")],
)
def test_job_that_ended_by_itself_before_its_last_step_is_a_warning(
    outcome: JobOutcome | None, how: str
) -> None:
    job = SimulatedJob(intervals=10, missing_steps=5)
    lines = job.lines()
    end = parse_lines(lines).last("end")
    assert end is not None
    step = end["step"]
    found = verdicts(job, outcome=outcome)["end"]
    assert found.level == "warning"
    assert found.sentence == f"it {how} early, at step {step:,} of {step + 5:,}"
    assert found.fix is not None
    complete = verdicts(SimulatedJob(intervals=10), outcome=None)["end"]
    assert (complete.level, complete.sentence) == ("good", "it completed all steps")


def test_log_without_an_end_is_a_warning() -> None:
    lines = [line for line in SimulatedJob().lines() if '"kind": "end"' not in line[1]]
    found = verdicts(SimulatedJob(), outcome=None, log=parse_lines(lines))["end"]
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
    ("usd", "level", "phrase"),
    [
        (0.5, "good", "50% less than"),
        (1.0, "good", "equal to the"),
        (None, "warning", "more than"),
        (3.0, "bad", "200% more than"),
    ],
)
def test_cost_is_compared_with_the_estimate_and_its_interval(
    usd: float | None, level: str, phrase: str
) -> None:
    assert ESTIMATE.cost is not None
    assert ESTIMATE.high is not None
    billed = float(ESTIMATE.high) * 1.1 if usd is None else float(ESTIMATE.cost) * usd
    found = verdicts(SimulatedJob(), cost=JobCost(billed, ESTIMATE, "billed seconds"))["cost"]
    assert (found.level, phrase in found.sentence) == (level, True)


# Speed


@pytest.mark.parametrize("fall", [0.1, 0.3])
def test_abrupt_slowdown_is_dated(fall: float) -> None:
    job = SimulatedJob(speed=lambda share: 1.8 if share < 0.6 else 1.8 * (1 - fall))
    found = verdicts(job)["speed"]
    assert found.level == ("warning" if fall < 0.15 else "bad")
    assert f"fell by {fall:.0%} at about 2026-11-18" in found.sentence
    # 60 % of four hours after 10:06:40 and two minutes of start-up.
    clock = found.sentence.partition("2026-11-18 ")[2]
    hours, minutes = int(clock[:2]), int(clock[3:5])
    assert abs(60 * hours + minutes - (11 * 60 + 6 + 2 + 144)) < 12


def test_gradual_slowdown_is_distinguished_from_abrupt() -> None:
    found = verdicts(SimulatedJob(speed=lambda share: 1.8 * (1 - 0.12 * share)))["speed"]
    assert found.level == "warning"
    assert "gradually" in found.sentence


def test_slowdown_at_a_restart_mentions_it() -> None:
    restart = line(
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
    job = SimulatedJob(speed=lambda share: 1.8 if share < 0.5 else 1.2, extra_events=(restart,))
    assert "restarted" in verdicts(job)["speed"].sentence


def test_single_slow_intervals_are_not_a_drift() -> None:
    rng = random.Random(1)
    slow = {rng.random() for _ in range(12)}
    job = SimulatedJob(
        speed=lambda share: 0.4 if any(abs(share - moment) < 2e-3 for moment in slow) else 1.8
    )
    assert verdicts(job)["speed"].level == "good"


@pytest.mark.parametrize(("mfu", "level"), [(None, "unknown"), (0.05, "bad"), (0.2, "warning")])
def test_mfu(mfu: float | None, level: str) -> None:
    assert verdicts(SimulatedJob(mfu=mfu))["mfu"].level == level


# Data, instances, network


@pytest.mark.parametrize(("data_wait", "level"), [(0.05, "warning"), (0.4, "bad")])
def test_data_wait(data_wait: float, level: str) -> None:
    found = verdicts(SimulatedJob(data_wait=lambda share: data_wait))["data"]
    assert found.level == level
    assert f"{data_wait:.1%}" in found.sentence


def test_fixes_for_a_script_of_the_users_own_name_no_keys_of_the_run_file() -> None:
    job = SimulatedJob(data_wait=lambda share: 0.4)
    lines = [
        (node, text.replace('"run": "demo"', '"run": "demo", "entry": "own.py"'))
        for node, text in job.lines()
    ]
    found = verdicts(job, log=parse_lines(lines))
    assert "the script's DataLoader" in (found["data"].fix or "")
    assert "training.decode_workers" in (verdicts(job)["data"].fix or "")
    assert "the script's DataLoader" in (found["time"].fix or "")


def test_script_that_took_no_observed_steps_did_not_complete_all_steps() -> None:
    lines = [(None, line("end", 60.0, step=0, reason="done", images=0))]
    found = verdicts(SimulatedJob(), outcome=None, log=parse_lines(lines))["end"]
    assert (found.level, found.sentence) == ("good", "it ended without an error")


def test_cloudwatch_utilization_is_divided_by_gpu_count() -> None:
    times = BEGIN + 60.0 * np.arange(240)
    metrics = {
        ("algo-1", "GPUUtilization"): Series(times, np.full(240, 792.0)),
        ("algo-2", "GPUUtilization"): Series(times, np.full(240, 400.0)),
    }
    found = verdicts(SimulatedJob(), metrics=metrics)["gpu"]
    assert found.level == "warning"
    assert found.sentence.startswith("74.5%")
    assert found.evidence[1] == "algo-2: 50.0%"


def test_start_up_does_not_count_as_idle_gpu_time() -> None:
    times = BEGIN + 60.0 * np.arange(242)
    shares = np.where(times < BEGIN + 120, 0.0, 800.0)
    metrics = {("algo-1", "GPUUtilization"): Series(times, shares)}
    assert verdicts(SimulatedJob(), metrics=metrics)["gpu"].sentence.startswith("100.0%")


def test_full_disk_is_a_warning() -> None:
    disk = {("algo-2", "DiskUtilization"): Series(np.array([BEGIN]), np.array([97.0]))}
    found = verdicts(SimulatedJob(), metrics=disk)["health"]
    assert (found.level, found.sentence) == ("warning", "algo-2: disk 97 % full")


NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "level", "phrase"),
    [
        (lambda share: NAN if share > 0.5 else 0.2, "bad", "(49.6%), and at the end"),
        (lambda share: NAN if share > 0.99 else 0.2, "bad", "and at the end"),
        (lambda share: NAN if 0.3 < share < 0.4 else 0.2, "bad", "non-finite in 23 intervals"),
        (lambda share: NAN if 0.3 < share < 0.32 else 0.2, "warning", "non-finite in 4 intervals"),
    ],
)
def test_nonfinite_loss_at_the_end_or_often_is_bad(
    loss: Callable[[float], float], level: str, phrase: str
) -> None:
    job = SimulatedJob(loss=loss, nodes=1)
    found = verdicts(job)["loss"]
    assert found.level == level
    assert phrase in found.sentence
    at_end = "at the end" in phrase
    assert ("non-finite at the end" in found.evidence[0]) == at_end
    figures = review_job(facts(job)).figures
    assert (figures.loss is None) == at_end


@pytest.mark.parametrize(
    ("shares", "level", "answer"),
    [
        ({0: 0.006, 1: 0.35}, "bad", "yes: 0.5% of the time was spent waiting for batches, 35.0%"),
        ({0: 0.006, 1: 0.06}, "warning", "partly: "),
        ({0: 0.006, 1: 0.007}, "good", "no: "),
    ],
)
def test_worst_node_decides_whether_data_is_the_bottleneck(
    shares: dict[int, float], level: str, answer: str
) -> None:
    field = '"data_wait_share_max": '
    lines = [
        (None, text.replace(f"{field}0.006", f"{field}{shares[node]}"))
        for _, text in SimulatedJob().lines()
        for node in [1 if '"node": 1' in text else 0]
    ]
    found = verdicts(SimulatedJob(), log=parse_lines(lines))["data"]
    assert found.level == level
    assert found.sentence.startswith(answer)


def test_outcome_of_a_failed_job_is_its_diagnosis() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 is full"
    found = verdicts(
        SimulatedJob(),
        diagnosis=diagnosed([], [f"[rank11]: {oom}"]),
        outcome=JobOutcome("Failed", "Failed", "AlgorithmError: ExitCode 1", None),
    )["end"]
    assert (found.level, found.sentence) == ("bad", "it failed: The GPU ran out of memory")
    assert found.evidence[0] == f"first failure (algo-2, rank 11): {oom}"
    assert found.evidence[1] == "SageMaker reports: AlgorithmError: ExitCode 1"
    assert (found.fix or "").startswith("Lower per_device_batch_size")


def straggler(rank: int | None, node: int, ratio: float = 1.4) -> dict[str, Any]:
    return {"rank": rank, "node": node, "busy_seconds": 0.31 * ratio, "ratio": ratio}


@pytest.mark.parametrize(
    ("job", "level", "name"),
    [
        (SimulatedJob(node={"stragglers": [straggler(11, 1)]}), "bad", "rank 11 on node 1"),
        (SimulatedJob(node={"stragglers": [straggler(None, 1)]}), "bad", "node 1 computes 1.40"),
        (SimulatedJob(node={"stragglers": [straggler(3, 0, 1.15)]}), "warning", "rank 3 on node 0"),
        (
            SimulatedJob(rank=lambda rank: {"data_wait_share": 0.3} if rank == 11 else {}),
            "warning",
            "rank 11 on node 1 waits 30%",
        ),
    ],
)
def test_straggler_is_named(job: SimulatedJob, level: str, name: str) -> None:
    found = verdicts(job)["stragglers"]
    assert found.level == level
    assert name in found.sentence


def test_brief_straggler_is_no_problem() -> None:
    """A rank that was slow in one of hundreds of comparisons."""
    lines = SimulatedJob().lines()
    index = next(i for i, (_, text) in enumerate(lines) if '"stragglers": []' in text)
    named = lines[index][1].replace(
        '"stragglers": []', f'"stragglers": [{json.dumps(straggler(5, 0))}]'
    )
    lines[index] = (None, named)
    found = verdicts(SimulatedJob(), log=parse_lines(lines))["stragglers"]
    assert found.level == "good"


@pytest.mark.parametrize("stragglers", [None, ...])
def test_stragglers_are_unknown_without_busy_times(stragglers: Any) -> None:
    """Whole steps are equally long on all ranks: they show no straggler."""
    lines = [
        (
            node,
            text.replace(
                '"stragglers": []', '"stragglers": null' if stragglers is None else '"x": 1'
            ),
        )
        for node, text in SimulatedJob(rank=lambda rank: {"p50": 0.9} if rank == 3 else {}).lines()
    ]
    found = verdicts(SimulatedJob(), log=parse_lines(lines))["stragglers"]
    assert (found.level, found.sentence) == (
        "unknown",
        "the ranks' times outside collectives were not measured",
    )


def test_throttled_gpu_is_named() -> None:
    job = SimulatedJob(clock=lambda node, gpu: 900.0 if (node, gpu) == (1, 6) else 1410.0)
    found = verdicts(job)["stragglers"]
    assert found.level == "warning"
    assert "GPU 6 of node 1 runs at 900 MHz" in found.sentence


NEEDED = 2 * 15 / 16 * 4 * 800_000_000
"""Bytes that a node receives per step: all-reduce of the gradients in fp32 on 16 ranks."""


@pytest.mark.parametrize(
    ("job", "level", "phrase"),
    [
        (SimulatedJob(), "good", "EFA with GPUDirect RDMA"),
        # Half the speed, all of the time in collectives.
        (
            SimulatedJob(speed=lambda share: 0.9, efa_rate=0.9 * NEEDED),
            "bad",
            "of each step for the 6 GB that the model",
        ),
        # As slow, but the ranks compute all the time.
        (
            SimulatedJob(
                speed=lambda share: 0.9,
                efa_rate=0.9 * NEEDED,
                rank=lambda rank: {"busy_seconds": 1.0},
            ),
            "good",
            "EFA",
        ),
        (SimulatedJob(efa_rate=0.1 * 1.8 * NEEDED), "warning", "the rest takes another interface"),
        (SimulatedJob(efa_rate=4 * 1.8 * NEEDED), "warning", "packets are sent again"),
    ],
)
def test_traffic_is_compared_with_what_the_model_needs(
    job: SimulatedJob, level: str, phrase: str
) -> None:
    found = verdicts(replace(job, other_lines=EFA))["network"]
    assert (found.level, phrase in found.sentence) == (level, True), found
    assert "the model's collectives need 6 GB" in found.evidence[-1]


def test_gradients_in_bf16_need_half_the_traffic() -> None:
    job = SimulatedJob(
        reduce_dtype="bf16",
        efa_rate=0.5 * 1.8 * NEEDED,
        rank=lambda rank: {"busy_seconds": 0.55},
        other_lines=EFA,
    )
    found = verdicts(job)["network"]
    assert found.level == "good"
    assert "the model's collectives need 3 GB" in found.evidence[-1]


def test_gpu_memory_errors_suggest_other_instances() -> None:
    found = verdicts(SimulatedJob(node={"gpu_ecc_uncorrected": 2}))["health"]
    assert found.level == "bad"
    assert "resume" in (found.fix or "")


@pytest.mark.parametrize(
    ("other_lines", "level", "phrase"),
    [
        ((), "unknown", "no NCCL messages"),
        (EFA, "good", "GPUDirect RDMA"),
        ((SOCKETS,), "bad", "sockets: EFA is not used"),
        ((*EFA, SOCKETS), "bad", "algo-2: sockets: EFA is not used"),
        ((PROVIDER, CHANNEL), "warning", "EFA, GPUDirect RDMA on 0 of 1 channels"),
        ((*EFA[:1], ("algo-1", f"{INFO} Using network Libfabric")), "unknown", "RDMA unknown"),
        (INFINIBAND[:16], "good", "InfiniBand with GPUDirect RDMA"),
        (
            (NO_MODULE, *INFINIBAND),
            "warning",
            "algo-2: InfiniBand, GPUDirect RDMA on 1 of 16 channels: traffic passes through host "
            "memory; NCCL: Disabled for HCA 0 'mlx5_0' (no module)",
        ),
    ],
)
def test_network_transport(
    other_lines: tuple[tuple[str, str], ...], level: str, phrase: str
) -> None:
    found = verdicts(SimulatedJob(other_lines=other_lines))["network"]
    assert (found.level, phrase in found.sentence) == (level, True)


def test_sockets_are_good_without_efa_and_on_a_single_node() -> None:
    without_efa = verdicts(
        SimulatedJob(other_lines=(SOCKETS,)), instance_type=instance_type("ml.g5.2xlarge")
    )
    assert without_efa["network"].level == "good"
    assert verdicts(SimulatedJob(nodes=1, other_lines=(SOCKETS,)))["network"].level == "good"


def test_doctor_verdict_is_shown() -> None:
    result = line(
        "doctor",
        60,
        level="fail",
        sentence="network at 12% of expected: 5.9 × slower",
        slowdown=5.9,
        findings=["transport-sockets"],
        seconds=80,
        parts={"all-reduce": [4.0e9, 3.6e10, "B/s"]},
    )
    warning = line(
        "warning", 60, code="doctor-transport-sockets", message="NCCL uses sockets; fix the image"
    )
    found = verdicts(SimulatedJob(extra_events=(result, warning)))["doctor"]
    assert found.level == "bad"
    assert found.sentence == "network at 12% of expected: 5.9 × slower"
    assert found.evidence == (
        "all-reduce: 4 GB/s of 36 GB/s expected",
        "NCCL uses sockets; fix the image",
    )
    assert "doctor" not in verdicts(SimulatedJob())


# Loss


@pytest.mark.parametrize(
    ("job", "phrase"),
    [
        (SimulatedJob(loss=lambda share: 0.1 + 0.2 * abs(share - 0.5)), "rises again"),
        (
            SimulatedJob(loss=lambda share: 3.0 if 0.7 < share < 0.705 else 0.1),
            "1 spikes, at step 1",
        ),
        (SimulatedJob(gradient=lambda share: 1.0 + 20 * share**3), "the gradient norm grew"),
        (SimulatedJob(loss=lambda share: math.nan if share > 0.9 else 0.1), "non-finite in"),
    ],
)
def test_unhealthy_loss(job: SimulatedJob, phrase: str) -> None:
    found = verdicts(job)["loss"]
    assert found.level in ("warning", "bad")
    assert phrase in found.sentence


def test_rollbacks_are_reported() -> None:
    rollback = line("warning", 900, code="rolled-back", message="back to 100", step=100)
    found = verdicts(SimulatedJob(extra_events=(rollback,)))["loss"]
    assert found.level == "bad"
    assert "rolled back to a checkpoint" in found.sentence


def test_remaining_warnings_are_counted() -> None:
    bad = [line("warning", 60 * n, code="bad-sample", message=f"no {n}") for n in range(30)]
    found = verdicts(SimulatedJob(extra_events=tuple(bad)))["warnings"]
    assert (found.level, found.sentence) == ("warning", "bad-sample (30 ×)")
    assert found.evidence == ("bad-sample: no 0",)


# Parsing


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_order_of_lines_does_not_matter(data: Any) -> None:
    """CloudWatch returns the streams of several nodes one after another."""
    job = SimulatedJob(intervals=6, extra_events=(line("warning", 3, code="x", message="y"),))
    lines = job.lines()
    shuffled = data.draw(st.permutations(lines))
    first, second = parse_lines(lines), parse_lines(shuffled)
    for name, column in first.steps.items():
        np.testing.assert_array_equal(column, second.steps[name])
    assert first.nodes.keys() == second.nodes.keys()
    assert first.warnings == second.warnings
    assert first.span == second.span


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=60) | st.just('SMT {"kind": "step"'), max_size=20))
def test_other_text_is_skipped(noise: list[str]) -> None:
    lines = SimulatedJob(intervals=3).lines()
    log = parse_lines([*((None, line) for line in noise), *lines])
    assert len(log.steps["time"]) == 3


def test_unknown_values_are_nan_instead_of_zero() -> None:
    job = SimulatedJob(mfu=None)
    known = facts(job)
    assert np.isnan(known.log.steps["mfu"]).all()
    assert replace(known, billed=False).usd(10) is not None
