"""Helpers of the tests of latents, which other tests use as well."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.support.cluster.training_jobs import Job, png, tiny_run, write_shards
from tests.support.deadline import DEADLINE
from tests.support.image_files import write_pair


def latent_job(folder: Path, **settings: Any) -> Job:
    return Job(folder, tiny_run(**({"preset": "tiny-sd2"} | settings)))


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The components folder of a first run."""
    job = latent_job(tmp_path_factory.mktemp("first"), max_steps=1, checkpoint_every=1)
    write_shards(job.train_channel, shards=1, each=8)
    code, _, text = job.run()
    assert code == 0, text
    return job.checkpoints / "components"


def pack(cli: Cli, folder: Path, components: Path, *more: str) -> Any:
    for number in range(12):
        write_pair(folder / "in", f"{number:02}.png", png(20 * number), f"a grey of {number}")
    arguments = ("--latents", components, "--resolution", "8", *more)
    return cli("pack", "in", "out", *arguments, timeout=DEADLINE)


def latent_channels(job: Job, packed: Path, components: Path) -> Path:
    """Provide the job's channels; return that of the shards."""
    channels = job.base / "input" / "data"
    shutil.copytree(packed / "shards", channels / "train")
    (channels / "index").mkdir()
    shutil.copy(packed / "index.parquet", channels / "index")
    (channels / "model").symlink_to(components)
    return channels / "train"
