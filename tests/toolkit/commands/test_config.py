"""``config`` and the precedence of defaults: flag, environment, run file, configuration file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.support.run_files import one_line, write_run

ROLE = "arn:aws:iam::345678901234:role/other"


def settings(cli: Cli, *arguments: str | Path, **environment: str) -> dict[str, Any]:
    result = cli("config", "--json", *arguments, env=environment)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["settings"]
    return found


def test_set_unset_and_show(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / ".config" / "sm-train" / "config.toml"
    assert cli("config", "set", "region", "eu-west-1").returncode == 0
    path.write_text("# mine\n" + path.read_text())
    assert cli("config", "set", "bucket", "photos").returncode == 0
    assert cli("config", "set", "region", "us-west-2").returncode == 0
    assert path.read_text() == '# mine\nbucket = "photos"\nregion = "us-west-2"\n'
    assert settings(cli)["region"] == {"value": "us-west-2", "origin": str(path)}
    assert "us-west-2" in cli("config").stdout
    assert cli("config", "unset", "region").returncode == 0
    assert settings(cli)["region"] == {"value": None, "origin": None}


def test_folder_of_xdg_is_used(cli: Cli, tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path / "elsewhere")}
    assert cli("config", "set", "bucket", "photos", env=env).returncode == 0
    assert (tmp_path / "elsewhere" / "sm-train" / "config.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", "regoin", "eu-west-1"], "config: 'regoin' is not a setting; did you mean region?"),
        (["set", "region", "us-est-1"], "config: region: 'us-est-1' is not an AWS region"),
        (["set", "role", "sm-train"], "config: role: 'sm-train' must be a role ARN"),
        (["set", "bucket", "s3://photos"], "config: bucket: 's3://photos' must be a bucket name"),
        (["set", "region"], "config set: write config set KEY VALUE"),
        (["unset"], "config unset: write config unset KEY"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    cli: Cli, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = cli("config", *arguments)
    assert result.returncode == 2
    assert one_line(result.stderr).startswith(f"sm-train: {message}")
    assert not (tmp_path / ".config").exists()


@pytest.mark.parametrize(
    "text", ["region = us-east-1", 'regoin = "us-east-1"', "region = 1", 'region = "us-est-1"']
)
def test_damaged_file_is_named_by_every_command_that_needs_it(
    cli: Cli, tmp_path: Path, text: str
) -> None:
    path = tmp_path / ".config" / "sm-train" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    result = cli("list")
    assert result.returncode == 2
    assert one_line(result.stderr).startswith(f"sm-train: {path}: ")


def test_precedence_of_the_region(cli: Cli, tmp_path: Path) -> None:
    """--region, SM_TRAIN_REGION, the run file, AWS_REGION, the configuration file."""
    run = write_run(tmp_path, region="us-west-1")
    without = tmp_path / "without.yaml"
    without.write_text(run.read_text().replace("region: us-west-1\n", ""))
    cli("config", "set", "region", "eu-west-1")

    def used(*arguments: str | Path, **environment: str) -> str:
        result = cli("image", "--json", *arguments, env=environment)
        assert result.returncode == 0, result.stderr
        region: str = json.loads(result.stdout)["region"]
        return region

    assert used(without) == "eu-west-1"
    assert used(without, AWS_REGION="eu-west-2") == "eu-west-2"
    assert used(run, AWS_REGION="eu-west-2") == "us-west-1"
    assert used(run, SM_TRAIN_REGION="us-east-2") == "us-east-2"
    assert used(run, "--region", "us-west-2", SM_TRAIN_REGION="us-east-2") == "us-west-2"


def test_precedence_of_the_role_and_the_bucket(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    without = tmp_path / "without.yaml"
    without.write_text(
        "".join(
            line
            for line in run.read_text().splitlines(keepends=True)
            if not line.startswith(("role:", "bucket:"))
        )
    )
    cli("config", "set", "role", ROLE)
    cli("config", "set", "bucket", "photos")

    def used(*arguments: str | Path, **environment: str) -> tuple[str, str]:
        result = cli("submit", "--dry-run", "--json", *arguments, env=environment)
        assert result.returncode == 0, result.stderr
        [request] = json.loads(result.stdout)["requests"]
        return request["RoleArn"], request["CheckpointConfig"]["S3Uri"].split("/")[2]

    own = "arn:aws:iam::210987654321:role/sm-train"
    assert used(without) == (ROLE, "photos")
    assert used(run) == (own, "ai-bucket")
    assert used(run, SM_TRAIN_BUCKET="others") == (own, "others")
    assert used(run, "--set", "bucket=third", SM_TRAIN_BUCKET="others") == (own, "third")
    refused = cli("submit", run, "--dry-run", env={"SM_TRAIN_ROLE": "sm-train"})
    assert refused.returncode == 2
    assert one_line(refused.stderr).startswith("sm-train: SM_TRAIN_ROLE: 'sm-train' must be a role")


def test_origin_of_each_value_is_shown(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    cli("config", "set", "profile", "work")
    found = settings(cli, "--run", run, "--region", "us-west-2", SM_TRAIN_BUCKET="others")
    assert {key: value["origin"] for key, value in found.items()} == {
        "region": "--region",
        "profile": str(tmp_path / ".config" / "sm-train" / "config.toml"),
        "role": str(run),
        "bucket": "SM_TRAIN_BUCKET",
    }
