"""A run's life on SageMaker with a controlled clock, drawn by a seed.

The platform is emulated as its API reference describes it: phases and waits, capacity, reclaimed
spot instances, restarts within a job, stops that take time for a checkpoint, and a name that can be
used once. What is decided, built and counted is the product's: ``next_action`` on ``stage_state``,
``with_attempt`` on the request of ``prepare``, ``counted_usd``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.spent import counted_usd
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.live_state import Progress
from sm_train.toolkit.records.stage_state import StageState, stage_state
from sm_train.toolkit.records.training_job import SAGEMAKER, STOPPED_TAG, TrainingJob
from sm_train.toolkit.runs.remediation import (
    Action,
    Cause,
    Finish,
    Policy,
    StartJob,
    StopJob,
    next_action,
)
from sm_train.toolkit.submit.run_bundle import bundle_of
from sm_train.toolkit.submit.start_job import with_attempt
from sm_train.toolkit.submit.submission import prepare

from tests.support.run_documents import config, stage

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
STAGE, STALL_AFTER = "256px", 900.0
SAVE_SECONDS = 120.0
"""SageMaker kills a stopped job after this time (API reference, StopTrainingJob)."""

INSTANCES = 4
MOST_POLLS = 3000

OUTCOMES = {
    "internal": "InternalServerError: We encountered an internal error.",
    "hardware": "AlgorithmError: Xid 79",
    "program": "AlgorithmError: KeyError",
    "restart": "",  # SageMaker replaces an instance and restarts the same job
    "stall": "",
}
"""How a training phase may be disturbed → the reason of the job's failure, if it fails."""


@cache
def submitted(capacity: str) -> Any:
    """Return the request of the stage's first job, as ``submit`` builds it."""
    cluster: dict[str, Any] = {"instance_type": "ml.p4de.24xlarge", "capacity": capacity}
    if capacity == "training-plan":
        plan = "arn:aws:sagemaker:us-east-1:111122223333:training-plan/p4de"
        cluster |= {"instance_type": "ml.p5.48xlarge", "training_plan": plan}
    run = config(stages=[stage(STAGE, instances=INSTANCES)], cluster=cluster)
    bundle = bundle_of(run, Path())
    return prepare(run, STAGE, bundle, "us-east-1", BEGIN).requests[0]


@dataclass
class Job:
    """A job as the platform knows it. ``phases`` are statuses with their begin, in seconds."""

    request: Any
    phases: list[tuple[str, float]]
    step: int
    first_step: int = 0
    status: str = "InProgress"
    reason: str = ""
    started: float | None = None
    ended: float | None = None
    stopping_at: float | None = None
    stopped_for: str | None = None
    moves: list[tuple[float, str, str]] = field(default_factory=list)
    """What happens to it: the time, a secondary status, and how it ends if it does."""
    silent_since: float | None = None
    last_sign: float | None = None


@dataclass
class Draw:
    """What a life consists of. Times are in seconds, ``speed`` in steps per second."""

    seed: int
    capacity: str
    max_steps: int
    speed: float
    checkpoint_every: int
    upload_lag: float
    hours_to_disturbance: float
    budget_share: float | None
    max_attempts: int
    backoff: float
    polls: tuple[float, ...]
    sleeps: bool
    clock_error: float
    log_interval: float

    @classmethod
    def of(cls, seed: int) -> Draw:
        draw = random.Random(seed)
        speed = draw.uniform(0.5, 4.0)
        hours = draw.choice((2.0, 8.0, 24.0))
        return cls(
            seed=seed,
            capacity=draw.choices(("on-demand", "spot", "training-plan"), (5, 3, 2))[0],
            max_steps=int(hours * 3600 * speed),
            speed=speed,
            checkpoint_every=max(1, int(speed * draw.choice((300, 900, 3600)))),
            upload_lag=draw.uniform(5, 200),
            hours_to_disturbance=draw.choice((1.0, 6.0, 1e9)),
            budget_share=draw.choice((None, 0.4, 0.9, 1.2, 3.0)),
            max_attempts=draw.randint(1, 5),
            backoff=draw.choice((60.0, 600.0)),
            polls=tuple(draw.choice((300.0, 900.0, 1800.0)) for _ in range(draw.choice((1, 1, 2)))),
            sleeps=draw.random() < 0.3,
            clock_error=draw.uniform(-SAGEMAKER.log_delay, SAGEMAKER.log_delay),
            log_interval=draw.choice((10.0, 300.0, STALL_AFTER - 10)),
        )

    @property
    def is_calm(self) -> bool:
        """Whether nothing disturbs the run."""
        return self.hours_to_disturbance > 1e6

    @property
    def planned_seconds(self) -> float:
        return 1500.0 + self.max_steps / self.speed


class Life:
    """One life; ``play`` returns the script of what happened, or fails with it."""

    def __init__(self, seed: int, *, hangs_at_start: bool = False) -> None:
        self.draw, self._hangs_at_start = Draw.of(seed), hangs_at_start
        self._rng = random.Random(f"life {seed}")
        self.plan_ends = 1e12
        """When the reservation of a training plan ends."""
        if self.is_prepaid and not self.draw.is_calm:
            self.plan_ends = self._rng.uniform(0.2, 3.0) * self.draw.planned_seconds
        self.now = 0.0
        self.jobs: dict[str, Job] = {}
        self.stored: int | None = None
        self.final = False
        self._pending: list[tuple[float, int]] = []  # uploads that end at a time
        self.observed = 0
        """The newest step that the product has called stored."""
        self.script: list[str] = []
        self.longest_gap = 0.0
        planned = self.draw.planned_seconds * self.rate
        share = self.draw.budget_share
        self.policy = Policy(
            self.draw.max_attempts,
            timedelta(seconds=self.draw.backoff),
            budget_usd=None if share is None or self.is_prepaid else share * planned,
        )

    @property
    def is_prepaid(self) -> bool:
        return self.draw.capacity == "training-plan"

    @cached_property
    def rate(self) -> float:
        """Dollars of a second in which a job has its instances; of spot, the most they can be.

        A training plan is paid before: its hours cost nothing more.
        """
        if self.is_prepaid:
            return 0.0
        job = Job(submitted(self.draw.capacity), [("Starting", 0.0)], 0)
        price = self._job_view("none", job).price(price_table())
        known = price.usd_per_instance_hour
        usd = price.most if known is None else known
        assert usd is not None
        return float(usd) * INSTANCES / 3600

    # ------------------------------------------------------------------ the platform

    def _start(self, request: Any, step: int) -> None:
        name = request["TrainingJobName"]
        wait = self._rng.uniform(60, 900)
        job = Job(request, [("Starting", self.now)], step, first_step=step)
        if self.now >= self.plan_ends:
            job.moves = [(self.now + wait, "Failed", "CapacityError: the plan has ended.")]
        elif not self.draw.is_calm and self._rng.random() < 0.1:
            reason = "CapacityError: Unable to provision requested ML compute capacity."
            job.moves = [(self.now + wait, "Failed", reason)]
        else:
            at = self.now + wait
            job.moves = [(at, "Downloading", ""), (at + self._rng.uniform(60, 300), "Training", "")]
        self.jobs[name] = job

    def _train(self, job: Job) -> None:
        """Begin to train from the newest stored checkpoint, until the end or a disturbance."""
        job.step, job.last_sign = self.stored or 0, self.now  # its start is logged
        if self._hangs_at_start:
            job.last_sign, job.silent_since, job.moves = None, self.now, []
            return
        left = (self.draw.max_steps - job.step) / self.draw.speed
        done, upload = self.now + left, self.draw.upload_lag
        if not self.draw.is_calm and self._rng.random() < 0.1:
            upload = self._rng.uniform(3600, 30 * 3600)  # sagemaker-python-sdk#3062
        job.moves = [(done, "Uploading", ""), (done + upload, "Completed", "")]
        at = self.now + self._rng.expovariate(1 / (3600 * self.draw.hours_to_disturbance))
        if self.plan_ends < min(at, job.moves[0][0]):
            job.moves = [
                (max(self.now, self.plan_ends), "Failed", "CapacityError: the plan ended.")
            ]
            return
        if self.draw.is_calm or at > job.moves[0][0]:
            return
        kind = self._rng.choices(tuple(OUTCOMES), (2, 3, 0.3, 3, 2))[0]
        if self.draw.capacity != "on-demand" and self._rng.random() < 0.5:
            kind = "restart"  # reclaimed, or between two periods of a training plan
        if kind == "restart":
            again = at + self._rng.uniform(120, 7200)
            job.moves = [
                (at, "Interrupted", ""),
                (at + 1, "Pending", ""),
                (again, "Starting", ""),
                (again + self._rng.uniform(60, 600), "Training", ""),
            ]
        else:
            job.moves = [(at, "silent" if kind == "stall" else "Failed", OUTCOMES[kind])]

    def _train_until(self, job: Job, until: float) -> None:
        """Take steps, save and upload checkpoints until a time."""
        if job.silent_since is not None or job.phases[-1][0] != "Training":
            return
        since = job.phases[-1][1] if job.last_sign is None else job.last_sign
        step = min(self.draw.max_steps, job.step + int((until - since) * self.draw.speed))
        if step == job.step:
            return
        every = self.draw.checkpoint_every
        for saved in range((job.step // every + 1) * every, step + 1, every):
            at = since + (saved - job.step) / self.draw.speed
            self._pending.append((at + self.draw.upload_lag, saved))
        job.last_sign = since + (step - job.step) / self.draw.speed
        job.step = step

    def _uploads_until(self, until: float) -> None:
        for entry in sorted(each for each in self._pending if each[0] <= until):
            self._pending.remove(entry)
            self.stored = max(self.stored or 0, entry[1])

    def advance(self, until: float) -> None:
        """Advance the state of the platform to a time."""
        while True:
            live = {name: job for name, job in self.jobs.items() if job.ended is None}
            due = min(
                ((job.moves[0][0], name) for name, job in live.items() if job.moves), default=None
            )
            moment = until if due is None else min(due[0], until)
            for job in live.values():
                self._train_until(job, moment)
            self._uploads_until(moment)
            self.now = moment
            if due is None or due[0] > until:
                return
            self._move(due[1], live[due[1]])

    def _move(self, name: str, job: Job) -> None:
        _, status, reason = job.moves.pop(0)
        if status == "silent":
            job.silent_since = self.now
            self._note(f"{name} falls silent")
            return
        if status in ("Completed", "Failed", "Stopped"):
            job.status, job.reason, job.ended = status, reason, self.now
            job.phases.append((status, self.now))
            self._pending.clear()  # uploads end with the job; what it saved at its end is stored
            if status == "Completed":
                self.stored, self.final = self.draw.max_steps, True
            self._note(f"{name} is {status} {reason}")
            return
        job.phases.append((status, self.now))
        if status == "Downloading" and job.started is None:
            job.started = self.now
        if status == "Training":
            self._train(job)
        self._note(f"{name}: {status}")

    def _stop(self, name: str, cause: str) -> None:
        job = self.jobs[name]
        if job.ended is not None or job.stopping_at is not None:
            return
        job.stopped_for, job.stopping_at, job.status = cause, self.now, "Stopping"
        trained = job.phases[-1][0] == "Training" and job.silent_since is None
        job.phases.append(("Stopping", self.now))
        if trained:  # the checkpoint of a stop
            self._pending.append((self.now + SAVE_SECONDS / 2, job.step))
        job.moves = [(self.now + SAVE_SECONDS, "Stopped", "")]

    # ------------------------------------------------------------------ what the product sees

    def _time(self, seconds: float) -> datetime:
        return BEGIN + timedelta(seconds=seconds)

    def _job_view(self, name: str, job: Job) -> TrainingJob:
        """Return the job as DescribeTrainingJob and its tags have it."""
        request = job.request
        description = {
            "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:111122223333:training-job/{name}",
            "SecondaryStatus": job.phases[-1][0],
            "SecondaryStatusTransitions": [
                {"Status": status, "StartTime": self._time(at)} for status, at in job.phases
            ],
            "CreationTime": self._time(job.phases[0][1]),
            "ResourceConfig": request["ResourceConfig"],
            "StoppingCondition": request["StoppingCondition"],
            "CheckpointConfig": request["CheckpointConfig"],
            "EnableManagedSpotTraining": request.get("EnableManagedSpotTraining", False),
            "FailureReason": job.reason,
        }
        if job.started is not None:
            description["TrainingStartTime"] = self._time(job.started)
        if job.ended is not None:
            description["TrainingEndTime"] = self._time(job.ended)
        tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
        if job.stopped_for is not None:
            tags[STOPPED_TAG] = job.stopped_for
        return TrainingJob.of(name, "demo", STAGE, job.status, tags, description)

    def views(self) -> list[TrainingJob]:
        return [self._job_view(name, job) for name, job in self.jobs.items()]

    def state(self) -> StageState:
        newest = list(self.jobs.values())[-1] if self.jobs else None
        sign = newest.last_sign if newest is not None else None
        if newest is not None and sign is not None:  # the newest line that is due by now
            begin = newest.phases[-1][1] if newest.phases[-1][0] == "Training" else sign
            sign -= (sign - min(begin, sign)) % self.draw.log_interval
        progress = Progress(
            step=newest.step if newest else None,
            steps_per_second=self.draw.speed,
            last_activity=None
            if newest is None or sign is None
            else self._time(sign + self.draw.clock_error).timestamp(),
        )
        stored = StoredCheckpoint(self.stored, (), final=self.final, platform="sagemaker")
        return stage_state(
            STAGE,
            self.draw.max_steps,
            self.views(),
            stored,
            progress,
            now=self._time(self.now),
            stall_after=STALL_AFTER,
        )

    def billed(self) -> float:
        """Return what the platform bills: the seconds in which jobs have instances."""
        waits = ("Starting", "Pending", "Interrupted", "Completed", "Failed", "Stopped")
        seconds = 0.0
        for job in self.jobs.values():
            ends = [at for _, at in job.phases[1:]] + [self.now if job.ended is None else job.ended]
            for (status, at), end in zip(job.phases, ends, strict=True):
                if status not in waits and job.started is not None:
                    seconds += max(0.0, end - max(at, job.started))
        return seconds * self.rate

    # ------------------------------------------------------------------ watchers

    def decide(self) -> tuple[StageState, Action]:
        state = self.state()
        spent = counted_usd(state.jobs, price_table(), self._time(self.now))
        assert abs(spent - self.billed()) < 0.01 * INSTANCES, (
            f"counted ${spent:.2f}, billed ${self.billed():.2f}"
        )
        action = next_action(
            (state,), self.policy, _cause_of, spent_usd=spent, now=self._time(self.now)
        )
        return state, action

    def action_after(self, secondary: str) -> StartJob:
        """Return what follows a first job that SageMaker stopped with a secondary status."""
        self._start(submitted(self.draw.capacity), 0)
        [job] = self.jobs.values()
        job.status, job.started, job.ended = "Stopped", 600.0, 3600.0
        job.phases += [("Training", 600.0), (secondary, 3600.0)]
        self.now = 86_400.0
        _, action = self.decide()
        assert isinstance(action, StartJob), action
        return action

    def act(self, state: StageState, action: Action) -> None:
        """Do what was decided on the state as it was read, a moment ago."""
        if isinstance(action, StartJob):
            request = with_attempt(submitted(self.draw.capacity), "demo", action)
            assert self.observed <= action.from_step <= (self.stored or 0), (
                f"resumes from {action.from_step}: {self.stored} is stored, and {self.observed} "
                "was called stored"
            )
            if request["TrainingJobName"] in self.jobs:
                self._note("the name is taken: another watcher was first")
                return
            assert self._fruitless() < self.policy.max_attempts, "one attempt too many"
            self._start(request, action.from_step)
            self._note(f"starts {request['TrainingJobName']} from step {action.from_step}")
        elif isinstance(action, StopJob):
            if action.cause == "budget" and self.policy.budget_usd is not None:
                assert self.billed() >= self.policy.budget_usd - 0.01, "stopped before its budget"
            if action.cause == "stall":
                assert self.jobs[action.job.name].silent_since is not None, "it was not silent"
            self._note(f"stops {action.job.name} for {action.cause}: {action.message}")
            assert not self._goes_as_planned(action), "an accepted run was stopped"
            assert not self._is_uploading(action.job.name), "its results are lost"
            self._stop(action.job.name, action.cause)
        self.observed = max(self.observed, state.stored.step or 0)

    def _is_uploading(self, name: str) -> bool:
        return self.jobs[name].phases[-1][0] == "Uploading"

    def _fruitless(self) -> int:
        """Return how many of the newest jobs in a row left no checkpoint newer than their first."""
        jobs = reversed(self.jobs.values())
        return sum(1 for _ in takewhile(lambda job: job.first_step >= (self.stored or 0), jobs))

    def _goes_as_planned(self, action: StopJob) -> bool:
        share = self.draw.budget_share
        return self.draw.is_calm and (share is None or share > 1 or action.cause != "budget")

    def play(self) -> Finish | None:
        """Play until a watcher finishes, or the budget stopped the run."""
        self._start(submitted(self.draw.capacity), 0)
        times = [(pause, number) for number, pause in enumerate(self.draw.polls)]
        was_live, last_poll = True, 0.0
        for _ in range(MOST_POLLS):
            at, number = min(times)
            times.remove((at, number))
            self.advance(at)
            if self._rng.random() < 0.03:
                self._note("AWS does not answer a watcher")
                times.append((self.now + self.draw.polls[number], number))
                continue
            if was_live:
                self.longest_gap = max(self.longest_gap, self.now - last_poll)
            last_poll = self.now
            state, action = self.decide()
            other = self.decide() if len(self.draw.polls) > 1 and self._rng.random() < 0.2 else None
            self.act(state, action)
            if other is not None:  # both have read before either has acted
                self.act(*other)
            self._check()
            was_live = any(job.ended is None for job in self.jobs.values())
            if isinstance(action, Finish):
                return self._ended(action)
            pause = self.draw.polls[number]
            if self.draw.sleeps and self._rng.random() < 0.02:
                pause += self._rng.uniform(3600, 2 * 86400)
                self._note("a laptop sleeps")
            times.append((self.now + pause, number))
        self._check()
        return None

    def _check(self) -> None:
        live = [name for name, job in self.jobs.items() if job.ended is None]
        assert len(live) <= 1, f"two live jobs: {live}"
        patience = STALL_AFTER + 2 * SAGEMAKER.log_delay + self.draw.log_interval
        for name in live:
            since, stopping = self.jobs[name].silent_since, self.jobs[name].stopping_at
            if since is not None and stopping is None:
                most = patience + self.longest_gap + max(self.draw.polls)
                if self.jobs[name].last_sign is None:  # it may still prepare to train
                    limit = SAGEMAKER.phase("Training").limit
                    assert limit is not None
                    most += limit.total_seconds()
                assert self.now - since <= most, f"{name} is silent for {self.now - since:.0f} s"
        if self.policy.budget_usd is not None:
            most = self.policy.budget_usd + (self.longest_gap + SAVE_SECONDS + 1) * self.rate
            most += self._uploading_seconds() * self.rate  # which nobody stops
            assert self.billed() <= most, f"billed ${self.billed():.0f}, at most ${most:.0f}"

    def _uploading_seconds(self) -> float:
        return sum(
            (self.now if job.ended is None else job.ended) - begin
            for job in self.jobs.values()
            for phase, begin in job.phases
            if phase == "Uploading"
        )

    def _ended(self, action: Finish) -> Finish:
        self._note(f"ends with {action.exit_code.name}: {action.message}")
        live = [name for name, job in self.jobs.items() if job.ended is None]
        if action.exit_code.name == "STALLED":
            [name] = live
            assert self._is_uploading(name), "a live job is left"
            assert self.now - self.jobs[name].phases[-1][1] > 6 * 3600, "below its limit"
        else:
            assert not live, "a live job is left"
        if self.draw.is_calm and not (self.draw.budget_share or 9) < 1.0:
            assert action.exit_code == 0, action
            assert self.final
        return action

    def _note(self, text: str) -> None:
        self.script.append(f"{self.now:12.0f} s  {text}")


def _cause_of(job: TrainingJob) -> Cause:
    """Return what a diagnosis of the job's log would say."""
    reason = job.failure_reason
    if reason.startswith("CapacityError"):
        return Cause("capacity", f"got no instances ({reason})", retryable=True)
    return Cause("failure", reason, retryable="KeyError" not in reason)


def play(seeds: Sequence[int]) -> dict[str, int]:
    """Play lives; return how many ended how. A life that breaks a rule fails with its script."""
    ends: dict[str, int] = {}
    for seed in seeds:
        life = Life(seed)
        try:
            end = life.play()
        except AssertionError as error:
            script = "\n".join([f"{life.draw}", *life.script[-40:]])
            raise AssertionError(f"life {seed}: {error}\n{script}") from None
        name = "unfinished" if end is None else end.exit_code.name
        ends[name] = ends.get(name, 0) + 1
    return ends
