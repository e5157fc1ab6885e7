"""A run's life on Kubernetes and on Slurm with controlled clocks, drawn by a seed.

The platform starts nodes, preempts and loses them, and starts jobs again by the restart rules in
the manifest of ``build_manifest``. Nodes write the records of ``node_recorder`` to a storage in
memory, which has its own clock, and stop on a request. The product decides, reads and counts:
``check_state`` of `watch`, ``alert_on_silence``, ``stop_at_budget`` and ``newest_listed``.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from sm_train.cost.prices import ON_DEMAND
from sm_train.entrypoints.clusters.node_record import (
    HEARTBEAT_SECONDS,
    MISSING_SECONDS,
    STOP_FILE,
    NodeRecord,
    StoredNode,
    read_nodes,
    read_stop_request,
)
from sm_train.entrypoints.clusters.watcher import (
    WatchedStage,
    alert_on_silence,
    node_hours,
    stop_at_budget,
)
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    newest_listed,
    step_folder_name,
)
from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    JOB_VARIABLE,
    STOPPED,
)
from sm_train.entrypoints.storage.lease_files import AgedFile
from sm_train.estimators.manifests.manifest import build_manifest
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.clusters.node_records.cluster_run import ClusterRun
from sm_train.toolkit.clusters.node_records.cluster_watch import check_state
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.spent import Projection, counted_usd
from sm_train.toolkit.records.live_state import LiveState, Progress
from sm_train.toolkit.records.stage_state import stage_state
from sm_train.toolkit.runs.remediation import Finish, NoAction, StopJob
from sm_train.toolkit.runs.run_state import RunState
from sm_train.toolkit.runs.watch.controller import WatchResult, once_exit_code
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.support.run_documents import config, stage

BEGIN = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
STAGE, STALL_AFTER = "256px", 900.0
SAVE_SECONDS = 90.0
"""A node has 120 s after SIGTERM, of which the last checkpoint may take 90."""

MOST_POLLS = 150

NOBODY = -1
"""The number of no watcher."""

DISTURBANCES = {"preempted": 3, "rank died": 3, "node lost": 3, "all lost": 1, "hangs": 1}
"""What may happen to an attempt while it trains, and how often."""


class Memory:
    """Files in memory, written at times of the storage's clock and read by a machine's own.

    The part of ``Storage`` that records and checkpoints use. ``ahead`` is how far the clock of the
    machine that reads is ahead of the storage's.
    """

    def __init__(
        self, files: dict[str, tuple[bytes, float]], now: Callable[[], float], ahead: float = 0.0
    ) -> None:
        self.files, self.now, self.ahead = files, now, ahead

    def seen_from(self, ahead: float) -> Memory:
        return Memory(self.files, self.now, ahead)

    def put(self, name: str, content: bytes, at: float) -> None:
        self.files[name] = (content, at)

    def read(self, name: str) -> bytes:
        return self.read_aged(name).content

    def read_aged(self, name: str) -> AgedFile:
        if name not in self.files:
            raise FileNotFoundError(name)
        content, modified = self.files[name]
        now = self.now()
        return AgedFile(content, str(modified), modified, now - modified, now + self.ahead)

    def list_sizes(self, folder: str) -> dict[str, int]:
        prefix = f"{folder}/" if folder else ""
        return {
            name.removeprefix(prefix): len(content)
            for name, (content, _) in self.files.items()
            if name.startswith(prefix)
        }

    @contextlib.contextmanager
    def atomic_writer(self, name: str) -> Iterator[Any]:
        content = bytearray()
        sink = type("Sink", (), {"write": lambda _, part: content.extend(part)})
        yield sink()
        self.put(name, bytes(content), self.now())

    def address(self, name: str) -> str:
        return f"memory/{name}"


@dataclass(frozen=True, kw_only=True)
class RunInMemory(ClusterRun):
    """A run whose storage is in memory."""

    memory: Memory | None = None

    def folder(self, stage: str) -> Any:
        assert stage == STAGE
        return self.memory

    @cached_property
    def _nodes(self) -> dict[str, list[StoredNode]]:
        return {STAGE: read_nodes(self.folder(STAGE), map)}


@dataclass(frozen=True)
class Platform:
    """What a manifest asks its platform to do with a job whose nodes have ended.

    ``most_restarts`` is the number of those that count: 0 if a failure ends the job.
    """

    name: str
    most_restarts: int
    uncounted: tuple[int, ...]
    requeues: bool
    is_alone: bool
    """Whether a second job of the run waits, or is refused, while one is live."""
    numbers_jobs: bool
    """Whether nodes know the number of their job, which it keeps when it starts again."""
    commands: Mapping[str, str]

    def starts_again(self, code: int | None, counted: int) -> bool:
        """Return whether a job starts again after a node ended.

        With None the platform itself ended it: it was preempted, or a node was lost.
        """
        if code is None:
            return self.requeues
        return code != 0 and (code in self.uncounted or counted < self.most_restarts)


@cache
def platform(name: str) -> Platform:
    """Read the platform's orders from the manifest as a user applies it."""
    run = run_config()
    target: Any = "trainjob" if name == "kubernetes" else "slurm"
    manifest = build_manifest(
        run, run.stages[0], target, bundle_of(run, Path()), region="us-east-1", file=None
    )
    if name == "slurm":
        options = set(re.findall(r"^#SBATCH --(\S+)", manifest.text, re.MULTILINE))
        # Slurm requeues a job that was preempted or lost a node, with --requeue; a program that
        # fails ends the job (sbatch's manual, --requeue), unless the script queues it again.
        alone = "dependency=singleton" in options
        again = (FAILED_AFTER_PROGRESS,) if "again=progress" in manifest.text else ()
        return Platform(name, 0, again, "requeue" in options, alone, True, manifest.commands)
    runtime = next(each for each in manifest.objects if each["kind"] == "TrainingRuntime")
    template = runtime["spec"]["template"]["spec"]
    [replicated] = template["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = [code for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())]
    most = template["failurePolicy"]["maxRestarts"]
    pods = [rule for rule in rules if "onPodConditions" in rule]
    job = next(each for each in manifest.objects if each["kind"] == "TrainJob")
    numbers = any(each["name"] == JOB_VARIABLE for each in job["spec"]["trainer"]["env"])
    return Platform(name, most, tuple(codes), bool(pods), True, numbers, manifest.commands)


@cache
def run_config(budget: float | None = None) -> Any:
    return config(
        stages=[stage(STAGE, instances=NODES)],
        heartbeat={"max_timeout": STALL_AFTER},
        kubernetes={"image": "registry.example/train:1"},
        slurm={"shared_folder": "/shared", "local_folder": "/local"},
        **({} if budget is None else {"budget": {"usd": budget}}),
    )


NODES = 3


@cache
def usd_per_second() -> float:
    """Return the price of a node."""
    price = price_table().price("ml.p4de.24xlarge", "us-east-1", ON_DEMAND)
    assert price.usd_per_instance_hour is not None
    return float(price.usd_per_instance_hour) / 3600


@dataclass
class Node:
    """A start of a node as it is. Times are by the storage's clock."""

    record: NodeRecord
    begin: float
    ahead: float
    """How far the node's clock is ahead."""
    end: float | None = None
    exit_code: int | None = None
    """None with an ``end``: it was lost."""
    stopped_by: str | None = None

    def last_beat(self, now: float) -> float:
        return self.begin + (now - self.begin) // HEARTBEAT_SECONDS * HEARTBEAT_SECONDS


@dataclass
class Attempt:
    """A start of the job. ``training`` is when its nodes train, ``disturbed`` when not any more."""

    nodes: list[Node]
    training: float
    step: int
    first_step: int
    disturbed: float
    disturbance: str | None
    spent_before: float
    stopping: float | None = None
    """When the nodes have received a request to stop."""

    @property
    def live(self) -> list[Node]:
        return [node for node in self.nodes if node.end is None]


@dataclass
class Draw:
    """What a life consists of; times are in seconds, ``speed`` in steps per second."""

    seed: int
    max_steps: int
    speed: float
    checkpoint_every: int
    upload_lag: float
    hours_to_disturbance: float
    budget_share: float | None
    polls: tuple[float, ...]
    sleeps: bool
    laptop_ahead: float
    nodes_ahead: tuple[float, ...]
    queue: float

    @classmethod
    def of(cls, seed: int) -> Draw:
        draw = random.Random(seed)
        speed, hours = draw.uniform(0.5, 4.0), draw.choice((1.0, 3.0, 9.0))
        clocks = (0.0, 0.0, 90.0, -200.0, 7200.0)
        return cls(
            seed=seed,
            max_steps=int(hours * 3600 * speed),
            speed=speed,
            checkpoint_every=max(1, int(speed * draw.choice((300, 900, 3600)))),
            upload_lag=draw.uniform(5, 200),
            hours_to_disturbance=draw.choice((0.7, 3.0, 1e9)),
            budget_share=draw.choice((None, 0.4, 0.9, 1.2, 3.0)),
            polls=tuple(
                draw.choice((600.0, 1800.0, 3600.0)) for _ in range(draw.choice((1, 1, 2)))
            ),
            sleeps=draw.random() < 0.3,
            laptop_ahead=draw.choice(clocks),
            nodes_ahead=tuple(draw.choice(clocks) for _ in range(NODES)),
            queue=draw.choice((30.0, 600.0, 7200.0)),
        )

    @property
    def is_calm(self) -> bool:
        """Whether nothing disturbs the run."""
        return self.hours_to_disturbance > 1e6

    @property
    def planned_usd(self) -> float:
        return (900.0 + self.max_steps / self.speed) * NODES * usd_per_second()


@dataclass
class Life:
    """One life; ``play`` returns how it ended, or fails."""

    on: Platform
    draw: Draw
    now: float = BEGIN
    attempts: list[Attempt] = field(default_factory=list)
    due: float | None = BEGIN
    """When the platform starts the job; None while it is live, or will not be started again."""
    observed: int = 0
    """The newest step that the product has called stored."""
    script: list[str] = field(default_factory=list)
    longest_gap: float = 0.0
    counted_restarts: int = 0
    complete: int = 0
    """The newest step whose files are all stored."""
    leaves: bool = False
    """Whether `watch` ends when it says that nothing more happens, and nobody starts it again."""
    next_beat: float | None = None
    """When nodes find a request to stop that has just been stored."""

    def __post_init__(self) -> None:
        self._rng = random.Random(f"life {self.draw.seed}")
        self.memory = Memory({}, lambda: self.now)
        share = self.draw.budget_share
        budget = None if share is None else round(share * self.draw.planned_usd, 2)
        self.budget = budget
        self._uploads: list[tuple[float, int]] = []
        self.run = RunInMemory(
            target="demo",
            root="memory",
            config=_with_steps(budget, self.draw.max_steps),
            region="us-east-1",
            stages=(STAGE,),
        )

    # ------------------------------------------------------------------ the platform

    def start(self) -> None:
        """Start the job: its nodes come one after the other, and restore the newest checkpoint."""
        assert not (self.attempts and self.attempts[-1].live), "two live jobs"
        nodes = [self._node(number, self.now + self._rng.uniform(0, 60)) for number in range(NODES)]
        training = max(node.begin for node in nodes) + self._rng.uniform(60, 600)
        sizes = self.memory.list_sizes("")
        step = newest_listed(sizes, lambda name: self.memory.read(f"{name}/{MARKER}")).step or 0
        assert step == self.complete, f"restores {step}, although {self.complete} is stored"
        assert step >= self.observed, f"restores {step}, although {self.observed} was called stored"
        until, kind = training + 1e9, None
        if not self.draw.is_calm:
            until = training + self._rng.expovariate(1 / (3600 * self.draw.hours_to_disturbance))
            kind = self._rng.choices(tuple(DISTURBANCES), tuple(DISTURBANCES.values()))[0]
        spent = self.billed()
        self.attempts.append(Attempt(nodes, training, step, step, until, kind, spent))
        self.due = None
        self._receive_stop(self.attempts[-1], nodes[0])  # of a job that waited in the queue
        self._note(f"the job starts from step {step}")

    def submit(self) -> None:
        """Let a user start the run's job once more, with the command of its manifest."""
        if not self.on.is_alone or (self.due is None and not self.attempts[-1].live):
            self.start()

    def preempt(self) -> None:
        """Let the platform preempt the job now."""
        self._disturb(self.attempts[-1], "preempted")

    def _node(self, number: int, begin: float) -> Node:
        ahead = self.draw.nodes_ahead[number]
        record = NodeRecord(
            run="demo",
            stage=STAGE,
            platform=self.on.name,
            node=f"algo-{number + 1}",
            nodes=NODES,
            instance_type="ml.p4de.24xlarge",
            host=f"host-{number}",
            machine=f"gpu-{number:02}",
            started=begin + ahead,
            seen=begin + ahead,
            commands=self.on.commands,
            job_id="1" if self.on.numbers_jobs else None,
        )
        return Node(record, begin, ahead)

    def advance(self, until: float) -> None:
        """Advance the state of the platform to a time, from event to event."""
        while (moment := self._next_event()) is not None and moment <= until:
            self._train_until(moment)
            self.now = max(self.now, moment)
            self._happens()
        self._train_until(until)
        self.now = until
        self._beat()

    def _next_event(self) -> float | None:
        own = self._next_of_job()
        return min((each for each in (own, self.next_beat) if each is not None), default=None)

    def _next_of_job(self) -> float | None:
        if self.due is not None:
            return self.due
        attempt = self.attempts[-1]
        if not attempt.live:
            return None
        if attempt.stopping is not None:
            return attempt.stopping + SAVE_SECONDS
        done = attempt.training + (self.draw.max_steps - attempt.first_step) / self.draw.speed
        return min(done + self.draw.upload_lag, attempt.disturbed)

    def _happens(self) -> None:
        if self.now == self.next_beat:
            self.next_beat = None
            self._beat()
            return
        if self.due is not None:
            self.start()
            return
        attempt = self.attempts[-1]
        if attempt.stopping is not None:
            self._end(attempt, 0)
        elif attempt.step >= self.draw.max_steps:
            self._store(self.draw.max_steps)
            self._end(attempt, 0)
        else:
            self._disturb(attempt, attempt.disturbance or "")

    def _disturb(self, attempt: Attempt, kind: str) -> None:
        self._note(kind)
        attempt.disturbed = self.now + self._rng.uniform(120, 1200)  # until others notice it
        if kind == "preempted":
            self._store(attempt.step)
            self._end(attempt, STOPPED, by_platform=True)
        elif kind == "rank died" or (kind == "noticed" and attempt.live):
            stored = self._stored_step()
            progress = stored is not None and stored > attempt.first_step
            self._end(attempt, FAILED_AFTER_PROGRESS if progress else 1)
        elif kind == "node lost":
            attempt.disturbance = "noticed"
            self._rng.choice(attempt.live).end = self.now
        elif kind == "all lost":
            self._end(attempt, None)
        else:  # it hangs, until its watchdog ends it
            attempt.disturbance = "noticed"
            attempt.disturbed = self.now + STALL_AFTER + 120

    def _end(self, attempt: Attempt, code: int | None, *, by_platform: bool = False) -> None:
        """End the nodes that are live with a code; the platform may start the job again."""
        lost = any(node.end is not None for node in attempt.nodes)
        self._beat()
        for node in attempt.live:
            node.end, node.exit_code = self.now, code
            if code is not None:
                self._record(node, self.now)
        # A lost node decides what the platform does: it is a disruption of its own.
        outcome = None if lost or by_platform else code
        self._uploads.clear()
        if self.on.starts_again(outcome, self.counted_restarts):
            self.counted_restarts += outcome is not None and outcome not in self.on.uncounted
            self.due = self.now + self._rng.uniform(30, self.draw.queue + 30)
        self._note(f"the job ends with {code}; starts again: {self.due is not None}")

    def _train_until(self, until: float) -> None:
        """Take steps, save and upload checkpoints until a time."""
        attempt = self.attempts[-1] if self.attempts else None
        for at, step in [each for each in self._uploads if each[0] <= until]:
            self._uploads.remove((at, step))
            self._store(step, at)
        if attempt is None or not attempt.live or attempt.disturbance == "noticed":
            return
        if attempt.stopping is not None:
            until = min(until, attempt.stopping)
        seconds = min(until, attempt.disturbed) - attempt.training
        step = min(self.draw.max_steps, attempt.first_step + int(seconds * self.draw.speed))
        every = self.draw.checkpoint_every
        for saved in range((attempt.step // every + 1) * every, step + 1, every):
            at = attempt.training + (saved - attempt.first_step) / self.draw.speed
            self._uploads.append((at + self.draw.upload_lag, saved))
        attempt.step = max(attempt.step, step)

    def _store(self, step: int, at: float | None = None) -> None:
        """Store a checkpoint as an upload does: its file, then its marker."""
        if step == 0:
            return
        name = step_folder_name(step)
        file = CheckpointFile("model.safetensors", 4, "00")
        marker = CheckpointMarker(step, NODES, "0", (file,), self.on.name)
        moment = self.now if at is None else at
        # Some uploads never end: the marker of one node is there, another node's file is not.
        is_partial = self._rng.random() < 0.1 and step < self.draw.max_steps
        self.memory.put(f"{name}/{file.name}", b"da" if is_partial else b"data", moment)
        self.memory.put(f"{name}/{MARKER}", marker.to_json().encode(), moment)
        if not is_partial:
            self.complete = max(self.complete, step)

    def _stored_step(self) -> int | None:
        sizes = self.memory.list_sizes("")
        return newest_listed(sizes, lambda name: self.memory.read(f"{name}/{MARKER}")).step

    def _beat(self) -> None:
        """Store the heartbeats that are due, and receive requests to stop with them."""
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is None:
            return
        for node in attempt.nodes:
            until = self.now if node.end is None else node.end
            at = node.last_beat(until)
            if at < node.begin or (node.end is not None and node.exit_code is not None):
                continue
            self._record(node, at)
            if node.end is None and attempt.stopping is None:
                self._receive_stop(attempt, node)

    def _receive_stop(self, attempt: Attempt, node: Node) -> None:
        request = read_stop_request(self.memory.seen_from(node.ahead))
        started = self.now + node.ahead - (self.now - node.begin)
        if request is None or not request.applies_to(started, node.record.job_id):
            return
        attempt.stopping = self.now
        self._store(attempt.step)
        for other in attempt.live:
            other.stopped_by = request.by
        self._note(f"the nodes are asked to stop by {request.by}")

    def _record(self, node: Node, at: float) -> None:
        attempt = self.attempts[-1]
        trains = at >= attempt.training
        record = replace(
            node.record,
            seen=at + node.ahead,
            ran=at - node.begin,
            state="ended" if node.exit_code is not None else "training" if trains else "preparing",
            exit_code=node.exit_code,
            stopped_by=node.stopped_by,
        )
        node.record = record
        self.memory.put(record.file, record.to_json(), at)

    # ------------------------------------------------------------------ watchers

    def billed(self) -> float:
        """Return the dollars of the time in which nodes ran."""
        seconds = (
            (self.now if node.end is None else node.end) - node.begin
            for attempt in self.attempts
            for node in attempt.nodes
        )
        return sum(max(0.0, each) for each in seconds) * usd_per_second()

    def run_in_memory(self) -> RunInMemory:
        """Return the run as a laptop sees it."""
        return replace(self.run, memory=self.memory.seen_from(self.draw.laptop_ahead))

    def check(self) -> WatchResult:
        """Watch once from a laptop, as `watch` does."""
        ahead = self.draw.laptop_ahead
        run = self.run_in_memory()
        now = datetime.fromtimestamp(self.now + ahead, UTC)
        result = check_state(run, self._state(run, now), dry_run=False)
        stage = result.state.stages[0]
        self.observed = max(self.observed, stage.stored.step or 0)
        if isinstance(result.action, StopJob):
            self._note(f"`watch`: {result.action.message}")
            assert not self._goes_as_planned(), "an accepted run was stopped"
        self._check_spent(result.state.projection.counted_usd)
        self._check_lost(f"{result.done} {result.warning}")
        return result

    def _state(self, run: ClusterRun, now: datetime) -> RunState:
        """Return the run's state without what its log and the estimate of the rest would add."""
        jobs = run.jobs(now)
        progress = Progress(self.attempts[-1].step, self.draw.speed, self._last_activity(now))
        stage = stage_state(
            STAGE,
            self.draw.max_steps,
            jobs,
            run.stored(run.config.stages[0], jobs),
            progress,
            now=now,
            stall_after=STALL_AFTER,
        )
        counted = counted_usd(jobs, price_table(), now)
        projection = Projection(None, counted, None, counted, {})
        notices = tuple(run.notices([stage], now))
        return RunState(run, (stage,), projection, now, LiveState(), notices)

    def _last_activity(self, now: datetime) -> float | None:
        """Return when rank 0 took its newest step, by the reader's clock; None before the first."""
        attempt = self.attempts[-1]
        if self.now <= attempt.training:
            return None
        silent = self.now - attempt.training
        silent -= (attempt.step - attempt.first_step) / self.draw.speed
        return now.timestamp() - max(0.0, silent)

    def check_in_cluster(self) -> None:
        """Watch once as the CronJob of a manifest does, with the storage's clock."""
        nodes = read_nodes(self.memory, map)
        watched = WatchedStage(
            "demo",
            STAGE,
            self.memory,
            self.run.config.alerts.job_config(),
            3600 * usd_per_second(),
        )
        if self.budget is not None:
            spent = node_hours(nodes) * 3600 * usd_per_second()
            self._check_spent(spent)
            stop_at_budget(watched, nodes, spent, self.budget, self.now)
        # Without a sink nothing is stored, so each check decides on the alert again.
        alerts = [each.alert for each in alert_on_silence(watched, nodes, self.now)]
        self._check_lost(" ".join(alert.symptom for alert in alerts))
        assert all(alert.command for alert in alerts)

    def _check_spent(self, counted: float) -> None:
        """What is counted is what the nodes have said; waiting in a queue costs nothing."""
        ran = sum(node.record.ran for attempt in self.attempts for node in attempt.nodes)
        assert abs(counted - ran * usd_per_second()) < 0.01 * (1 + len(self.attempts)), counted
        assert counted <= self.billed() + 0.01 * len(self.attempts), "more is counted than was used"

    def _check_lost(self, text: str) -> None:
        """A lost node of the newest attempt is named."""
        if not self.attempts:
            return
        for node in self.attempts[-1].nodes:
            is_lost = node.end is not None and node.exit_code is None
            silent = self.now - node.last_beat(node.end or self.now)
            if is_lost and silent > MISSING_SECONDS + 1:
                assert node.record.label in text, f"{node.record.label} is not named: {text}"

    def _goes_as_planned(self) -> bool:
        return self.draw.is_calm and not (self.draw.budget_share or 9) < 1.0

    def play(self) -> str:
        """Play until the run is done, has stopped, or no platform starts it again."""
        times = [(BEGIN + pause, number) for number, pause in enumerate(self.draw.polls)]
        last = BEGIN
        for _ in range(MOST_POLLS):
            at, number = min(times)
            times.remove((at, number))
            self._let_a_clock_jump()
            self.advance(at)
            if number == NOBODY:
                pass
            elif self._rng.random() < 0.03:
                self._note("the storage does not answer a watcher")
                times.append((self.now + self.draw.polls[number], number))
                continue
            if number != NOBODY:
                self.longest_gap = max(self.longest_gap, self.now - last)
            last = self.now
            result = self.check() if number == 0 else None
            if number == 1:
                self.check_in_cluster()
            if self.memory.files.get(STOP_FILE, (b"", 0.0))[1] == self.now:
                self.next_beat = self.now + HEARTBEAT_SECONDS
            self._check_budget()
            if self.due is None and not self.attempts[-1].live and number != 1:
                return "left" if result is None else self._ended(result)
            if self.leaves and result is not None and isinstance(result.action, Finish):
                self._note(f"`watch` ends: {result.action.message}")
                times.append((self.now + 3600, NOBODY))
                continue
            pause = 3600.0 if number == NOBODY else self.draw.polls[number]
            if self.draw.sleeps and number == 0 and self._rng.random() < 0.02:
                pause += self._rng.uniform(3600, 2 * 86400)
                self._note("a laptop sleeps")
            times.append((self.now + pause, number))
        return "unfinished"

    def _let_a_clock_jump(self) -> None:
        if self.attempts and self._rng.random() < 0.02:
            node = self._rng.choice(self.attempts[-1].nodes)
            node.ahead += self._rng.choice((-3600.0, 600.0, 86_400.0))
            self._note(f"the clock of {node.record.node} jumps")

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        delay = self.longest_gap + 2 * HEARTBEAT_SECONDS + SAVE_SECONDS
        # A job that waits in a queue cannot be asked to stop: Platforms, item 6.
        again = sum(1 for attempt in self.attempts if attempt.spent_before >= self.budget)
        most = self.budget + (1 + again) * delay * NODES * usd_per_second()
        nodes = [node for attempt in self.attempts for node in attempt.nodes]
        lost = [node for node in nodes if node.end is not None and node.exit_code is None]
        most += len(lost) * HEARTBEAT_SECONDS * usd_per_second()  # after their last heartbeat
        assert self.billed() <= most, f"billed ${self.billed():.0f}, at most ${most:.0f}"
        stopped = any(node.stopped_by for each in self.attempts for node in each.nodes)
        if stopped:
            assert self.billed() >= self.budget - 0.01, "stopped before its budget"

    def _ended(self, result: WatchResult) -> str:
        """Return how the run ended, as `watch` says it."""
        action = result.action
        if self._goes_as_planned():
            assert isinstance(action, Finish), action
            assert action.exit_code == ExitCode.OK, action
            assert result.state.current is None, action
        if isinstance(action, NoAction) and action.exit_code is ExitCode.OK:
            return "NO_ACTION"
        return once_exit_code(action, dry_run=False).name

    def _note(self, text: str) -> None:
        self.script.append(f"{self.now - BEGIN:12.0f} s  {text}")


def _with_steps(budget: float | None, steps: int) -> Any:
    run = run_config(budget)
    stages = [run.stages[0].model_copy(update={"max_steps": steps})]
    return run.model_copy(update={"stages": stages})


def play(name: str, seeds: Sequence[int], *, leaves: bool = False) -> dict[str, int]:
    """Play lives; return how many ended how. A life that breaks a rule fails with its script.

    With ``leaves``, `watch` is not started again after it has ended.
    """
    ends: dict[str, int] = {}
    for seed in seeds:
        life = Life(platform(name), Draw.of(seed), leaves=leaves)
        try:
            end = life.play()
        except AssertionError as error:
            script = "\n".join([f"{life.draw}", *life.script[-40:]])
            raise AssertionError(f"life {seed} on {name}: {error}\n{script}") from None
        ends[end] = ends.get(end, 0) + 1
    return ends
