"""Helpers of the tests of on sagemaker, which other tests use as well."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.conftest import Aws, Cli, clean_environment
from tests.toolkit.data_prep.packing.pack_options_support import (
    read_objects,
)


def printed_policies(cli: Cli, run: Path, *options: str) -> dict[str, Any]:
    """Return what ``iam --on sagemaker`` prints."""
    printed = cli("iam", run, "--json", "--on", "sagemaker", *options)
    assert printed.returncode == 0, printed.stderr
    documents: dict[str, Any] = json.loads(printed.stdout)
    return documents


NODE = """
import sys
from importlib import import_module
from sm_train.entrypoints.storage import lease
from sm_train.entrypoints.data_prep.work import work_stages
if (expires := float(sys.argv.pop())):
    lease.EXPIRES_SECONDS, lease.RENEW_SECONDS = expires, expires / 6
    work_stages.POLL_SECONDS = 0.5
import_module(sys.argv.pop()).main()
"""


def start_node(
    folder: Path, aws: Aws, body: dict[str, Any], rank: int, *, expires: float = 0.0
) -> subprocess.Popen[str]:
    """Start a node as SageMaker does: with the inputs and the code bundle, and nothing else.

    ``expires`` are the seconds until its claims expire, if not the default.
    """
    base = folder / f"node-{rank}"
    for channel in body["ProcessingInputs"]:
        bucket, _, prefix = channel["S3Input"]["S3Uri"].removeprefix("s3://").partition("/")
        target = base / channel["S3Input"]["LocalPath"].removeprefix("/opt/ml/")
        for name, content in read_objects(aws, bucket, f"{prefix}/").items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
    (base / "config").mkdir()
    hosts = ["algo-1", "algo-2"]
    resources = {"current_host": hosts[rank], "hosts": hosts}
    (base / "config/resourceconfig.json").write_text(json.dumps(resources))
    archive = base / "processing/input/code/sourcedir.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        tar.extractall(base / "code", filter="data")
    module = body["AppSpecification"]["ContainerEntrypoint"][-1].rpartition(" ")[2]
    return subprocess.Popen(
        [sys.executable, "-c", NODE, "--base", str(base), module, str(expires)],
        cwd=base / "code",
        env=clean_environment(folder)
        | aws.environment
        | body["Environment"]
        | {"PYTHONPATH": str(base / "code")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
