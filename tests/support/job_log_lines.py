"""The lines of a job as a review reads them, healthy unless a test says otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sm_train.cost.instances import instance_type
from sm_train.cost.timeline import timeline
from sm_train.entrypoints.common.events import FIELDS, format_event
from sm_train.toolkit.review.job_facts import JobFacts, JobOutcome, Money
from sm_train.toolkit.review.job_log import JobLog
from sm_train.toolkit.review.log_parser import parse_log
from sm_train.toolkit.review.model import Verdict
from sm_train.toolkit.review.verdicts import judge

BEGIN = 1_795_000_000.0


def line(kind: str, at: float, node: int = 0, **fields: Any) -> str:
    """An event ``at`` seconds after the job began; what is not given is unknown."""
    content = dict.fromkeys(FIELDS[kind]) | fields
    return format_event(kind, content, time=BEGIN + at, node=node, rank=8 * node)


Value = Callable[[float], float]
"""Of the share of the job that has passed, 0 to 1."""


@dataclass
class Life:
    """A job of ``intervals`` logging intervals of a minute, a line of each machine in each.

    ``noise`` is the standard deviation of speed and loss, of their value.
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
    waits: Value = lambda share: 0.005
    mfu: float | None = 0.35
    gpu: dict[str, float] = field(default_factory=dict)
    rank: Callable[[int], dict[str, float]] = lambda rank: {}
    clock: Callable[[int, int], float] = lambda node, gpu: 1410.0
    node: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    """Lines beside those."""
    says: tuple[tuple[str, str], ...] = ()
    """(machine, line) that are no events."""

    def lines(self) -> list[tuple[str | None, str]]:
        chance, found = random.Random(self.seed), [self._start()]
        step = 0
        for number in range(self.intervals):
            share, at = number / self.intervals, self.start_up + 60.0 * (number + 1)
            speed = self.speed(share) * chance.gauss(1, self.noise)
            step += round(60 * speed)
            found.append(
                line(
                    "step",
                    at,
                    step=step,
                    epoch=0,
                    learning_rate=1e-4,
                    mfu=self.mfu,
                    loss=self.loss(share) * chance.gauss(1, self.noise),
                    gradient_norm=self.gradient(share),
                    data_wait_share=self.waits(share),
                    steps_per_second=speed,
                    images_per_second=speed * 512,
                )
            )
            found += [self._node(node, at) for node in range(self.nodes)]
        end = self.start_up + 60.0 * self.intervals
        found.append(line("end", end + 5, step=step, reason="done"))
        return [*((None, one) for one in (*found, *self.others)), *self.says]

    def _start(self) -> str:
        return line(
            "start",
            self.start_up,
            run="demo",
            stage="256px",
            resolution=256,
            nodes=self.nodes,
            world_size=8 * self.nodes,
            effective_batch_size=512,
            max_steps=30_000,
            backend=self.backend,
            resumed_from_step=None,
            instance_type="ml.p4de.24xlarge",
        )

    def _node(self, node: int, at: float) -> str:
        ranks = [
            {
                "rank": 8 * node + one,
                "steps": 100,
                "p50": 0.55,
                "p90": 0.56,
                "p99": 0.6,
                "max": 0.7,
                "data_wait_share": 0.005,
                **self.rank(8 * node + one),
            }
            for one in range(8)
        ]
        gpus = [
            {"gpu": one, "utilization": 98.0, "sm_clock": self.clock(node, one)} for one in range(8)
        ]
        usual: dict[str, Any] = {
            "gpu_utilization_mean": 98.0,
            "gpu_temperature_max": 60.0,
            "gpu_ecc_uncorrected": 0,
            "efa_drops": 0,
            "data_wait_share_max": 0.006,
            "read_bytes_per_second": 2e8,
        }
        return line("node", at, node, **(usual | {"ranks": ranks, "gpus": gpus} | self.node))


def hear(lines: Iterable[tuple[str | None, str]]) -> JobLog:
    """What (machine, line) tell."""
    return parse_log((node, f"{text}\n".encode()) for node, text in lines)


def facts(life: Life, **changes: Any) -> JobFacts:
    """Of a job on SageMaker that was billed from its beginning to its last line."""
    told = hear(life.lines())
    end = BEGIN + life.start_up + 60.0 * life.intervals + 5
    known = {
        "name": "demo--256px-0001",
        "run": "demo",
        "stage": "256px",
        "begin": BEGIN,
        "end": end,
        "billed": True,
        "log": told,
        "line": timeline(told.progress(), BEGIN, end),
        "ending": JobOutcome("Completed", "Completed", "", None),
        "machine": instance_type("ml.p4de.24xlarge"),
        "instances": life.nodes,
        "metrics": {},
        "money": Money(100.0, None, "billed seconds"),
    }
    return JobFacts(**(known | changes))


def verdicts(life: Life, **changes: Any) -> dict[str, Verdict]:
    """Every answer by its code."""
    return {one.code: one for one in judge(facts(life, **changes))}
