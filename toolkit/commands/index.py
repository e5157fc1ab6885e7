"""``sm-train index``: describes shards that came without an index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("shards", metavar="SHARDS")
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Processes that read shards; one for each CPU by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_obj
def command(options: dict[str, Any], shards: str, workers: int | None, as_json: bool) -> None:
    """Write the index of SHARDS, a folder or an S3 prefix of WebDataset tars, beside it.

    Each shard is read once from end to end. The index lists its bytes, samples, digest, offsets
    and image sizes, by which training starts at once, resumes anywhere and fills buckets; damage
    is listed, too.
    """
    from sm_train.toolkit.packing.index import index_folder, index_prefix
    from sm_train.toolkit.packing.indexing_report import document, summarize
    from sm_train.toolkit.terminal.console import bytes_bar, write_json

    count = workers or os.cpu_count() or 1
    with bytes_bar("indexing") as progress:
        if shards.startswith("s3://"):
            from sm_train.toolkit.aws.session import resolve_region

            region = resolve_region(options["region"], None, options["profile"])
            indexed = index_prefix(
                shards, profile=options["profile"], region=region, workers=count, progress=progress
            )
        else:
            indexed = index_folder(Path(shards), count, progress)
    summarize(indexed)
    if as_json:
        write_json(document(indexed))
