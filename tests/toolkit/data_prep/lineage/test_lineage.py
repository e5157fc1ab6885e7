"""``sm-train lineage`` follows images from a set of shards to the runs that trained on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER, CheckpointMarker

from tests.conftest import Aws, Cli
from tests.support.cluster.training_jobs import write_shards
from tests.support.deadline import DEADLINE
from tests.toolkit.submit.local.local_runs_in_commands_support import train
from tests.toolkit.submit.local.submit_local_support import write_tiny

pytestmark = pytest.mark.integration

SHARDS, EACH = 2, 20
RUN = "local-runs/tiny"


def follow(cli: Cli, *arguments: str) -> list[dict[str, Any]]:
    done = cli("lineage", "shards", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def all_keys() -> list[str]:
    return [f"{number:04d}" for number in range(SHARDS * EACH)]


@pytest.mark.slow
def test_images_are_followed_through_a_run_and_a_removal(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    """A local run of three steps, of five after a removal, and the same records in S3."""
    write_shards(tmp_path / "shards", shards=SHARDS, each=EACH)
    assert cli("index", "shards").returncode == 0
    run = write_tiny(tmp_path, max_steps=100)
    train(cli, run, "--steps", "3")
    stories = follow(cli, *all_keys())
    assert [story["key"] for story in stories] == all_keys()
    seen = [story["seen"][0] for story in stories]
    assert {(stage["run"], stage["stage"], stage["exact"]) for stage in seen} == {
        ("tiny", "8px", True)
    }
    batch = sum(len(stage["steps"]) for stage in seen) / 3
    assert batch == round(batch) > 0
    image = next(story["key"] for story in stories if story["seen"][0]["steps"])
    steps = next(story["seen"][0]["steps"] for story in stories if story["key"] == image)

    removed = cli("remove", "shards", image, "--yes")
    assert removed.returncode == 0, removed.stderr
    log = train(cli, run, "--steps", "5")
    assert "train: samples removed since the checkpoint: 1 (" in " ".join(log.split())
    [story] = follow(cli, image)
    assert story["removed"] is not None
    assert [(shard["replaced"]) for shard in story["shards"]] == [True]
    assert story["seen"][0]["steps"] == steps
    assert story["seen"][0]["checkpoints"][-1] == 5
    assert story["seen"][0]["components"] == {}  # the tiny model has none
    set_components(tmp_path / RUN / "8px" / "checkpoints" / "step-00000005", {"vae": "1f2e"})
    [story] = follow(cli, image)
    assert story["seen"][0]["components"] == {"vae": "1f2e"}
    assert story["seen"][0]["checkpoints"][-1] == 5
    text = cli("lineage", "shards", image).stdout
    assert "    trained with the frozen components vae 1f2e (sampled)\n" in text
    assert f"{image}: removed " in text
    assert f"  tiny 8px: saw it in step {steps[0]} (1 time until step 5); in " in text
    # The same checkpoint folders in a bucket.
    aws.make_bucket("my-runs")
    folder = tmp_path / RUN / "8px" / "checkpoints"
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"tiny/checkpoints/8px/{path.relative_to(folder).as_posix()}"
            aws.client("s3").put_object(Bucket="my-runs", Key=key, Body=path.read_bytes())
    for place in ("s3://my-runs", "s3://my-runs/tiny"):
        stored = cli(
            *("--region", "us-east-1", "lineage", "shards", image, "--runs", place, "--json"),
            network="loopback",
            env=aws.environment,
            timeout=DEADLINE,
        )
        assert stored.returncode == 0, stored.stderr
        [in_bucket] = json.loads(stored.stdout)
        assert in_bucket["seen"][0]["location"] == "s3://my-runs/tiny/checkpoints/8px"
        assert in_bucket["seen"][0]["steps"] == steps
        assert in_bucket["seen"][0]["components"] == story["seen"][0]["components"]
        assert in_bucket["seen"][0]["checkpoints"] == story["seen"][0]["checkpoints"]


def set_components(checkpoint: Path, components: dict[str, str]) -> None:
    """Write the identities that resumes compare into a complete checkpoint."""
    settings = checkpoint / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"components": components}))
    marker = CheckpointMarker.parse((checkpoint / MARKER).read_bytes())
    files = tuple(
        replace(file, bytes=settings.stat().st_size) if file.name == settings.name else file
        for file in marker.files
    )
    (checkpoint / MARKER).write_text(replace(marker, files=files).to_json())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "nope: neither a key nor an image of"),
        ((), "IMAGE: name images, or give --where; one of both"),
        (("0001", "--where", "TRUE"), "IMAGE: name images, or give --where; one of both"),
        (("0001", "--runs", "elsewhere"), "--runs: elsewhere: no such folder of runs"),
        (("--where", "x = 1"), "--where: the index has no columns"),
    ],
)
def test_mistakes_are_one_line(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_shards(tmp_path / "shards", shards=SHARDS, each=EACH)
    assert cli("index", "shards").returncode == 0
    done = cli("lineage", "shards", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"sm-train: {message}")


def test_unknown_runs_are_not_taken_for_none(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=SHARDS, each=EACH)
    assert cli("index", "shards").returncode == 0
    done = cli("lineage", "shards", "0001")
    assert done.stdout == "0001\n  in shard-000.tar, sample 1\n"
    assert done.stderr == "runs are unknown: name where they are with --runs\n"
