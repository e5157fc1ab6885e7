"""Without credentials every command says in one line how to get them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.support.run_files import one_line


@pytest.mark.parametrize(
    "arguments",
    [
        ("data-report", "s3://my-bucket/shards/"),
        ("lineage", "s3://my-bucket/shards/", "004.jpg"),
        ("remove", "s3://my-bucket/shards/", "004.jpg", "--dry-run"),
        ("status", "demo", "--region", "us-east-1"),
    ],
)
def test_commands_without_credentials_name_the_remedy(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    none = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": str(tmp_path / "none")}
    done = cli(*arguments, network="loopback", env=none)
    assert done.returncode == 4, done.stderr
    assert one_line(done.stderr).startswith("sm-train: AWS credentials: none found; run `aws")
