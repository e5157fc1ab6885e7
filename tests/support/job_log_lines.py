"""The log lines of a simulated job for review tests, healthy unless a test changes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sm_train.cost.instances import instance_type
from sm_train.cost.timeline import timeline
from sm_train.entrypoints.job_interface.events import FIELDS, TEXTS, format_event
from sm_train.toolkit.analysis.review.job_facts import JobCost, JobFacts, JobOutcome
from sm_train.toolkit.analysis.review.job_log import JobLog
from sm_train.toolkit.analysis.review.log_parser import parse_log
from sm_train.toolkit.analysis.review.review_model import Verdict
from sm_train.toolkit.analysis.review.verdicts import judge

BEGIN = 1_795_000_000.0


_LISTS = {"findings", "gpus", "ranks"}


def event_values(kind: str) -> dict[str, Any]:
    """Return a value of the right type for each required field of an event."""
    values = {name: "1" if name in TEXTS else [] if name in _LISTS else 1 for name in FIELDS[kind]}
    return values | ({"precision": "bf16"} if kind == "start" else {})


def line(kind: str, at: float, node: int = 0, **fields: Any) -> str:
    """Return an event ``at`` seconds after the job began; all other fields are null."""
    content = dict.fromkeys(FIELDS[kind]) | fields
    return format_event(kind, content, time=BEGIN + at, node=node, rank=8 * node)


Value = Callable[[float], float]
"""A value by the share of the job that has passed, 0 to 1."""


@dataclass
class SimulatedJob:
    """A job of ``intervals`` one-minute logging intervals with a ``node`` event per node in each.

    ``noise`` is the relative standard deviation of speed and loss.
    """

    nodes: int = 2
    intervals: int = 240
    backend: str = "nccl"
    start_up: float = 120.0
    noise: float = 0.01
    seed: int = 0
    speed: Value = lambda share: 1.8
    loss: Value = lambda share: 0.1 + 0.2 / (1 + 30 * share)
    gradient: Value = lambda share: 1.0
    data_wait: Value = lambda share: 0.005
    mfu: float | None = 0.35
    rank: Callable[[int], dict[str, float]] = lambda rank: {}
    clock: Callable[[int, int], float] = lambda node, gpu: 1410.0
    node: dict[str, Any] = field(default_factory=dict)
    parameters: int = 800_000_000
    reduce_dtype: str = "fp32"
    efa_rate: float = 1.8 * 2 * 15 / 16 * 4 * 800_000_000
    """Bytes per second: steps per second × bus factor × bytes of the gradients."""
    extra_events: tuple[str, ...] = ()
    other_lines: tuple[tuple[str, str], ...] = ()
    """(node, line) of lines that are not events."""
    missing_steps: int = 0
    """Steps of the stage that it does not take, though it ends as planned."""

    def lines(self) -> list[tuple[str | None, str]]:
        rng, events = random.Random(self.seed), []
        self._saved: list[int] = []
        step = 0
        for number in range(self.intervals):
            share, at = number / self.intervals, self.start_up + 60.0 * (number + 1)
            speed = self.speed(share) * rng.gauss(1, self.noise)
            step += round(60 * speed)
            events.append(
                line(
                    "step",
                    at,
                    step=step,
                    epoch=0,
                    learning_rate=1e-4,
                    mfu=self.mfu,
                    loss=self.loss(share) * rng.gauss(1, self.noise),
                    gradient_norm=self.gradient(share),
                    data_wait_share=self.data_wait(share),
                    steps_per_second=speed,
                    images_per_second=speed * 512,
                )
            )
            events += [self._node(node, at) for node in range(self.nodes)]
            if number % 60 == 59:
                events.append(self._checkpoint(at, step))
        end = self.start_up + 60.0 * self.intervals
        events.append(line("end", end + 5, step=step, reason="done"))
        events.insert(0, self._start(step + self.missing_steps))
        return [*((None, event) for event in (*events, *self.extra_events)), *self.other_lines]

    def _checkpoint(self, at: float, step: int) -> str:
        """Return the event of a checkpoint, an hour after the one before, which is stored."""
        self._saved.append(step)
        stored = [None, *self._saved][-2]
        return line("checkpoint", at, step=step, path="p", bytes=1, seconds=0.1, stored_step=stored)

    def _start(self, max_steps: int) -> str:
        return line(
            "start",
            self.start_up,
            run="demo",
            stage="256px",
            resolution=256,
            nodes=self.nodes,
            world_size=8 * self.nodes,
            effective_batch_size=512,
            parameters=self.parameters,
            precision="bf16",
            reduce_dtype=self.reduce_dtype,
            sharding="none",
            gradient_accumulation_steps=1,
            max_steps=max_steps,
            backend=self.backend,
            resumed_from_step=None,
            instance_type="ml.p4de.24xlarge",
        )

    def _node(self, node: int, at: float) -> str:
        ranks = [
            {
                "rank": 8 * node + local_rank,
                "steps": 100,
                "p50": 0.55,
                "p90": 0.56,
                "p99": 0.6,
                "max": 0.7,
                "data_wait_share": 0.005,
                "busy_seconds": 0.31,
                "cpu_wait_seconds": 0.01,
                **self.rank(8 * node + local_rank),
            }
            for local_rank in range(8)
        ]
        gpus = [
            {"gpu": gpu, "utilization": 98.0, "sm_clock": self.clock(node, gpu)} for gpu in range(8)
        ]
        defaults: dict[str, Any] = {
            "gpu_utilization_mean": 98.0,
            "gpu_temperature_max": 60.0,
            "gpu_ecc_uncorrected": 0,
            "efa_drops": 0,
            "efa_receive_bytes_per_second": self.efa_rate,
            "data_wait_share_max": 0.006,
            "read_bytes_per_second": 2e8,
        }
        if node == 0:
            defaults["stragglers"] = []
        return line("node", at, node, **(defaults | {"ranks": ranks, "gpus": gpus} | self.node))


def parse_lines(lines: Iterable[tuple[str | None, str]]) -> JobLog:
    """Parse (node, line) pairs."""
    return parse_log((node, f"{text}\n".encode()) for node, text in lines)


def facts(job: SimulatedJob, **changes: Any) -> JobFacts:
    """Return the facts of a SageMaker job that was billed from its start to its last line."""
    log = parse_lines(job.lines())
    end = BEGIN + job.start_up + 60.0 * job.intervals + 5
    defaults = {
        "name": "demo--256px-0001",
        "run": "demo",
        "stage": "256px",
        "begin": BEGIN,
        "end": end,
        "billed": True,
        "log": log,
        "timeline": timeline(log.progress(), BEGIN, end),
        "outcome": JobOutcome("Completed", "Completed", "", None),
        "diagnosis": None,
        "instance_type": instance_type("ml.p4de.24xlarge"),
        "instances": job.nodes,
        "metrics": {},
        "cost": JobCost(100.0, None, "billed seconds"),
        "settings": {},
        "samples": (),
        "diagnose_command": "`sm-train diagnose demo--256px-0001`",
    }
    return JobFacts(**(defaults | changes))


def verdicts(job: SimulatedJob, **changes: Any) -> dict[str, Verdict]:
    """Return all verdicts by code."""
    return {verdict.code: verdict for verdict in judge(facts(job, **changes))}
