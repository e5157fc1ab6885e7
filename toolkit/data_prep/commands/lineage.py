"""``sm-train lineage``: follows images to the shards, runs and checkpoints that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train lineage packed/ 007.jpg",
    "sm-train lineage s3://photos/ 000000042 --runs s3://my-runs",
    "sm-train lineage s3://photos/ --where \"contributor = 'ada'\" --runs s3://my-runs --json",
)
@click.argument("destination", metavar="DST")
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@click.option(
    "--where",
    metavar="SQL",
    help="Follow the samples that fulfil this condition on columns of the index.",
)
@click.option(
    "--runs",
    metavar="PLACE",
    multiple=True,
    help="Where runs are: a bucket s3://BUCKET, a run in it s3://BUCKET/RUN, or a folder of local "
    "runs; by default local-runs. Repeat it for several.",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    destination: str,
    names: tuple[str, ...],
    where: str | None,
    runs: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show where images are and which runs, steps and checkpoints have seen them.

    DST is a pack, or a folder or S3 prefix of shards that has an index. An IMAGE is the key of its
    sample, or its path or address as it was packed; removed ones are followed, too.

    Every job records its data in its checkpoint folder. With `data.reader: indexed` the steps are
    exact. Samples that are drawn at random (`webdataset`), loops of scripts, and
    `data.aspect_buckets` or `data.where` after their rows of the index have changed give an upper
    bound, which is named as one.
    """
    from sm_train.entrypoints.storage.store import S3Access
    from sm_train.toolkit.base.errors import ExitCode, UsageError
    from sm_train.toolkit.data_prep.lineage.follow import follow
    from sm_train.toolkit.data_prep.lineage.lineage_report import lineage_document, lineage_lines
    from sm_train.toolkit.data_prep.lineage.recorded_runs import stages_in
    from sm_train.toolkit.data_prep.packing.shard_set import find_shard_set
    from sm_train.toolkit.records.local_folder import DEFAULT_FOLDER
    from sm_train.toolkit.terminal.console import write_json, write_line

    if bool(names) == (where is not None):
        raise UsageError("IMAGE: name images, or give --where; one of both")
    access = S3Access(options["profile"], options["region"])
    default = [str(DEFAULT_FOLDER)] if Path(DEFAULT_FOLDER).is_dir() else []
    stages = stages_in([*runs] or default, access)
    stories = follow(find_shard_set(destination, access), names, where, stages)
    if as_json:
        write_json([lineage_document(story) for story in stories])
        return ExitCode.OK
    for story in stories:
        for line in lineage_lines(story, len(runs) or len(default)):
            write_line(line)
    if not runs and not default:
        write_line("runs are unknown: name where they are with --runs", err=True)
    return ExitCode.OK
