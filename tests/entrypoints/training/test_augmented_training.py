"""Training on two sources with captions, flips and offset noise resumes bit for bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from sm_train.estimators.config.schema import RunConfig

from tests.support.cluster.training_jobs import (
    Job,
    losses,
    png,
    shard_digests,
    tiny_run,
    write_shard,
)


def job(folder: Path, **data: object) -> Job:
    config = tiny_run(
        preset="tiny-sd2",
        model={"prediction_type": "epsilon"},
        max_steps=9,
        checkpoint_every=3,
        caption_dropout=0.3,
        offset_noise=0.1 if data else 0.0,
    )
    document = config.model_dump(mode="json")
    document["data"] |= data
    if data:
        document["channels"] = {"art": {"uri": "s3://my-bucket/art/"}}
        document["stages"][0]["sources"] = [{"channel": "train"}, {"channel": "art", "weight": 2}]
    created = Job(folder, RunConfig.model_validate(document))
    samples = {
        f"{number:04d}": {
            "png": png(number),
            "txt": f"a grey of {number}".encode(),
            "json": json.dumps({"alt": f"grey {number}", "tags": ["one", "two"]}).encode(),
        }
        for number in range(24)
    }
    created.train_channel.mkdir(parents=True)
    write_shard(created.train_channel / "shard-000.tar", samples)
    art = created.train_channel.with_name("art")
    art.mkdir()
    write_shard(art / "shard-000.tar", dict(list(samples.items())[:6]))
    return created


@pytest.mark.slow
@pytest.mark.integration
def test_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    augmented = {
        "caption": {
            "txt": 0.5,
            "json": [{"field": "alt", "weight": 0.3}, {"field": "tags", "weight": 0.2}],
        },
        "flip": True,
    }
    whole = job(tmp_path / "whole", **augmented)
    code, events, text = whole.run(2)
    assert code == 0, text
    killed = job(tmp_path / "killed", **augmented)
    with killed.start(2) as running:
        running.wait_for("checkpoint", step=3)
        os.kill(running.workers()[0], signal.SIGKILL)
    code, resumed, text = killed.run(2)
    assert code == 0, text
    assert next(iter(losses(resumed))) > 3
    assert losses(resumed).items() <= losses(events).items()
    assert shard_digests(killed, 9) == shard_digests(whole, 9)
    plain = job(tmp_path / "plain")
    assert losses(plain.run(2)[1]) != losses(events)
