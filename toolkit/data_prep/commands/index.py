"""``sm-train index``: creates the index of shards that have none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.data_prep.commands._options import (
    processing_options,
    read_processing,
    require_local,
)
from sm_train.toolkit.run_file.run_file import load

if TYPE_CHECKING:
    from sm_train.toolkit.data_prep.packing.index import IndexJob


@sm_train_command(
    "sm-train index packed/shards",
    "sm-train index s3://photos/shards/ --headers-only",
    "sm-train index s3://photos/shards/ --on sagemaker --for run.yaml",
    option_groups={
        "On SageMaker Processing": [
            *("--on", "--instances", "--instance", "--dry-run", "--yes"),
        ],
    },
)
@click.argument("shards", metavar="SHARDS")
@click.option(
    "--for",
    "run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Check the samples for the files that RUN reads: data.image_key, data.caption.",
)
@click.option(
    "--headers-only",
    is_flag=True,
    help="Read headers and the heads of images only, in S3 by ranged requests: faster for large "
    "images.",
)
@processing_options("Run", "ml.c7i.8xlarge")
@click.pass_obj
def command(options: dict[str, Any], /, **arguments: Any) -> int:
    """Write the index of WebDataset shards.

    SHARDS is a folder or an S3 prefix of tars; the index is written next to it.

    Each shard is read once, completely. The index lists its size, samples, digest, offsets and
    image sizes, so that training starts immediately, resumes at any sample and fills aspect
    buckets. It also lists damaged regions. Shards that the index describes already are not read
    again, and an interrupted command resumes with those that are missing.

    --headers-only reads no more than the headers of a tar and the heads of its images. The digest
    of a shard is then that of its size and version (ETag, or time of modification): damage inside
    of a file is not noticed.

    Samples that cannot be trained on (without image or caption, with a dot in the name, with their
    files apart, compressed) are counted, the first three are named, and the exit code is 3.
    """
    from sm_train.toolkit.base.errors import ExitCode
    from sm_train.toolkit.data_prep.packing.index import IndexJob, index_shards, sample_check
    from sm_train.toolkit.data_prep.packing.pack_arguments import s3_access
    from sm_train.toolkit.data_prep.packing.pack_report import index_document, print_index_summary
    from sm_train.toolkit.terminal.console import bytes_bar, write_json

    shards, run = arguments["shards"], arguments["run"]
    access = s3_access((shards,), options["region"], options["profile"])
    job = IndexJob(shards, sample_check(run), arguments["headers_only"], access)
    if arguments["on"]:
        return _index_on_sagemaker(job, options, arguments)
    require_local(arguments)
    with bytes_bar("indexing") as progress:
        result = index_shards(job, os.cpu_count() or 1, progress)
    policy = ColorPolicy() if run is None else load(run).data.job_config().color
    print_index_summary(result, policy)
    if arguments["as_json"]:
        write_json(index_document(result))
    return ExitCode.PREFLIGHT if result.unusable else ExitCode.OK


def _index_on_sagemaker(job: IndexJob, options: dict[str, Any], arguments: dict[str, Any]) -> int:
    from sm_train.toolkit.base.errors import ExitCode
    from sm_train.toolkit.data_prep.packing.index_on_sagemaker import index_on_sagemaker

    config, processing, prices, region = read_processing(options, arguments)
    index_on_sagemaker(job, config, processing, prices, region)
    return ExitCode.OK
