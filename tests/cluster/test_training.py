"""Real training processes: what they do with faults, stops and restarts."""

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
from sm_train.entrypoints.checkpointing.manifest import shard_files
from sm_train.entrypoints.checkpointing.sharded_tensors import load_full

from tests.conftest import Mount
from tests.support.cluster.training_jobs import (
    Job,
    losses,
    sample,
    tiny_run,
    weights,
    write_shard,
    write_shards,
)
from tests.support.image_files import read_tree


def job(folder: Path, **settings: object) -> Job:
    made = Job(folder, tiny_run(**settings))  # type: ignore[arg-type]
    write_shards(made.train_channel, shards=3, each=20)
    return made


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL one of three processes after a checkpoint; the restart repeats the same numbers.

    A sum over two is the same in any order, over three it is not: so two would prove less.
    """
    whole = job(tmp_path / "whole", max_steps=40, checkpoint_every=10)
    code, events, text = whole.run(processes=3)
    assert code == 0, text
    cut = job(tmp_path / "cut", max_steps=40, checkpoint_every=10)
    with cut.start(processes=3) as running:
        # The next one is begun by then.
        running.wait_for("checkpoint", step=10)
        os.kill(running.workers()[1], signal.SIGKILL)
        list(running.lines())
        assert running.process.wait(timeout=60) != 0
    shutil.rmtree(cut.base / "output", ignore_errors=True)
    code, resumed, text = cut.run(processes=3)
    assert code == 0, text
    start = next(event for event in resumed if event["kind"] == "start")
    resumed_from = start["resumed_from_step"]
    assert resumed_from >= 10
    expected = {step: loss for step, loss in losses(events).items() if step > resumed_from}
    assert losses(resumed) == expected
    assert weights(cut, 40) == weights(whole, 40)


@pytest.mark.slow
def test_loader_workers_resume_as_exactly(tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", max_steps=17, checkpoint_every=5, decode_workers=2)
    code, events, text = whole.run()
    assert code == 0, text
    cut = job(tmp_path / "cut", max_steps=17, checkpoint_every=5, decode_workers=2)
    with cut.start() as running:
        running.wait_for("checkpoint", step=5)
        children = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        running.process.wait()
        # They look after their parent every few seconds; none may outlive it for long.
        assert psutil.wait_procs(children, timeout=60)[1] == []
    code, resumed, text = cut.run()
    assert code == 0, text
    start = next(event for event in resumed if event["kind"] == "start")
    resumed_from = start["resumed_from_step"]
    assert resumed_from >= 5
    expected = {step: loss for step, loss in losses(events).items() if step > resumed_from}
    assert losses(resumed) == expected


def test_a_stop_checkpoints_on_the_same_step_and_ends_well(tmp_path: Path) -> None:
    stopped = job(tmp_path, max_steps=100000)
    with stopped.start(processes=2) as running:
        running.wait_for("step", step=3)
        running.process.send_signal(signal.SIGTERM)
        checkpoint = running.wait_for("checkpoint")
        end = running.wait_for("end")
    assert end["reason"] == "sigterm"
    assert end["step"] == checkpoint["step"]
    assert (Path(checkpoint["path"]) / "complete.json").exists()


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
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
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path: Path, mount: Mount) -> None:
    """Said at once; training goes on, the checkpoint before stays, and the next one is tried."""
    made = job(tmp_path, max_steps=100_000, checkpoint_every=150)
    disk = mount("size=64m")
    made.checkpoints.symlink_to(disk)
    with made.start(processes=2) as running:
        first = running.wait_for("checkpoint")
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        failed = running.wait_for("warning", code="checkpoint-failed")
        assert "No space left on device" in failed["message"]
        assert failed["step"] > first["step"]
        assert not list(disk.glob(f"step-{failed['step']:08d}"))
        assert running.wait_for("step")["step"] > failed["step"]
        whole = [path.parent.name for path in disk.glob("step-*/complete.json")]
        assert whole
        ballast.unlink()
        assert running.wait_for("checkpoint")["step"] > failed["step"]
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_for("end")["reason"] == "sigterm"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_any_number_of_processes_takes_over_the_weights(tmp_path: Path, processes: int) -> None:
    """What two have shared out comes together again, bit for bit."""
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
def test_a_changed_learning_rate_counts_from_the_resume_on(tmp_path: Path) -> None:
    made = job(tmp_path, max_steps=4, learning_rate=1e-3, warmup_steps=9)
    assert made.run()[0] == 0
    document = made.bundle / "job.json"
    changed = json.loads(document.read_text())
    changed["8px"]["stage"] |= {"max_steps": 6, "learning_rate": 2e-3}
    document.write_text(json.dumps(changed))
    code, events, text = made.run()
    assert code == 0, text
    rates = [event["learning_rate"] for event in events if event["kind"] == "step"]
    # What step 5 of a warm-up of 9 leaves to the next one.
    assert rates == pytest.approx([2e-3 * 6 / 10, 2e-3 * 7 / 10])


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    first = job(tmp_path, max_steps=2, checkpoint_every=2)
    assert first.run()[0] == 0
    before = weights(first, 2)
    preset = first.bundle / "sm_train" / "entrypoints" / "models" / "presets" / "digits.json"
    preset.write_text(preset.read_text().replace('"layers_per_block": 1', '"layers_per_block": 2'))
    code, events, text = first.run()
    assert code == 1, text
    assert "is of another model" in first.failure
    assert [event["kind"] for event in events][-1] == "error"
    assert weights(first, 2) == before


def test_a_run_that_diverges_fails_and_saves_nothing_spoilt(tmp_path: Path) -> None:
    lost = job(tmp_path, max_steps=50, checkpoint_every=3, learning_rate=1e30, log_every=50)
    code, events, text = lost.run()
    assert code == 1, text
    assert "steps in a row had no finite gradient, up to step 12" in lost.failure
    assert "non-finite loss in step 12: shard-00" in lost.failure
    assert events[-1]["kind"] == "error"
    assert not list(lost.checkpoints.glob("step-*"))
    assert not (lost.base / "model").exists()


@pytest.mark.slow
def test_old_checkpoints_go_and_the_newest_stay(tmp_path: Path) -> None:
    many = job(tmp_path, max_steps=10, checkpoint_every=2)
    assert many.run()[0] == 0
    kept = sorted(folder.name for folder in many.checkpoints.glob("step-*"))
    assert kept == ["step-00000006", "step-00000008", "step-00000010"]


def test_a_few_bad_samples_are_skipped_counted_and_named(tmp_path: Path) -> None:
    made = Job(tmp_path, tiny_run(max_steps=20))
    made.train_channel.mkdir(parents=True)
    samples = {f"{number:04d}": sample(number) for number in range(70)}
    samples["0007"]["png"] = samples["0007"]["png"][:40]
    samples["0009"]["txt"] = b"\xff\xfe not UTF-8"
    write_shard(made.train_channel / "a.tar", samples)
    code, events, text = made.run()
    assert code == 0, text
    bad = [event["message"] for event in events if event.get("code") == "bad-sample"]
    assert any("a.tar 0007" in message for message in bad)
    assert any("a.tar 0009" in message for message in bad)


def test_a_shard_cut_short_loses_its_rest_alone(tmp_path: Path) -> None:
    made = Job(tmp_path, tiny_run(max_steps=10))
    write_shards(made.train_channel, shards=2, each=20)
    cut = made.train_channel / "shard-001.tar"
    cut.write_bytes(cut.read_bytes()[:15000])
    code, events, text = made.run()
    assert code == 0, text
    messages = [event["message"] for event in events if event.get("code") == "shard-damaged"]
    assert any("shard-001.tar" in message for message in messages), messages
    read = next(event for event in events if event["kind"] == "epoch")
    assert 20 < read["samples"] < 40


def test_too_many_bad_samples_stop_the_job_and_name_the_shards(tmp_path: Path) -> None:
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


def test_an_instance_without_shards_stops_every_process_at_once(tmp_path: Path) -> None:
    made = Job(tmp_path, tiny_run(max_steps=10))
    code, _, text = made.run(processes=2)
    assert code != 0, text
    assert "algo-1: no .tar in the train channel" in made.failure


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_events_tell_the_run_as_it_is(tmp_path: Path, processes: int) -> None:
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


def test_a_stage_starts_from_the_weights_of_the_one_before(tmp_path: Path) -> None:
    first = job(tmp_path / "first", max_steps=8, learning_rate=3e-3)
    code, events, text = first.run()
    assert code == 0, text
    second = job(tmp_path / "second", max_steps=1, learning_rate=1e-9)
    previous = second.base / "input" / "data" / "previous"
    shutil.copytree(first.checkpoints / "final", previous)
    code, later, text = second.run()
    assert code == 0, text
    # On the same samples with the same noise: both are a first step's.
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
def test_a_stage_takes_what_its_run_file_says_of_the_one_before(
    tmp_path: Path, start: str, optimizer: str
) -> None:
    """The second stage's first loss by itself tells its weights; its second one, the optimizer."""
    first = job(tmp_path / "first", max_steps=6, learning_rate=3e-3, checkpoint_every=6)
    assert first.run()[0] == 0
    last = first.checkpoints / "step-00000006"
    stored = load_full(shard_files(last), "ema." if start == "ema" else "model.")

    second = job(
        tmp_path / "second", max_steps=1, learning_rate=1e-9, checkpoint_every=1, weight_decay=0.0
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
    begun = shard_files(second.checkpoints / "step-00000001")
    for name, weight in load_full(begun, "model.").items():
        torch.testing.assert_close(weight, stored[name], rtol=0, atol=1e-7)
    # AdamW counts on, and its moments are those of six gradients and one more.
    steps = load_full(begun, "optimizer.steps")[""]
    assert set(steps.tolist()) == {7.0 if optimizer == "keep" else 1.0}
    moments = [
        load_full(shard_files(one), "exp_avg.")["network.conv_in.weight"]
        for one in (last, second.checkpoints / "step-00000001")
    ]
    along = torch.nn.functional.cosine_similarity(*(one.flatten() for one in moments), dim=0)
    assert (float(along) > 0.8) == (optimizer == "keep")
