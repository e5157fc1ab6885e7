"""A local run's life, drawn by a seed: its folder as its processes leave it, read as `status` does.

The lock, the folders and the log are real; the times in the log are moved with the drawn clock, as
the product reads them next to this machine's. Decided by the product: ``exclusive_run``,
``read_state`` and ``poll_run``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    step_folder_name,
)
from sm_train.entrypoints.job_interface.events import FIELDS, TEXTS, format_event
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.platforms.find_run import find_run
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.job_logs import LOG_NAME
from sm_train.toolkit.records.local_folder import FINISHED_NAME, LocalRunFolder
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.runs.run_state import read_state
from sm_train.toolkit.runs.watch.controller import once_exit_code, poll_run
from sm_train.toolkit.submit.local.launcher import exclusive_run

from tests.support.run_documents import config, stage

STAGE, STALL_AFTER, SPEED = "256px", 900.0, 1.5


@cache
def _run_file() -> str:
    run = config(stages=[stage(STAGE, max_steps=20_000)], heartbeat={"max_timeout": STALL_AFTER})
    return json.dumps(run.model_dump(mode="json"))


@dataclass
class Life:
    """One life in ``folder``. Times are in seconds since its begin."""

    seed: int
    folder: Path
    now: float = 0.0
    step: int = 0
    stored: int = 0
    stepped: float = 0.0
    """When the newest step ended."""
    failed: bool = False
    script: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"local {self.seed}")
        self.max_steps = 20_000
        self.every = self._rng.choice((2000, 7000))
        self.run = LocalRunFolder(self.folder)
        self.stage = self.folder / STAGE
        self._lock: contextlib.ExitStack | None = None
        self._lines: list[tuple[float, str, dict[str, Any]]] = []

    def play(self) -> str:
        (self.stage / "bundle").mkdir(parents=True)
        (self.stage / "bundle" / "run.json").write_text(_run_file())
        (self.stage / "nodes" / "algo-1" / "output").mkdir(parents=True)
        state = "waiting"
        try:
            for _ in range(12):
                self._turn()
                state = self._check()
                if state == "done":
                    break
        finally:
            if self._lock is not None:
                self._lock.close()
        return state

    def _turn(self) -> None:
        """Let something happen."""
        if self._lock is None:
            self._start()
            return
        event = self._rng.choices(
            ("trains", "sleeps", "is killed", "fails", "stalls", "starts twice"), (8, 1, 1, 1, 1, 1)
        )[0]
        self._note(event)
        if event == "trains":
            self._train(self._rng.uniform(60, 3600))
        elif event == "sleeps":  # the processes, too
            self.now += self._rng.uniform(3600, 86400)
        elif event == "stalls":
            self.now += self._rng.uniform(0, 3 * STALL_AFTER)
        elif event == "starts twice":
            with pytest.raises(UserError), exclusive_run(self.folder):
                raise AssertionError("two runs in one folder")
        else:
            self._end(failed=event == "fails")

    def _start(self) -> None:
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(exclusive_run(self.folder))
        (self.stage / "nodes" / "algo-1" / "output" / "failure").unlink(missing_ok=True)
        stored = self._state().stored.step or 0 if self._lines else 0
        assert stored == self.stored, f"resumes from {stored}, although {self.stored} was stored"
        self.step, self.failed, self.stepped = stored, False, self.now
        self._lines.append((self.now, "start", {"resumed_from_step": stored}))
        self._note(f"starts from step {stored}")

    def _train(self, seconds: float) -> None:
        step = min(self.max_steps, self.step + int(seconds * SPEED))
        for saved in range((self.step // self.every + 1) * self.every, step + 1, self.every):
            self._save(saved)
        self.now += seconds
        self.step, self.stepped = step, self.now
        fields = {"step": step, "steps_per_second": SPEED, "max_steps": self.max_steps}
        self._lines.append((self.now, "step", fields))
        if step == self.max_steps:
            self._save(step)
            (self.stage / FINISHED_NAME).write_text(f"{step}\n")
            self._end(failed=False)

    def _save(self, step: int) -> None:
        """Save a checkpoint; one that is being written has no marker yet."""
        folder = self.stage / "checkpoints" / step_folder_name(step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"data")
        if self._rng.random() < 0.1 and step < self.max_steps:
            return
        marker = CheckpointMarker(step, 1, "0", (CheckpointFile("model.safetensors", 4, "00"),))
        (folder / MARKER).write_text(marker.to_json())
        self.stored = step

    def _end(self, *, failed: bool) -> None:
        assert self._lock is not None
        self._lock.close()
        self._lock = None
        if failed:
            (self.stage / "nodes" / "algo-1" / "output" / "failure").write_text("KeyError")
        self.failed = failed

    def _write_log(self) -> None:
        """Write the log as if the life's present were this machine's."""
        offset = time.time() - self.now
        lines = []
        for at, kind, fields in self._lines[-3:]:
            values = {name: "1" if name in TEXTS else 1 for name in FIELDS[kind]} | fields
            values |= {"precision": "bf16"} if kind == "start" else {}
            lines.append(format_event(kind, values, time=at + offset, node=0, rank=0))
        started = max(at for at, kind, _ in self._lines if kind == "start") + offset
        os.utime(self.stage / "bundle", (started, started))
        (self.stage / LOG_NAME).write_text("".join(f"{line}\n" for line in lines))

    def _check(self) -> str:
        self._write_log()
        state = self._state()
        has_ended = (self.stage / FINISHED_NAME).exists()
        stepped = self._lines[-1][1] == "step" or any(kind == "step" for _, kind, _ in self._lines)
        if has_ended:
            expected = {"done"}
        elif self._lock is None:
            expected = {"failed"} if self.failed else {"stopped"}
        elif self._lines[-1][1] == "start" or not stepped:
            expected = {"starting", "training", "stalled"}
        else:
            silent = self.now - self.stepped
            expected = {"stalled" if silent > STALL_AFTER else "training"}
        assert state.state in expected, f"{state.state}, expected {expected}"
        assert (state.stored.step or 0) == self.stored, "a stored checkpoint is missing"
        assert self.run.is_training() == (self._lock is not None)
        if self._lock is None and self._rng.random() < 0.2:
            action = poll_run(self._found(), dry_run=False).action
            code = once_exit_code(action, dry_run=False)
            assert code == (ExitCode.JOB_FAILED if expected == {"failed"} else ExitCode.OK)
        return state.state

    def _found(self) -> PlacedRun:
        return find_run(str(self.folder), {"region": None, "profile": None})

    def _state(self) -> StageState:
        [state] = read_state(self._found()).stages
        return state

    def _note(self, text: str) -> None:
        self.script.append(f"{self.now:12.0f} s  {text}")


def play(folder: Path, seeds: Sequence[int]) -> dict[str, int]:
    """Play lives below ``folder``; return how many ended how."""
    ends: dict[str, int] = {}
    for seed in seeds:
        life = Life(seed, folder / str(seed))
        try:
            end = life.play()
        except AssertionError as error:
            script = "\n".join([f"every {life.every} steps", *life.script[-40:]])
            raise AssertionError(f"life {seed}: {error}\n{script}") from None
        ends[end] = ends.get(end, 0) + 1
    return ends
