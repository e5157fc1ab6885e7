"""The run file's ``trackers``: both forms, and no place for a key."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError
from sm_train.entrypoints.job_interface.job_config import JOB_FILE, TrackerConfig
from sm_train.estimators.bundle.bundle import build_bundle, rebuild_bundle
from sm_train.estimators.config.load import RunFileError, load_run
from sm_train.estimators.config.schema import RunConfig

from tests.support.run_documents import config, run

_NOT_SHOWN = r"trackers.wandb.secret: \(not shown\): is a key"
ARN = "arn:aws:sagemaker:us-east-1:111122223333:mlflow-tracking-server/ours"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([], ()),
        (["wandb", "tensorboard"], (TrackerConfig("tensorboard"), TrackerConfig("wandb"))),
        (
            {"tensorboard": None, "mlflow": {}},
            (TrackerConfig("tensorboard"), TrackerConfig("mlflow")),
        ),
        (
            {"wandb": {"project": "p", "entity": "team", "secret": "wandb/key"}},
            (TrackerConfig("wandb", "p", "team", None, "wandb/key"),),
        ),
        (
            {"mlflow": {"uri": ARN, "experiment": "e"}},
            (TrackerConfig("mlflow", "e", None, ARN, None),),
        ),
    ],
)
def test_a_list_or_a_mapping_reaches_the_job(
    written: Any, expected: tuple[TrackerConfig, ...]
) -> None:
    jsonschema.validate(run(trackers=written), RunConfig.model_json_schema())
    assert config(trackers=written).trackers.job_config() == expected
    # The bundle's run document can be loaded again.
    again = RunConfig.model_validate(config(trackers=written).model_dump(mode="json"))
    assert again.trackers.job_config() == expected


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (["wandb", "wandb"], "names a tracker twice"),
        (["neptune"], "neptune"),
        ({"wandb": {"api_key": "x"}}, "api_key"),
        ({"wandb": {"base_url": "http://wandb.example.com"}}, "must be an https:// address"),
        ({"mlflow": {"uri": "https://me:word@example.com"}}, "must not contain credentials"),
        ({"mlflow": {"uri": "/mnt/mlruns"}}, "uri"),
        ({"wandb": {"project": "a/b"}}, "project"),
        ({"wandb": {"secret": "0123456789abcdef" * 2 + "01234567"}}, "is a key itself"),
    ],
)
def test_unusable_settings_are_refused(written: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        config(trackers=written)


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar.getmembers())
        return {name: file.read() for name, file in files if file is not None}


def test_the_bundle_holds_the_packages_of_the_trackers_in_use() -> None:
    plain = build_bundle(config(), None)
    assert not any(file.path.startswith("requirements-") for file in plain.files)
    used = config(trackers={"wandb": {"secret": "wandb/key"}})
    files = contents(build_bundle(used, None).archive)
    assert [name for name in files if name.startswith("requirements-")] == [
        "requirements-wandb.txt"
    ]
    assert b"\nwandb==" in files["requirements-wandb.txt"]
    assert b"wandb" not in files["requirements.txt"]
    assert json.loads(files[JOB_FILE])["256px"]["trackers"][0]["secret"] == "wandb/key"
    # Also in a clone of an earlier run without trackers.
    cloned = rebuild_bundle(plain.archive, used, None, same_image=True)
    assert "requirements-wandb.txt" in contents(cloned.archive)


def test_an_isolated_container_gets_no_packages() -> None:
    isolated = {
        "instance_type": "ml.p4de.24xlarge",
        "network_isolation": True,
        "image": "111122223333.dkr.ecr.us-east-1.amazonaws.com/own:1",
    }
    bundle = build_bundle(config(cluster=isolated, trackers=["tensorboard"]), None)
    assert not any(file.path.startswith("requirements") for file in bundle.files)


def test_a_key_in_the_run_file_is_refused_and_not_shown(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run(trackers={"wandb": {"secret": key}})))
    with pytest.raises(RunFileError, match=_NOT_SHOWN) as no:
        load_run(path)
    assert key not in str(no.value)


def test_names_of_secrets_are_no_credentials(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    trackers = {"wandb": {"secret": "team/wandb-3"}}
    names = run(alerts={"slack_secret": "team/slack-2"}, trackers=trackers)
    path.write_text(yaml.safe_dump(names))
    files = contents(build_bundle(load_run(path), None).archive)
    assert b"team/slack-2" in files[JOB_FILE]
