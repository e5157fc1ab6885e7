"""Real training processes under faults, stops and restarts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import shard_files
from sm_train.entrypoints.checkpoints.sharded_tensors import load_full
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.data_prep.lineage.recorded_runs import recorded_stages
from sm_train.toolkit.data_prep.lineage.seen_steps import Place, seen_steps
from sm_train.toolkit.records.job_logs import parse_event

from tests.conftest import Mount
from tests.support.cluster.training_jobs import (
    Job,
    losses,
    sample,
    shard_digests,
    tiny_run,
    write_shard,
    write_shards,
)
from tests.support.deadline import DEADLINE
from tests.support.image_files import read_tree


def job(folder: Path, **settings: object) -> Job:
    prepared = Job(folder, tiny_run(**settings))  # type: ignore[arg-type]
    write_shards(prepared.train_channel, shards=3, each=20)
    return prepared


def test_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL one of three processes after a checkpoint; the restart repeats the same numbers.

    A sum of two numbers is the same in any order, of three it is not: two processes would prove
    less.
    """
    uninterrupted = job(tmp_path / "uninterrupted", max_steps=40, checkpoint_every=10)
    code, events, text = uninterrupted.run(processes=3)
    assert code == 0, text
    killed = job(tmp_path / "killed", max_steps=40, checkpoint_every=10)
    with killed.start(processes=3) as running:
        # The next checkpoint may have started by then.
        running.wait_for("checkpoint", step=10)
        os.kill(running.workers()[1], signal.SIGKILL)
        list(running.lines())
        assert running.process.wait(timeout=DEADLINE) != 0
    shutil.rmtree(killed.base / "output", ignore_errors=True)
    code, resumed, text = killed.run(processes=3)
    assert code == 0, text
    start = next(event for event in resumed if event["kind"] == "start")
    resumed_from = start["resumed_from_step"]
    assert resumed_from >= 10
    expected = {step: loss for step, loss in losses(events).items() if step > resumed_from}
    assert losses(resumed) == expected
    assert shard_digests(killed, 40) == shard_digests(uninterrupted, 40)


@pytest.mark.slow
def test_killed_run_with_decode_workers_resumes_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted = job(
        tmp_path / "uninterrupted", max_steps=17, checkpoint_every=5, decode_workers=2
    )
    code, events, text = uninterrupted.run()
    assert code == 0, text
    killed = job(tmp_path / "killed", max_steps=17, checkpoint_every=5, decode_workers=2)
    with killed.start() as running:
        running.wait_for("checkpoint", step=5)
        children = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        running.process.wait()
        # Workers check for their parent every few seconds and must not outlive it for long.
        assert psutil.wait_procs(children, timeout=DEADLINE)[1] == []
    code, resumed, text = killed.run()
    assert code == 0, text
    start = next(event for event in resumed if event["kind"] == "start")
    resumed_from = start["resumed_from_step"]
    assert resumed_from >= 5
    expected = {step: loss for step, loss in losses(events).items() if step > resumed_from}
    assert losses(resumed) == expected


@pytest.mark.parametrize("checkpoint_every", [1000, 2])
def test_sigterm_writes_a_checkpoint_and_exits_with_success(
    tmp_path: Path, checkpoint_every: int
) -> None:
    stopped = job(tmp_path, max_steps=100000, checkpoint_every=checkpoint_every)
    with stopped.start(processes=2) as running:
        running.wait_for("step", step=3)
        running.process.send_signal(signal.SIGTERM)
        events = [event for line in running.lines() if (event := parse_event(line)) is not None]
    [end] = [event for event in events if event["kind"] == "end"]
    checkpoint = [event for event in events if event["kind"] == "checkpoint"][-1]
    assert end["reason"] == "sigterm"
    assert end["step"] == checkpoint["step"]
    assert (Path(checkpoint["path"]) / "complete.json").exists()


@pytest.mark.integration
def test_killed_run_of_streamed_shards_continues_and_reports_that_it_is_not_exact(
    tmp_path: Path,
) -> None:
    data = {"reader": "webdataset", "epoch_samples": 40}
    streamed = job(tmp_path, max_steps=12, checkpoint_every=4, data=data)
    with streamed.start(processes=2) as running:
        epoch = running.wait_for("epoch")
        running.wait_for("checkpoint", step=4)
        os.kill(running.workers()[1], signal.SIGKILL)
        list(running.lines())
        assert running.process.wait(timeout=DEADLINE) != 0
    assert (epoch["samples"], epoch["batches"], epoch["repeated"]) == (40, 5, None)
    code, events, text = streamed.run(processes=2)
    assert code == 0, text
    start = next(event for event in events if event["kind"] == "start")
    assert start["resumed_from_step"] >= 4
    assert "data-not-exact" in {event.get("code") for event in events}
    assert "no-index" not in {event.get("code") for event in events}
    # Steps of 8 samples: an epoch is 5 steps.
    last = [event for event in events if event["kind"] == "step"][-1]
    assert (last["step"], last["epoch"]) == (12, 2)


def test_damaged_latest_checkpoint_is_skipped_with_warning(tmp_path: Path) -> None:
    damaged = job(tmp_path, max_steps=6, checkpoint_every=2)
    assert damaged.run()[0] == 0
    with (damaged.checkpoints / "step-00000006" / "tensors-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    code, events, text = damaged.run()
    assert code == 0, text
    [warning] = [event for event in events if event.get("code") == "checkpoint-skipped"]
    assert "step-00000006" in warning["message"]
    start = next(event for event in events if event["kind"] == "start")
    assert start["resumed_from_step"] == 4


@pytest.mark.slow
def test_full_disk_loses_one_checkpoint_and_nothing_else(tmp_path: Path, mount: Mount) -> None:
    """A warning is logged, training continues, and the previous and next checkpoints are kept."""
    made = job(tmp_path, max_steps=100_000, checkpoint_every=150)
    disk = mount("size=64m")
    made.node_checkpoints.symlink_to(disk)
    with made.start(processes=2) as running:
        first = running.wait_for("checkpoint")
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        failed = running.wait_for("warning", code="checkpoint-failed")
        assert "No space left on device" in failed["message"]
        assert failed["step"] > first["step"]
        # An empty folder may be left, with what SageMaker puts next to files that it uploads.
        assert not list(disk.glob(f"step-{failed['step']:08d}/*.safetensors"))
        assert running.wait_for("step")["step"] > failed["step"]
        assert list(disk.glob("step-*/complete.json"))
        ballast.unlink()
        assert running.wait_for("checkpoint")["step"] > failed["step"]
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_for("end")["reason"] == "sigterm"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_checkpoint_of_two_processes_loads_into_any_number(tmp_path: Path, processes: int) -> None:
    """The final model is the same, bit for bit."""
    made = job(tmp_path, max_steps=6)
    assert made.run(processes=2)[0] == 0
    final = read_tree(made.base / "model")
    shutil.rmtree(made.base / "model")
    code, events, text = made.run(processes=processes)
    assert code == 0, text
    start = next(event for event in events if event["kind"] == "start")
    assert start["resumed_from_step"] == 6
    assert read_tree(made.base / "model") == final


@pytest.mark.slow
def test_changed_learning_rate_applies_after_resuming(tmp_path: Path) -> None:
    made = job(tmp_path, max_steps=4, learning_rate=1e-3, warmup_steps=9)
    assert made.run()[0] == 0
    document = made.bundle / "job.json"
    changed = json.loads(document.read_text())
    changed["8px"]["stage"] |= {"max_steps": 6, "learning_rate": 2e-3}
    document.write_text(json.dumps(changed))
    code, events, text = made.run()
    assert code == 0, text
    rates = [event["learning_rate"] for event in events if event["kind"] == "step"]
    # Steps 5 and 6 of a warm-up of 9 steps.
    assert rates == pytest.approx([2e-3 * 5 / 10, 2e-3 * 6 / 10])


def test_checkpoint_of_another_model_is_rejected_and_kept(tmp_path: Path) -> None:
    first = job(tmp_path, max_steps=2, checkpoint_every=2)
    assert first.run()[0] == 0
    before = shard_digests(first, 2)
    preset = first.bundle / "sm_train" / "entrypoints" / "models" / "presets" / "digits.json"
    preset.write_text(preset.read_text().replace('"layers_per_block": 1', '"layers_per_block": 2'))
    code, events, text = first.run()
    assert code == 1, text
    assert "is of another model" in first.failure
    assert [event["kind"] for event in events][-1] == "error"
    assert shard_digests(first, 2) == before


def test_diverged_run_fails_and_saves_no_nonfinite_weights(tmp_path: Path) -> None:
    diverged = job(tmp_path, max_steps=50, checkpoint_every=3, learning_rate=1e30, log_every=50)
    code, events, text = diverged.run()
    assert code == 1, text
    assert "steps in a row had no finite gradient, up to step 12" in diverged.failure
    assert "non-finite loss in step 12: shard-00" in diverged.failure
    assert events[-1]["kind"] == "error"
    assert not list(diverged.checkpoints.glob("step-*"))
    assert not (diverged.base / "model").exists()


NONFINITE_SCRIPT = Path(__file__).parents[1] / "support/entry_scripts/nonfinite_steps.py"


@pytest.mark.slow
def test_one_nonfinite_step_in_each_interval_stops_neither_checkpoints_nor_the_run(
    tmp_path: Path,
) -> None:
    """Every fifth step is skipped: the one at which a checkpoint is due."""
    trained = job(tmp_path, max_steps=62, checkpoint_every=5, log_every=5, max_nonfinite_steps=2)
    with trained.start(
        1, script=str(NONFINITE_SCRIPT), environment={"NONFINITE_STEPS": "0/5"}
    ) as running:
        text = "".join(running.lines())
        assert running.process.wait(DEADLINE) == 0, text
    events = [event for line in text.splitlines() if (event := parse_event(line))]
    saved = [event["step"] for event in events if event["kind"] == "checkpoint"]
    assert saved == [*range(6, 62, 5), 62]
    withheld = [event for event in events if event.get("code") == "checkpoint-withheld"]
    assert [event["step"] for event in withheld] == list(range(5, 61, 5))
    assert {event["skipped"] for event in withheld} == {1}


def test_many_skipped_steps_are_a_rule_of_their_own(tmp_path: Path) -> None:
    """Two of three steps are skipped, never three in a row."""
    trained = job(
        tmp_path, max_steps=60, checkpoint_every=50, log_every=5, max_nonfinite_share=0.02
    )
    with trained.start(
        1, script=str(NONFINITE_SCRIPT), environment={"NONFINITE_STEPS": "1/3"}
    ) as running:
        text = "".join(running.lines())
        assert running.process.wait(DEADLINE) == 1, text
    assert (
        "23 of the last 1000 steps up to step 35 had no finite gradient, more than "
        "training.max_nonfinite_share (0.02) allows"
    ) in trained.failure
    assert "in a row" not in trained.failure


@pytest.mark.slow
def test_old_checkpoints_are_removed_one_interval_later(tmp_path: Path) -> None:
    """Three are kept; the fourth stays until the next one is written, as its upload takes time."""
    finished = job(tmp_path, max_steps=12, checkpoint_every=2)
    assert finished.run()[0] == 0
    kept = sorted(folder.name for folder in finished.checkpoints.glob("step-*"))
    assert kept == ["step-00000006", "step-00000008", "step-00000010", "step-00000012"]


def test_few_bad_samples_are_skipped_and_named(tmp_path: Path) -> None:
    """The record of the data says what two processes have read instead."""
    made = Job(tmp_path, tiny_run(max_steps=20))
    made.train_channel.mkdir(parents=True)
    samples = {f"{number:04d}": sample(number) for number in range(70)}
    samples["0007"]["png"] = samples["0007"]["png"][:40]
    samples["0009"]["txt"] = b"\xff\xfe not UTF-8"
    write_shard(made.train_channel / "a.tar", samples)
    code, events, text = made.run(processes=2)
    assert code == 0, text
    bad = [event["message"] for event in events if event.get("code") == "bad-sample"]
    assert any("a.tar 0007" in message for message in bad)
    assert any("a.tar 0009" in message for message in bad)
    [stage] = recorded_stages(str(made.checkpoints.parent), S3Access())
    [attempt] = stage.attempts
    replacements = attempt.replacements
    assert replacements is not None
    assert (replacements.step, replacements.batches) == (20, 20)
    assert {*replacements.rows[:, 4].tolist()} == {7, 9}
    for number in range(70):
        seen = seen_steps(stage.attempts, Place("train", "a.tar", number), stage.until, None)
        assert seen.exact
        assert bool(seen.steps) == (number not in {7, 9})


def test_truncated_shard_loses_only_its_rest(tmp_path: Path) -> None:
    made = Job(tmp_path, tiny_run(max_steps=10))
    write_shards(made.train_channel, shards=2, each=20)
    shard = made.train_channel / "shard-001.tar"
    shard.write_bytes(shard.read_bytes()[:15000])
    code, events, text = made.run()
    assert code == 0, text
    messages = [event["message"] for event in events if event.get("code") == "shard-damaged"]
    assert any("shard-001.tar" in message for message in messages), messages
    epoch = next(event for event in events if event["kind"] == "epoch")
    assert 20 < epoch["samples"] < 40


def test_too_many_bad_samples_fail_the_job_and_name_the_shard(tmp_path: Path) -> None:
    made = Job(tmp_path, tiny_run(max_steps=1000))
    made.train_channel.mkdir(parents=True)
    samples = {f"{number:04d}": sample(number) for number in range(40)}
    for number in range(0, 40, 2):
        samples[f"{number:04d}"]["png"] = b"no picture"
    write_shard(made.train_channel / "rotten.tar", samples)
    code, events, text = made.run()
    assert code == 1, text
    assert "rotten.tar" in made.failure
    assert events[-1]["kind"] == "error"


def test_instance_without_shards_fails_all_processes(tmp_path: Path) -> None:
    made = Job(tmp_path, tiny_run(max_steps=10))
    code, _, text = made.run(processes=2)
    assert code != 0, text
    assert "algo-1: no .tar in the train channel" in made.failure


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_events_describe_the_actual_run(tmp_path: Path, processes: int) -> None:
    code, events, text = job(tmp_path, max_steps=3, gradient_accumulation_steps=2).run(
        processes=processes
    )
    assert code == 0, text
    start = next(event for event in events if event["kind"] == "start")
    assert start["world_size"] == processes
    assert start["effective_batch_size"] == 4 * 2 * processes
    assert start["backend"] == ("gloo" if processes == 2 else "none")
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert all(0 <= event["data_wait_share"] <= 1 for event in steps)
    [end] = [event for event in events if event["kind"] == "end"]
    assert end["images"] == 3 * start["effective_batch_size"]


def test_stage_starts_from_the_previous_stages_weights(tmp_path: Path) -> None:
    first = job(tmp_path / "first", max_steps=8, learning_rate=3e-3)
    code, events, text = first.run()
    assert code == 0, text
    second = job(tmp_path / "second", max_steps=1, learning_rate=1e-9)
    previous = second.base / "input" / "data" / "previous"
    shutil.copytree(first.checkpoints / "final", previous)
    code, later, text = second.run()
    assert code == 0, text
    # Both are losses of a first step, on the same samples with the same noise.
    assert losses(later)[1] < losses(events)[1] * 0.95


@pytest.mark.parametrize(
    ("start", "optimizer"),
    [
        ("raw", "keep"),
        *(
            pytest.param(start, optimizer, marks=pytest.mark.slow)
            for start, optimizer in (("ema", "reset"), ("ema", "keep"), ("raw", "reset"))
        ),
    ],
)
def test_stage_keeps_weights_and_optimizer_as_configured(
    tmp_path: Path, start: str, optimizer: str
) -> None:
    """A second stage with a tiny learning rate saves the weights that it started from."""
    first = job(tmp_path / "first", max_steps=6, learning_rate=3e-3, checkpoint_every=6)
    assert first.run()[0] == 0
    last = first.checkpoints / "step-00000006"
    stored = load_full(shard_files(last), "ema." if start == "ema" else "model.")

    second = job(
        tmp_path / "second",
        max_steps=1,
        learning_rate=1e-9,
        checkpoint_every=1,
        optimizer={"weight_decay": 0.0},
    )
    document = json.loads((second.bundle / "job.json").read_text())
    document["8px"]["stage"] |= {"init_from": start, "optimizer_state": optimizer}
    (second.bundle / "job.json").write_text(json.dumps(document))
    channels = second.base / "input" / "data"
    shutil.copytree(first.checkpoints / "final", channels / "previous")
    if (start, optimizer) != ("ema", "reset"):
        shutil.copytree(last, channels / "previous_state")
    code, _, text = second.run()
    assert code == 0, text
    saved = shard_files(second.checkpoints / "step-00000001")
    for name, weight in load_full(saved, "model.").items():
        torch.testing.assert_close(weight, stored[name], rtol=0, atol=1e-7)
    # AdamW keeps counting, and its moments are those of six gradients and one more.
    steps = load_full(saved, "optimizer.step")[""]
    assert set(steps.tolist()) == {7.0 if optimizer == "keep" else 1.0}
    moments = [
        load_full(shard_files(folder), "optimizer.exp_avg.")["network.conv_in.weight"]
        for folder in (last, second.checkpoints / "step-00000001")
    ]
    similarity = torch.nn.functional.cosine_similarity(
        *(moment.flatten() for moment in moments), dim=0
    )
    assert (float(similarity) > 0.8) == (optimizer == "keep")
