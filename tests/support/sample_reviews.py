"""Sample reviews: a healthy job, one with problems, and one with little data."""

from __future__ import annotations

import math
import random

from sm_train.toolkit.analysis.review.review_model import (
    Chart,
    Curve,
    Figures,
    JobReview,
    Mark,
    Review,
    StepProgress,
    Verdict,
)

DAY = 86400.0
BEGIN = 1_790_000_000.0
POINTS = 400


def three_jobs() -> Review:
    """Return two jobs on SageMaker, and one of which only the log was saved."""
    return Review((healthy(), stalled(), offline()), ("CloudWatch was not queried for local-try",))


def healthy(nodes: int = 16) -> JobReview:
    """Return a long job on many nodes, one of them slightly slower."""
    length = 5.2 * DAY
    rng = random.Random(1)
    times = _times(length)
    speed = [1.8 + rng.gauss(0, 0.01) for _ in times]
    return JobReview(
        "bria2-256px-20261101",
        "bria-2.0",
        "256px",
        BEGIN,
        length,
        Figures(
            status="Completed",
            backend="smddp",
            instance_type="ml.p4d.24xlarge",
            instances=nodes,
            world_size=8 * nodes,
            resolution=256,
            effective_batch_size=2048,
            first_step=0,
            last_step=780_000,
            max_steps=780_000,
            steps_per_second=1.802,
            images_per_second=3690.5,
            loss=0.1312,
            evaluation_loss=0.1365,
            mfu=0.204,
            gpu_utilization=0.983,
            data_wait_share=0.004,
            goodput=0.972,
            restarts=0,
            stalls=0,
            billable_seconds=length,
            billed_usd=41_020.0,
            estimate_usd=40_100.0,
            difference_usd=920.0,
            seconds={
                "start_up": 700,
                "restarts": 0,
                "lost_work": 0,
                "stalls": 0,
                "checkpoints": 6100,
                "evaluation": 3900,
                "data_wait": 1750,
                "shut_down": 90,
                "useful": length - 12_540,
            },
        ),
        (
            Verdict(
                "cost",
                "warning",
                "Did it cost what was estimated?",
                "It cost $41,020, which is $920 (2.3%) more than estimated.",
                ("1.80 it/s measured, 1.84 estimated", "5.20 days billed, 5.08 estimated"),
                "`sm-train cost run.yaml --measured bria2-256px-20261101` estimates from this job",
            ),
            Verdict(
                "time",
                "good",
                "Was the paid time well used?",
                "97.2% of the billed time trained.",
                ("GPU utilization 98.3% (786 of 800 on each node)", "MFU 20.4%"),
            ),
            Verdict(
                "data", "good", "Was data loading the bottleneck?", "Ranks waited 0.4% of the time."
            ),
            Verdict("stall", "good", "Did it stall?", "No stall."),
            Verdict(
                "stragglers",
                "good",
                "Were there stragglers?",
                "The slowest rank is 1.8% behind the median.",
                ("rank 57 on algo-8: 564 ms",),
            ),
            Verdict(
                "network",
                "good",
                "Which network transport was used between nodes?",
                "NCCL ran over EFA.",
                ("NET/OFI Selected Provider is efa (found 4 nics)",),
            ),
            Verdict("speed", "good", "Was the speed steady?", "It drifted by 0.1% in five days."),
            Verdict("loss", "good", "Is the loss healthy?", "It is still falling: 0.1312."),
        ),
        (
            Chart("speed", "Speed", "it/s", (_line("it/s", times, speed, 0.03),)),
            Chart(
                "loss",
                "Loss",
                "",
                (
                    _line("training", times, [_loss(time / length, rng) for time in times]),
                    Curve(
                        "evaluation",
                        times[20::20],
                        [_loss(time / length, rng) + 0.004 for time in times[20::20]],
                    ),
                ),
            ),
            Chart(
                "gpu",
                "GPU utilization",
                "share",
                tuple(
                    _line(
                        f"algo-{node + 1}",
                        times,
                        [0.97 + 0.016 * rng.random() - 0.06 * (node == 7) for _ in times],
                        0.015,
                    )
                    for node in range(nodes)
                ),
                1.0,
            ),
            Chart(
                "gpu-memory",
                "GPU memory",
                "%",
                tuple(
                    _line(f"algo-{node + 1}", times, [81 + rng.random() for _ in times], 0.5)
                    for node in range(nodes)
                ),
                100.0,
            ),
            Chart(
                "network",
                "Received over EFA",
                "GB/s",
                tuple(
                    _line(f"algo-{node + 1}", times, [21 + rng.gauss(0, 1) for _ in times], 3)
                    for node in range(nodes)
                ),
                50.0,
            ),
            Chart(
                "data",
                "Waiting for data",
                "share",
                (_line("wait", times, [0.004 + 0.002 * rng.random() for _ in times], 0.003),),
            ),
        ),
        (
            Mark("start", 650.0, 0, "16 nodes"),
            *(
                Mark("checkpoint", hour * 3600.0, 48, f"step {hour * 6480}")
                for hour in range(2, 124, 2)
            ),
            *(Mark("evaluation", day * DAY, 780, "") for day in range(1, 6)),
            Mark("end", length, 0, "done"),
        ),
        progress=_progress(length, 780_000),
        settings={
            "training.learning_rate": "0.0001",
            "stage.resolution": "256",
            "cluster.backend": "smddp",
        },
    )


def stalled() -> JobReview:
    """Return a job with slow data, a stall, an error with a restart, and gaps in its metrics."""
    length = 9.4 * 3600
    rng = random.Random(2)
    times = _times(length)
    stall = (3.1 * 3600, 3.75 * 3600)

    def is_stalled(seconds: float) -> bool:
        return stall[0] < seconds < stall[1]

    speed = [
        None if is_stalled(time) else 0.74 - 0.16 * time / length + rng.gauss(0, 0.03)
        for time in times
    ]
    waits = [
        None if is_stalled(time) else 0.38 + 0.12 * math.sin(time / 2500) + rng.gauss(0, 0.03)
        for time in times
    ]
    nodes = tuple(
        Curve(
            f"algo-{node + 1}",
            times,
            [
                0.02 if is_stalled(time) else 0.56 - 0.09 * node + rng.gauss(0, 0.04)
                for time in times
            ],
        )
        for node in range(4)
    )
    return JobReview(
        "bria2-512px-20261108",
        "bria-2.0",
        "512px",
        BEGIN + 7 * DAY,
        length,
        Figures(
            status="Failed",
            backend="nccl",
            instance_type="ml.p4d.24xlarge",
            instances=4,
            world_size=32,
            resolution=512,
            effective_batch_size=1024,
            first_step=0,
            last_step=17_200,
            max_steps=60_000,
            steps_per_second=0.661,
            images_per_second=677.0,
            loss=0.1471,
            mfu=0.082,
            gpu_utilization=0.421,
            data_wait_share=0.384,
            goodput=0.446,
            restarts=1,
            stalls=1,
            billable_seconds=length,
            billed_usd=1_232.2,
            estimate_usd=801.0,
            difference_usd=431.2,
            seconds={
                "start_up": 620,
                "restarts": 940,
                "lost_work": 1500,
                "stalls": 2340,
                "checkpoints": 610,
                "evaluation": 0,
                "data_wait": 12_710,
                "shut_down": 12,
                "useful": length - 18_732,
            },
        ),
        (
            Verdict(
                "stall",
                "bad",
                "Did it stall?",
                "It stalled for 39 min after 3.1 h ($85); algo-3 stopped first.",
                (
                    "algo-3 rank 21: blocked in read() of data/train/shard-000412.tar",
                    "the other 31 ranks: waiting in all_reduce",
                ),
                "set heartbeat.max_timeout to 5m, so that the job is killed and resumed",
            ),
            Verdict(
                "data",
                "bad",
                "Was data loading the bottleneck?",
                "Ranks waited 38% of their time for the next batch.",
                ("data_wait_share 0.384, median of 172 lines", "FastFile read 0.9 of 4 GB/s"),
                "pack at 512 px (sm-train pack --resize 512) or use FSx for Lustre",
            ),
            Verdict(
                "time",
                "bad",
                "Was the paid time well used?",
                "44.6% of the billed time trained.",
                ("GPU utilization 42.1%", "MFU 8.2%"),
                "fix data loading first: it costs $437 of $1,232",
            ),
            Verdict(
                "network",
                "warning",
                "Which network transport was used between nodes?",
                "NCCL ran over sockets.",
                ("algo-1: NCCL INFO NET/Socket : Using [0]eth0:10.0.1.7<0>",),
                "add a rule for itself to the security group, so that EFA works",
            ),
            Verdict(
                "speed",
                "warning",
                "Was the speed steady?",
                "It fell by 21%, from 0.74 to 0.58 it/s.",
                ("slope −1.7% an hour",),
                "find the node with the slowest reads",
            ),
            Verdict(
                "cost",
                "warning",
                "Did it cost what was estimated?",
                "It cost $1,232 so far, for 29% of its steps.",
                ("$801 were estimated for these steps",),
            ),
            Verdict("loss", "good", "Is the loss healthy?", "It is still falling: 0.1471."),
        ),
        (
            Chart("speed", "Speed", "it/s", (_line("it/s", times, speed, 0.05),)),
            Chart(
                "loss",
                "Loss",
                "",
                (
                    _line(
                        "training",
                        times,
                        [
                            None if is_stalled(time) else _loss(0.3 * time / length, rng)
                            for time in times
                        ],
                    ),
                ),
            ),
            Chart("gpu", "GPU utilization", "share", nodes, 1.0),
            Chart("data", "Waiting for data", "share", (_line("wait", times, waits, 0.14),)),
            Chart(
                "disk",
                "Read from FastFile",
                "GB/s",
                (
                    Curve(
                        "algo-1",
                        times[::40],
                        [0.9 if index % 2 else None for index in range(len(times[::40]))],
                    ),
                ),
            ),
        ),
        (
            Mark("start", 600.0, 0, "4 nodes"),
            *(Mark("checkpoint", hour * 3600.0, 60, "") for hour in (1, 2, 3, 5, 6, 7, 8, 9)),
            Mark("stall", stall[0], stall[1] - stall[0], "no step; algo-3 blocked in read()"),
            Mark("error", stall[1], 0, "WatchdogTimeout: collective 4711 <ALLREDUCE> timed out"),
            Mark("start", stall[1] + 900, 0, "resumed from step 5,400"),
        ),
        progress=_progress(length, 90_000),
        settings={
            "training.learning_rate": "5e-05",
            "stage.resolution": "512",
            "cluster.backend": "smddp",
        },
    )


def offline() -> JobReview:
    """Return a run with only a few log lines."""
    return JobReview(
        "local-try",
        None,
        None,
        BEGIN + 12 * DAY,
        840.0,
        Figures(steps_per_second=3.31, loss=0.402, first_step=0, last_step=2600),
        (
            Verdict(
                "time",
                "unknown",
                "Was the paid time well used?",
                "There are no GPU metrics.",
                (),
                "run it with sm-train submit --local, which logs them",
            ),
            Verdict("cost", "unknown", "Did it cost what was estimated?", "Nothing was billed."),
            Verdict("loss", "good", "Is the loss healthy?", "It is still falling: 0.402."),
        ),
        (
            Chart(
                "speed",
                "Speed",
                "it/s",
                (Curve("it/s", (60.0, 300.0, 540.0, 780.0), (3.2, 3.31, None, 3.35)),),
            ),
            Chart("gpu", "GPU utilization", "share", (Curve("gpu 0", (60.0,), (None,)),), 1.0),
        ),
        (),
    )


def _progress(length: float, last: int) -> StepProgress:
    times = _times(length)
    return StepProgress(times, [last * time / length for time in times])


def _times(length: float) -> list[float]:
    return [round(length * (index + 1) / POINTS, 1) for index in range(POINTS)]


def _line(
    label: str,
    times: list[float],
    values: list[float] | list[float | None],
    spread: float | None = None,
) -> Curve:
    if spread is None:
        return Curve(label, times, values)
    return Curve(
        label,
        times,
        values,
        [None if value is None else value - spread for value in values],
        [None if value is None else value + spread for value in values],
    )


def _loss(share: float, rng: random.Random) -> float:
    return 0.13 + 0.9 * math.exp(-9 * share) + rng.gauss(0, 0.004)
