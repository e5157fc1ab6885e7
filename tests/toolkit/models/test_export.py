"""``sm-train export`` of local checkpoints, of checkpoints in S3, and to the Hub."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.job_interface.checkpoint_layout import shard_file_name

from tests.conftest import Cli
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.models import build, write_checkpoint
from tests.support.models.hub_server import TOKEN, Hub, hub_server
from tests.support.moto_server import Aws
from tests.support.run_documents import stage
from tests.support.run_files import write_run

pytestmark = pytest.mark.integration

STEP = "step-00000003"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage's checkpoints, as a job leaves them that was stopped."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(build("tiny-sd2"), folder)
    (folder / "samples").mkdir()
    (folder / "samples" / f"{STEP}.png").write_bytes(b"PNG of step 3")
    (folder / "samples" / "step-00000009.png").write_bytes(b"PNG of a later step")
    return folder


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


def put(aws: Aws, folder: Path, prefix: str = "run/s1/checkpoints", bucket: str = "models") -> str:
    """Upload ``folder``; return its URI."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    contents = {f"{prefix}/{path.relative_to(folder)}": path.read_bytes() for path in files}
    aws.make_bucket(bucket, **contents)
    return f"s3://{bucket}/{prefix}"


def put_run(aws: Aws, folder: Path, checkpoints: Path) -> tuple[Path, str]:
    """Write a run of two stages, of which the first has ``checkpoints``; return both."""
    FakeSageMaker(aws)
    run = write_run(folder, stages=[stage("256px"), stage("512px")])
    return run, put(aws, checkpoints, "demo/checkpoints/256px", bucket="ai-bucket")


def test_a_key_that_leads_out_of_the_folder_is_refused(
    cli: Cli, aws: Aws, tmp_path: Path, checkpoints: Path
) -> None:
    """Whoever may write to the bucket would otherwise write any file of this machine."""
    uri = put(aws, checkpoints)
    target = tmp_path / "written"
    key = f"run/s1/checkpoints/{STEP}/{target}"
    aws.client("s3").put_object(Bucket="models", Key=key, Body=b"attack")
    env = {**aws.environment, "AWS_DEFAULT_REGION": "us-east-1"}
    result = cli("export", uri, tmp_path / "model", network="loopback", env=env)
    assert result.returncode == 3, result.stderr
    assert f"the key '{key}' leads out of its folder; remove the object" in result.stderr
    assert not target.exists()
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_a_stopped_run_becomes_a_model_with_card_and_samples(
    cli: Cli, tmp_path: Path, checkpoints: Path
) -> None:
    result = cli("export", checkpoints, tmp_path / "model", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"wrote {tmp_path}/model from {checkpoints}/{STEP}\n"
    document = json.loads(result.stdout)
    assert document["source"] == f"{checkpoints}/{STEP}"
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert (tmp_path / "model" / "samples.png").read_bytes() == b"PNG of step 3"
    assert "![Samples" in (tmp_path / "model" / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("target", ["checkpoints", "step"])
def test_a_checkpoint_in_s3_is_downloaded_and_exported(
    cli: Cli, tmp_path: Path, checkpoints: Path, aws: Aws, target: str
) -> None:
    uri = put(aws, checkpoints) + (f"/{STEP}" if target == "step" else "")
    arguments = ["export", uri, tmp_path / "m.safetensors", "--format", "single-file"]
    result = cli(*arguments, network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    assert re.search(r"downloading \d\.\d+ MB from s3:", result.stderr)
    assert (tmp_path / "m.safetensors").stat().st_size > 500_000
    assert {path.name for path in tmp_path.iterdir()} == {"m.safetensors"}


@pytest.mark.slow
def test_an_interrupted_download_continues(
    cli: Cli, tmp_path: Path, checkpoints: Path, aws: Aws
) -> None:
    uri = put(aws, checkpoints)
    shard = shard_file_name(1)
    content = (checkpoints / STEP / shard).read_bytes()
    etag = (
        aws.client("s3")
        .head_object(Bucket="models", Key=f"run/s1/checkpoints/{STEP}/{shard}")["ETag"]
        .strip('"')
    )
    download = tmp_path / ".model.export" / "download" / STEP
    download.mkdir(parents=True)
    shutil.copyfile(checkpoints / STEP / shard_file_name(0), download / shard_file_name(0))
    (download / f"{shard}.part-{etag}").write_bytes(content[:100_000])
    result = cli("export", uri, tmp_path / "model", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    read = [path for method, path, _ in aws.requests if method == "GET"]
    assert not any(path.endswith(shard_file_name(0)) for path in read)
    assert sum(path.endswith(shard) for path in read) == 1
    assert (tmp_path / "model" / "model_index.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "damage"),
    [
        ("local", "bit"),
        ("s3", "missing"),
        *(
            pytest.param(*fault, marks=pytest.mark.slow)
            for fault in (
                ("local", "missing"),
                ("local", "marker"),
                ("s3", "bit"),
                ("s3", "marker"),
            )
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_one_line(
    cli: Cli, tmp_path: Path, checkpoints: Path, aws: Aws, place: str, damage: str
) -> None:
    folder = shutil.copytree(checkpoints, tmp_path / "copy")
    shard = folder / STEP / shard_file_name(1)
    if damage == "bit":
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    elif damage == "missing":
        shard.unlink()
    else:
        (folder / STEP / "complete.json").unlink()
    uri = put(aws, folder) if place == "s3" else folder
    arguments = ["export", f"{uri}/{STEP}", tmp_path / "model"]
    result = cli(*arguments, network="loopback", env=aws.environment)
    assert result.returncode in (2, 3)
    assert len(result.stderr.strip().splitlines()) == (2 if (place, damage) == ("s3", "bit") else 1)
    expected = {"bit": "the digest of", "missing": "is missing", "marker": "no complete.json"}
    assert expected[damage] in result.stderr
    assert str(uri) in result.stderr.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


@pytest.mark.slow
def test_sample_and_compare_take_what_export_takes(
    cli: Cli, tmp_path: Path, checkpoints: Path, aws: Aws
) -> None:
    """An address and a run's name; addresses are shown as they were given."""
    run, uri = put_run(aws, tmp_path, checkpoints)
    (tmp_path / "prompts.txt").write_text("a grey of 3\n")
    before = {path.name for path in tmp_path.iterdir()}
    environment = {**aws.environment, "AWS_DEFAULT_REGION": "us-east-1"}
    options: dict[str, Any] = {"network": "loopback", "env": environment, "cwd": tmp_path}
    more = ["--prompts", "prompts.txt", "--steps", "1"]
    result = cli("sample", run, "--stage", "256px", *more, **options)
    assert result.returncode == 0, result.stderr
    assert f"wrote 1 images from {uri}/{STEP} to grid.png" in result.stderr
    # The same noise and the same weights: the local checkpoint gives the same image.
    cli("sample", checkpoints, *more, "--out", "local.png", **options)
    assert (tmp_path / "local.png").read_bytes() == (tmp_path / "grid.png").read_bytes()
    result = cli("compare", uri, checkpoints, *more, **options)
    assert result.returncode == 0, result.stderr
    assert uri in (tmp_path / "compare.html").read_text()
    written = {path.name for path in tmp_path.iterdir()} - before
    assert written == {"grid.png", "local.png", "compare.html"}


@pytest.mark.slow
def test_a_damaged_download_is_named_by_its_address_and_removed(
    cli: Cli, tmp_path: Path, checkpoints: Path, aws: Aws
) -> None:
    copy = shutil.copytree(checkpoints, tmp_path / "copy")
    weights = copy / STEP / shard_file_name(0)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    uri = put(aws, copy)
    (tmp_path / "prompts.txt").write_text("a grey of 3\n")
    options: dict[str, Any] = {"network": "loopback", "env": aws.environment, "cwd": tmp_path}
    result = cli("sample", uri, "--prompts", "prompts.txt", **options)
    assert result.returncode != 0
    assert uri in result.stderr.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "prompts.txt"}


def test_names_of_runs_and_stages_are_resolved(cli: Cli, tmp_path: Path, aws: Aws) -> None:
    result = cli(
        "--region",
        "us-east-1",
        "export",
        "nothing",
        tmp_path / "m",
        network="loopback",
        env=aws.environment,
    )
    assert result.returncode == 2
    assert "nothing: neither a run file here nor a run or job of sm-train" in result.stderr


def test_the_last_stage_with_a_checkpoint_is_exported(
    cli: Cli, tmp_path: Path, checkpoints: Path, aws: Aws
) -> None:
    """A run file names the run as its name does."""
    run, uri = put_run(aws, tmp_path, checkpoints)
    environment = {**aws.environment, "AWS_DEFAULT_REGION": "us-east-1"}

    def export(*arguments: str) -> subprocess.CompletedProcess[str]:
        out = tmp_path / "model"
        options: dict[str, Any] = {"network": "loopback", "env": environment}
        return cli("export", run, out, "--dry-run", "--json", *arguments, **options)

    for arguments in ([], ["--stage", "256px"]):
        result = export(*arguments)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["source"] == f"{uri}/{STEP}"
    result = export("--stage", "512px")
    assert result.returncode == 3
    assert "demo: stage 512px has no complete checkpoint" in result.stderr
    assert "--stage: 'x' is not one of 256px, 512px" in export("--stage", "x").stderr


@pytest.mark.slow
def test_what_cannot_be_written_is_refused_first(
    cli: Cli, tmp_path: Path, checkpoints: Path
) -> None:
    (tmp_path / "there").mkdir()
    for arguments, message in (
        ([checkpoints, tmp_path / "there"], "exists; remove it or name another"),
        ([checkpoints, tmp_path / "no" / "m"], "no such folder; create it first"),
        ([checkpoints, tmp_path / "m", "--format", "single-file"], "name the single file *.safe"),
        ([checkpoints, tmp_path / "m", "--stage", "s"], "--stage: applies to the name of a run"),
        ([tmp_path / "there", tmp_path / "m"], "holds no model and no checkpoint"),
        ([checkpoints, tmp_path / "m", "--push-to-hub", "a/b"], "--push-to-hub: no token"),
    ):
        result = cli("export", *arguments)
        assert result.returncode != 0
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_the_model_is_pushed_to_the_hub(
    cli: Cli, tmp_path: Path, checkpoints: Path, hub: Hub
) -> None:
    arguments = ["export", checkpoints, tmp_path / "model", "--push-to-hub", "org/tiny", "--json"]
    environment = hub.environment(str(tmp_path / "hf"))
    result = cli(*arguments, "--private", network="loopback", env=environment)
    assert result.returncode == 0, result.stderr
    pushed = hub.repositories["org/tiny"]
    local = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert pushed == {str(p.relative_to(tmp_path / "model")): p.read_bytes() for p in local}
    assert hub.private["org/tiny"]
    assert hub.tokens == {TOKEN}
    assert TOKEN not in result.stdout + result.stderr
    assert json.loads(result.stdout)["commit_url"].startswith(f"{hub.url}/org/tiny/commit/")


def test_a_hub_that_cannot_be_reached_is_one_line(
    cli: Cli, tmp_path: Path, checkpoints: Path, hub: Hub
) -> None:
    environment = hub.environment(str(tmp_path / "hf")) | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    arguments = ["export", checkpoints, tmp_path / "model", "--push-to-hub", "org/tiny"]
    result = cli(*arguments, network="loopback", env=environment)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "--push-to-hub org/tiny: " in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_dry_run_writes_nothing(cli: Cli, tmp_path: Path, checkpoints: Path, aws: Aws) -> None:
    uri = put(aws, checkpoints)
    arguments = ["export", uri, tmp_path / "model", "--dry-run", "--json"]
    result = cli(*arguments, network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["download_bytes"] > 1_000_000
    assert "MB to download" in result.stderr
    assert list(tmp_path.iterdir()) == []
