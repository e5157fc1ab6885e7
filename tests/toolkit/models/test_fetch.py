"""``sm-train fetch-model``: a model of the Hub in a folder or in S3, with digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    LocalComponents,
    manifest_problems,
    read_manifest,
    require_digests,
)

from tests.conftest import Cli
from tests.support.models.components import published, safetensors
from tests.support.models.hub_server import COMMIT, TOKEN, Hub, hub_server
from tests.support.moto_server import Aws

NAME = "org/model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.repositories[NAME] = published("tiny-sdxl") | {
            "unet/diffusion_pytorch_model.bin": b"pickle",
            "unet/model.onnx": b"onnx",
            "safety_checker/model.safetensors": b"unused",
            "LICENSE.md": b"terms",
            "README.md": b"card",
        }
        yield server


@pytest.fixture
def environment(hub: Hub, aws: Aws, tmp_path: Path) -> dict[str, str]:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    return aws.environment | hub.environment(str(tmp_path / "hf")) | cache


def expected_files(hub: Hub) -> dict[str, bytes]:
    left_out = ("unet/diffusion_pytorch_model.bin", "unet/model.onnx", "README.md")
    return {
        path: content
        for path, content in hub.repositories[NAME].items()
        if path not in left_out and not path.startswith("safety_checker")
    }


@pytest.mark.integration
def test_a_folder_gets_what_training_needs(
    cli: Cli, tmp_path: Path, hub: Hub, environment: dict[str, str]
) -> None:
    arguments = ["fetch-model", NAME, tmp_path / "model", "--revision", "v1", "--json"]
    result = cli(*arguments, network="loopback", env=environment)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "model"
    copied = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "sm-train-model.json"
    }
    assert copied == expected_files(hub)
    manifest = read_manifest(LocalComponents(folder))
    assert manifest is not None
    assert (manifest.repository, manifest.revision) == (NAME, COMMIT)
    assert {path: entry.sha256 for path, entry in manifest.files.items()} == {
        path: hashlib.sha256(content).hexdigest() for path, content in copied.items()
    }
    require_digests(folder, manifest)
    assert list(manifest_problems(LocalComponents(folder))) == []
    assert json.loads(result.stdout)["revision"] == COMMIT
    assert TOKEN not in result.stdout + result.stderr
    assert list(tmp_path.glob(".model*")) == []
    # After an interrupt that came when the copy was complete, the command is given again.
    hub.requests.clear()
    again = cli(*arguments, network="loopback", env=environment)
    assert again.returncode == 0, again.stderr
    assert "already copied" in again.stderr
    assert not [path for _, path in hub.requests if path.endswith(".safetensors")]
    next(folder.rglob("*.safetensors")).unlink()
    refused = cli(*arguments, network="loopback", env=environment)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "exists; remove it or name another folder" in refused.stderr


@pytest.mark.slow
def test_s3_gets_the_same_and_a_second_run_copies_nothing(
    cli: Cli, tmp_path: Path, hub: Hub, aws: Aws, environment: dict[str, str]
) -> None:
    aws.make_bucket("models")
    aws.required_keys["models"] = "alias/models"
    arguments = ["fetch-model", NAME, "s3://models/sdxl", "--bucket-kms-key", "models=alias/models"]
    result = cli(*arguments, network="loopback", env=environment)
    assert result.returncode == 0, result.stderr
    s3 = aws.client("s3")
    listed = {
        entry["Key"].removeprefix("sdxl/")
        for entry in s3.list_objects_v2(Bucket="models")["Contents"]
    }
    assert listed == {*expected_files(hub), "sm-train-model.json"}
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    sent = hub.sent
    assert cli(*arguments, network="loopback", env=environment).returncode == 0
    # Only model_index.json and indexes are read to plan the copy.
    assert hub.sent - sent < 5_000


def test_an_interrupted_copy_continues(
    cli: Cli, tmp_path: Path, hub: Hub, environment: dict[str, str]
) -> None:
    large = "unet/diffusion_pytorch_model.safetensors"
    hub.repositories[NAME][large] = safetensors(weight=(100, 100))
    hub.cut_after = 20_000
    arguments = ["fetch-model", NAME, tmp_path / "model"]
    result = cli(*arguments, network="loopback", env=environment)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "model").exists()
    hub.requests.clear()
    result = cli(*arguments, network="loopback", env=environment)
    assert result.returncode == 0, result.stderr
    fetched = [path for method, path in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(fetched) < len(expected_files(hub))


def test_half_precision_is_chosen_on_request(
    cli: Cli, tmp_path: Path, hub: Hub, environment: dict[str, str]
) -> None:
    files = hub.repositories[NAME]
    files["vae/diffusion_pytorch_model.fp16.safetensors"] = files[
        "vae/diffusion_pytorch_model.safetensors"
    ]
    arguments = ["fetch-model", NAME, tmp_path / "m", "--dry-run", "--json"]
    for option, name in (([], "model.safetensors"), (["--fp16"], "model.fp16.safetensors")):
        result = cli(*arguments, *option, network="loopback", env=environment)
        assert result.returncode == 0, result.stderr
        planned = json.loads(result.stdout)["files"]
        assert [path for path in planned if path.startswith("vae/diff")] == [
            f"vae/diffusion_pytorch_{name}"
        ]
    assert not (tmp_path / "m").exists()


def test_refusals_are_one_line(
    cli: Cli, tmp_path: Path, hub: Hub, environment: dict[str, str]
) -> None:
    hub.repositories["org/gated"] = {}
    hub.gated.add("org/gated")
    hub.repositories["org/pickle"] = {
        "model_index.json": b'{"vae": ["diffusers", "AutoencoderKL"]}',
        "vae/config.json": b"{}",
        "vae/diffusion_pytorch_model.bin": b"pickle",
    }
    for arguments, message in (
        (["org/gated", "m"], "the model is gated; accept its license"),
        (["org/none", "m"], "no such repository, or it is private"),
        ([NAME, "m", "--revision", "none"], "no such revision"),
        (["org/pickle", "m"], "only pickled weights"),
    ):
        result = cli("fetch-model", *arguments, network="loopback", env=environment)
        assert result.returncode != 0
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "m").exists()


def test_a_changed_file_is_found(
    cli: Cli, tmp_path: Path, hub: Hub, environment: dict[str, str]
) -> None:
    assert not cli(
        "fetch-model", NAME, tmp_path / "model", network="loopback", env=environment
    ).returncode
    folder = tmp_path / "model"
    config = folder / "vae" / "config.json"
    config.write_bytes(config.read_bytes().replace(b"}", b" }"))
    config.write_bytes(config.read_bytes()[:-1])
    [problem] = manifest_problems(LocalComponents(folder))
    assert problem.startswith("vae/config.json: the digest does not match")
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    manifest = read_manifest(LocalComponents(folder))
    assert manifest is not None
    with pytest.raises(ComponentFileError, match="has changed since it was copied"):
        require_digests(folder, manifest)
