"""Trackers of real torchrun jobs: killed and resumed, or next to a tracker that hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.cluster.training_jobs import Job, losses, shard_digests, tiny_run, write_shards
from tests.support.entry_scripts import train_like_diffusers

pytestmark = pytest.mark.integration

HANGING = UserCode({"wandb.py": b"import threading\nthreading.Event().wait()\n"})
"""A package of the user's own that takes the place of the tracker's."""


def job(folder: Path, code: UserCode | None = None, **settings: Any) -> Job:
    config = tiny_run(**({"max_steps": 8, "checkpoint_every": 3} | settings))
    if code is not None:
        config = RunConfig.model_validate(config.model_dump(mode="json") | {"code": "."})
    made = Job(folder, config, code=code)
    write_shards(made.train_channel, shards=2, each=16)
    return made


def read(made: Job, run: str = "tiny-8px-local") -> EventAccumulator:
    folder = made.checkpoints / "trackers" / "tensorboard" / run
    return EventAccumulator(str(folder), purge_orphaned_data=False).Reload()


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    evaluation = {"every_steps": 5, "prompts": ["a"], "num_inference_steps": 1}
    made = job(tmp_path, trackers=["tensorboard"], evaluation=evaluation, max_steps=20)
    with made.start(2) as running:
        running.wait_for("checkpoint", step=3)
        # The save of step 6 waits for that of step 3, so that a step always follows.
        running.wait_for("step")
        for pid in running.workers():
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        text = "".join(running.lines())
    code, events, text = made.run(2)
    assert code == 0, text
    [resumed_from] = {event["resumed_from_step"] for event in events if event["kind"] == "start"}
    resumed = losses(events)
    assert resumed_from >= 3
    assert min(resumed) == resumed_from + 1
    logged = read(made)
    scalars = logged.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == list(range(1, 21))
    assert {scalar.step: scalar.value for scalar in scalars[resumed_from:]} == pytest.approx(
        resumed
    )
    assert [image.step for image in logged.Images("samples")] == [5, 10, 15, 20]


@pytest.mark.slow
def test_a_hanging_tracker_changes_no_weight_and_ends_with_a_warning(tmp_path: Path) -> None:
    plain = job(tmp_path / "plain")
    assert plain.run(2)[0] == 0
    made = job(tmp_path / "hanging", HANGING, trackers=["wandb", "tensorboard"])
    code, events, text = made.run(2)
    assert code == 0, text
    [warning] = [event for event in events if event.get("tracker")]
    assert "wandb: did not finish in 30 s and was ended" in warning["message"]
    assert [event["reason"] for event in events if event["kind"] == "end"] == ["done"]
    assert shard_digests(made, 8) == shard_digests(plain, 8)
    assert [scalar.step for scalar in read(made).Scalars("train/loss")] == list(range(1, 9))


def test_an_accelerate_script_feeds_the_same_trackers(tmp_path: Path) -> None:
    config = tiny_run(max_steps=4, gradient_accumulation_steps=1, trackers=["tensorboard"])
    arguments = ["--train_data_dir", "{channel.train}", "--output_dir", "{checkpoints}"]
    arguments += ["--max_train_steps", "{max_steps}"]
    changes = {"code": ".", "entry": "train.py", "entry_args": arguments}
    script = Path(train_like_diffusers.__file__).read_bytes()
    made = Job(
        tmp_path,
        RunConfig.model_validate(config.model_dump(mode="json") | changes),
        code=UserCode({"train.py": script}),
    )
    made.train_channel.mkdir(parents=True)
    for number in range(80):
        text = " ".join(str((number * 7 + column * 3) % 11 / 10) for column in range(4))
        (made.train_channel / f"{number:03d}.txt").write_text(text)
    code, events, output = made.run()
    assert code == 0, output
    scalars = read(made).Scalars("train/loss")
    assert {scalar.step: scalar.value for scalar in scalars} == pytest.approx(losses(events))
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4]
