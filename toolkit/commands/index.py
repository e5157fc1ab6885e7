"""``sm-train index``: creates the index of shards that have none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command


@sm_train_command(
    "sm-train index packed/shards",
    "sm-train index s3://photos/shards/",
)
@click.argument("shards", metavar="SHARDS")
@click.option(
    "--for",
    "run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Check the samples for the files that RUN reads: data.image_key, data.caption.",
)
@click.pass_obj
def command(options: dict[str, Any], shards: str, run: Path | None, as_json: bool) -> int:
    """Write the index of WebDataset shards.

    SHARDS is a folder or an S3 prefix of tars; the index is written next to it.

    Each shard is read once, completely. The index lists its size, samples, digest, offsets and
    image sizes, so that training starts immediately, resumes at any sample and fills aspect
    buckets. It also lists damaged regions.

    Samples that cannot be trained on (without image or caption, with a dot in the name, with their
    files apart, compressed) are counted, the first three are named, and the exit code is 3.
    """
    from sm_train.toolkit.errors import ExitCode
    from sm_train.toolkit.packing.index import index_folder, index_prefix, sample_check
    from sm_train.toolkit.packing.pack_report import index_document, print_index_summary
    from sm_train.toolkit.terminal.console import bytes_bar, write_json

    check = sample_check(run)
    count = os.cpu_count() or 1
    with bytes_bar("indexing") as progress:
        if shards.startswith("s3://"):
            from sm_train.toolkit.aws.session import resolve_region

            region = resolve_region(options["region"], None, options["profile"])
            result = index_prefix(
                shards,
                check,
                profile=options["profile"],
                region=region,
                workers=count,
                progress=progress,
            )
        else:
            result = index_folder(Path(shards), check, count, progress)
    print_index_summary(result)
    if as_json:
        write_json(index_document(result))
    return ExitCode.PREFLIGHT if result.unusable else ExitCode.OK
