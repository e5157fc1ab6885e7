"""Channels of a local run hold what SageMaker would put into them, and are read-only."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import yaml
from sm_train.toolkit.submit.local.emulated_channels import LocalChannel
from sm_train.toolkit.submit.local.read_only import read_only_command

from tests.conftest import Cli
from tests.support.capabilities import skip_or_fail
from tests.support.cluster.training_jobs import write_shards
from tests.toolkit.submit.local.submit_local_support import write_tiny


def write_files(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x")


@pytest.mark.parametrize(
    ("uri", "folder", "expected"),
    [
        # The slash that the run file's validation adds is what keeps others out.
        ("s3://b/shards/", "shards", {"0.tar", "deep/1.tar"}),
        ("s3://b/shards", "shards", {"0.tar", "deep/1.tar", "shards-old/9.tar", "shards.txt"}),
        ("s3://b/index.parquet", ".", {"index.parquet", "index.parquet.1"}),
    ],
)
def test_channel_is_a_string_prefix(
    tmp_path: Path, uri: str, folder: str, expected: set[str]
) -> None:
    write_files(tmp_path, "shards/0.tar", "shards/deep/1.tar", "shards-old/9.tar", "shards.txt")
    write_files(tmp_path, "index.parquet", "index.parquet.1", "other/index.parquet")
    files = LocalChannel("train", tmp_path / folder, uri).node_files(0, 1)
    assert files.keys() == expected
    assert all(file.name == Path(path).name and file.is_file() for path, file in files.items())


def test_sharded_channel_gives_each_file_to_one_node(tmp_path: Path) -> None:
    """A file among the shards takes the place of one, as with ShardedByS3Key."""
    write_files(tmp_path, "s/0.tar", "s/README", "s/1.tar", "s/2.tar")
    channel = LocalChannel("train", tmp_path / "s", "s3://b/s/", "FastFile", sharded=True)
    shares = [[*channel.node_files(rank, 2)] for rank in (0, 1)]
    assert shares == [["0.tar", "2.tar"], ["1.tar", "README"]]


SCRIPT = """
import json
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
paths = SageMakerPaths.from_environment()
seen = {}
for channel in sorted(paths.channel("train").parent.iterdir()):
    files = sorted(path for path in channel.rglob("*") if path.is_file())
    errors = []
    for target in (channel / "new", files[0]):
        try:
            target.write_bytes(b"changed")
        except OSError as error:
            errors.append(error.errno)
    seen[channel.name] = [path.name for path in files], errors
config = json.loads((paths.input_config / "inputdataconfig.json").read_text())
(paths.checkpoints / paths.base.name).write_text(json.dumps([seen, config]))
"""


@pytest.mark.integration
def test_script_sees_its_nodes_files_and_cannot_change_them(cli: Cli, tmp_path: Path) -> None:
    if not read_only_command([tmp_path]):
        skip_or_fail("this system permits no mount namespaces")
    write_shards(tmp_path / "shards", shards=2, each=2)
    write_files(tmp_path, "masks/a.png", "masks/b.png", "masks/c.png", "lists/words.txt")
    write_files(tmp_path, "lists/words.txt.old", "lists/other.txt", "code/own.py")
    (tmp_path / "code/own.py").write_text(SCRIPT)
    run = write_tiny(tmp_path, max_steps=1)
    document = yaml.safe_load(run.read_text()) | {
        "code": "code",
        "entry": "own.py",
        "channels": {
            "masks": {"uri": "s3://own/masks", "local": "masks", "sharded": True},
            "words": {"uri": "s3://own/words.txt", "local": "lists", "mode": "File"},
        },
    }
    run.write_text(yaml.safe_dump(document))
    result = cli("submit", run, "--local", "--nodes", "2", network="loopback")
    assert result.returncode == 0, result.stderr
    checkpoints = tmp_path / "local-runs" / document["name"] / "8px" / "checkpoints"
    read_only = [errno.EROFS, errno.EROFS]
    for host, masks in (("algo-1", ["a.png", "c.png"]), ("algo-2", ["b.png"])):
        seen, config = json.loads((checkpoints / host).read_text())
        assert seen["masks"] == [masks, read_only]
        assert seen["words"] == [["words.txt", "words.txt.old"], read_only]
        assert seen["train"][1] == read_only
        assert config["masks"] == {
            "TrainingInputMode": "FastFile",
            "S3DistributionType": "ShardedByS3Key",
        }
        assert config["words"]["TrainingInputMode"] == "File"
    assert (tmp_path / "masks/a.png").read_bytes() == b"x"
