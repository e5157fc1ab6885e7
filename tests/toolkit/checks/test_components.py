"""``check`` reads pretrained components on disk, in S3 and on the Hub, by ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sm_train.toolkit.checks.components import stored_components_findings
from sm_train.toolkit.checks.finding import Finding

from tests.conftest import Cli
from tests.support.models.components import Files, published, safetensors
from tests.support.models.hub_server import hub_server
from tests.support.moto_server import Aws, aws_session
from tests.support.run_documents import config
from tests.support.run_files import write_run


def write(folder: Path, files: Files) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def components(cli: Cli, run: Path, *arguments: str, **options: Any) -> list[dict[str, str]]:
    """Return the findings about components; the run itself has none."""
    result = cli("check", run, "--offline", "--json", *arguments, **options)
    assert result.returncode in (0, 3), result.stderr
    document = json.loads(result.stdout)
    found = [finding for finding in document["findings"] if finding["code"] == "components"]
    assert document["ok"] == (not found)
    return found


def test_local_components_are_checked(cli: Cli, tmp_path: Path) -> None:
    model = {"preset": "sd2", "local_components": "model", "prediction_type": "v_prediction"}
    run = write_run(tmp_path, model=model)
    # The folder may be on another computer.
    assert components(cli, run) == []
    write(tmp_path / "model", published("sd2"))
    assert components(cli, run) == []
    write(tmp_path / "model", published("sd2", prediction_type="epsilon"))
    [found] = components(cli, run)
    assert found["where"] == "model.local_components"
    assert "model.prediction_type: the run file says v_prediction" in found["message"]
    assert found["fix"] == "remove it from the run file, or use other components"


@pytest.mark.integration
def test_a_hub_repository_is_checked_before_it_is_copied(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, model={"preset": "sdxl"})
    with hub_server() as hub:
        hub.repositories["org/sd2"] = published("sd2")
        hub.repositories["org/sdxl"] = published("sdxl")
        options = {"network": "loopback", "env": hub.environment(str(tmp_path / "hf"))}
        assert components(cli, run, "--components", "org/sdxl@v1", **options) == []
        found = components(cli, run, "--components", "org/sd2", **options)
        result = cli("check", run, "--offline", "--components", "org/none", **options)
    assert found[0]["where"] == "--components"
    assert any("unet: is not the preset's network" in finding["message"] for finding in found)
    assert result.returncode == 4
    assert "org/none: no such repository" in result.stderr


@pytest.fixture
def stored(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Any:
    for key, value in aws.environment.items():
        monkeypatch.setenv(key, value)

    def check(files: Files) -> list[Finding]:
        aws.make_bucket("models", **{f"sd2/{path}": content for path, content in files.items()})
        run = config(model={"preset": "sd2", "components": "s3://models/sd2/"})
        return list(stored_components_findings(run, aws_session()))

    return check


def test_components_in_s3_are_read_by_ranges(stored: Any, aws: Aws) -> None:
    weights = "unet/diffusion_pytorch_model.safetensors"
    large = {weights: safetensors(weight=(1000, 1000))}
    assert stored(published("sd2") | large) == []
    assert ("GET", f"/models/sd2/{weights}", "") in aws.requests
    reads = [path for method, path, _ in aws.requests if path.endswith(weights) and method == "GET"]
    assert len(reads) == 2  # the length of the header, and the header


def test_a_truncated_file_in_s3_is_found(stored: Any) -> None:
    weights = "unet/diffusion_pytorch_model.safetensors"
    [found] = stored(published("sd2") | {weights: published("sd2")[weights][:-1]})
    assert (found.level, found.where) == ("error", "model.components")
    assert f"s3://models/sd2/: {weights} has " in found.message
    assert found.fix == "copy the model again"
