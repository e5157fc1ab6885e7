"""Evaluation during training: validation loss and images, without effect on the training."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sm_train.toolkit.records.job_logs import parse_event

from tests.support.cluster.training_jobs import Job, losses, shard_digests, tiny_run, write_shards
from tests.support.deadline import DEADLINE

PROMPTS = ["a grey of 1", "a grey of 2", "a grey of 3"]
EVALUATION = {"every_steps": 2, "prompts": PROMPTS, "num_inference_steps": 2, "guidance_scale": 2.0}


def job(folder: Path, *, validation: bool = True, **settings: Any) -> Job:
    prepared = Job(
        folder,
        tiny_run(
            **({"max_steps": 5, "checkpoint_every": 5, "per_device_batch_size": 2} | settings)
        ),
    )
    write_shards(prepared.train_channel, shards=2, each=8)
    if validation:
        # An odd number: some processes read a sample twice, which must count once.
        write_shards(prepared.base / "input" / "data" / "validation", shards=1, each=7)
    return prepared


def run(made: Job, processes: int = 1) -> list[dict[str, Any]]:
    code, events, text = made.run(processes)
    assert code == 0, text
    return events


def evaluations(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "eval"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[dict[str, Any]]]:
    made = job(tmp_path_factory.mktemp("plain"), validation=False)
    return made, run(made)


@pytest.mark.integration
def test_evaluation_logs_loss_and_images_and_changes_no_weights(
    tmp_path: Path, plain: tuple[Job, list[dict[str, Any]]]
) -> None:
    made = job(tmp_path, evaluation=EVALUATION)
    events = run(made)
    logged = evaluations(events)
    assert [event["step"] for event in logged] == [2, 4, 5]
    for event in logged:
        assert event["seconds"] > 0
        assert event["loss"] == pytest.approx(sum(event["losses"].values()) / 4)
        for folder in (made.checkpoints, made.base / "output" / "data"):
            with Image.open(folder / event["images"]) as grid:
                assert grid.width > 3 * 128
    assert losses(events) == losses(plain[1])
    assert shard_digests(made, 5) == shard_digests(plain[0], 5)


def test_no_evaluation_without_validation_set_or_prompts(
    plain: tuple[Job, list[dict[str, Any]]],
) -> None:
    assert not evaluations(plain[1])


@pytest.mark.slow
def test_validation_loss_falls_during_training(tmp_path: Path) -> None:
    events = run(job(tmp_path, max_steps=60, learning_rate=3e-3, evaluation={"every_steps": 20}))
    validation_losses = [event["loss"] for event in evaluations(events)]
    assert validation_losses[2] < validation_losses[0] * 0.9


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.slow), "full_shard"])
def test_validation_loss_and_images_do_not_depend_on_the_world_size(
    tmp_path: Path, sharding: str
) -> None:
    """The learning rate is too small to change a weight, so all results must be equal."""
    results = []
    for processes in (1, 2):
        made = job(
            tmp_path / str(processes),
            preset="tiny-mmdit",
            max_steps=1,
            learning_rate=1e-12,
            sharding=sharding,
            evaluation=EVALUATION,
        )
        [event] = evaluations(run(made, processes))
        results.append((event["losses"], (made.checkpoints / event["images"]).read_bytes()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == results[1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "every_steps"),
    [
        ("shard_grad_op", 1),
        ("shard_grad_op", 2),
        pytest.param("shard_grad_op", 3, marks=pytest.mark.integration),
        pytest.param("full_shard", 2, marks=pytest.mark.integration),
        pytest.param("hybrid_shard", 2, marks=pytest.mark.integration),
        pytest.param("none", 2, marks=pytest.mark.integration),
    ],
)
def test_steps_after_an_evaluation_use_the_trained_weights(
    tmp_path: Path, sharding: str, every_steps: int
) -> None:
    """FSDP must not keep the gathered EMA weights of the evaluation for the next step."""
    training = {"preset": "tiny-mmdit", "sharding": sharding, "learning_rate": 1e-2}
    expected = job(tmp_path / "plain", validation=False, **training)
    evaluation = EVALUATION | {"every_steps": every_steps}
    evaluated = job(tmp_path / "evaluated", evaluation=evaluation, **training)
    events = run(evaluated, processes=2)
    assert evaluations(events)
    assert losses(events) == losses(run(expected, processes=2))
    assert shard_digests(evaluated, 5) == shard_digests(expected, 5)


def test_unwritable_images_are_a_warning(tmp_path: Path) -> None:
    made = job(tmp_path, evaluation=EVALUATION, validation=False, max_steps=2)
    made.checkpoints.mkdir()
    (made.checkpoints / "samples").write_text("in the way")
    events = run(made)
    assert "images-not-written" in {event.get("code") for event in events}
    assert evaluations(events)[0]["images"] is None


def test_sigterm_interrupts_the_evaluation(tmp_path: Path) -> None:
    """All 64 images would take longer than SageMaker's grace period."""
    prompts = [f"a grey of {number}" for number in range(64)]
    made = job(
        tmp_path,
        max_steps=4,
        evaluation={"every_steps": 2, "prompts": prompts, "num_inference_steps": 300},
    )
    with made.start(processes=2) as running:
        running.wait_for("step", step=2)
        running.process.send_signal(signal.SIGTERM)
        events = [event for line in running.lines() if (event := parse_event(line))]
        assert running.process.wait(timeout=DEADLINE) is not None
    assert not evaluations(events)
    [end] = [event for event in events if event["kind"] == "end"]
    assert (end["step"], end["reason"]) == (3, "sigterm")
    assert "checkpoint" in {event["kind"] for event in events}
