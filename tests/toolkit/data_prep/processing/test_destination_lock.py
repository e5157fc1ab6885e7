"""One pack at a time writes to a destination: the second is refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.data_prep.work.work_stages import LEASE_NAME
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.processing.destination_lock import lock_destination

from tests.conftest import Aws, Cli
from tests.support.image_files import write_album
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.pack_options_support import read_objects, upload_folder


def test_a_folder_is_locked_while_a_pack_runs_and_left_as_it_was(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "new" / "packed")
    with lock_destination(folder):
        assert folder.size(LEASE_NAME)
        refused = pytest.raises(
            UserError, match="another sm-train command is writing to it: process"
        )
        with refused, lock_destination(folder):
            pass
    assert list(folder.path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), lock_destination(LocalFolder(tmp_path / "other" / "x")):
        raise ZeroDivisionError
    assert not (tmp_path / "other").exists()


@pytest.mark.integration
def test_a_second_pack_is_refused_before_it_starts(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    upload_folder(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    aws.make_bucket("ai-bucket")
    run = write_run(tmp_path, bucket="ai-bucket")

    def pack(*options: object) -> Any:
        arguments = ("--region", "us-east-1", "pack", "s3://raw/photos/", "s3://packed/set")
        return cli(*arguments, *options, network="loopback", env=aws.environment, timeout=120)

    job = ("--on", "sagemaker", "--for", run, "--yes")
    started = pack(*job)
    assert started.returncode == 0, started.stderr
    [body] = aws.bodies("CreateProcessingJob")
    before = read_objects(aws, "packed", "")
    for second in (pack(), pack(*job)):
        assert (second.returncode, second.stderr.strip().splitlines()[-1]) == (
            2,
            "sm-train: s3://packed/set: another sm-train command is writing to it: the processing "
            f"job {body['ProcessingJobName']}",
        )
    assert len(aws.bodies("CreateProcessingJob")) == 1
    assert read_objects(aws, "packed", "") == before
