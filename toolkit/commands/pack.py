"""``sm-train pack``: images and captions into WebDataset shards."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--captions",
    metavar="TABLE",
    type=click.Path(path_type=Path),
    help="CSV, JSONL or parquet with image and caption columns; .txt files otherwise.",
)
@click.option("--shard-size", metavar="SIZE", default="2GB", show_default=True)
@click.option("--image-column", metavar="NAME", default="image", show_default=True)
@click.option("--caption-column", metavar="NAME", default="caption", show_default=True)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Processes that check images; one for each CPU by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    source: Path,
    destination: Path,
    captions: Path | None,
    shard_size: str,
    image_column: str,
    caption_column: str,
    workers: int | None,
    as_json: bool,
) -> None:
    """Pack images and captions into WebDataset shards.

    SRC is a folder of images (jpg, jpeg, png, webp), each with its caption in a .txt file
    beside it, or a table of images and captions with paths relative to the table. DST receives
    shards/ and index.parquet; the data channel is DST/shards. Broken images and captions are left
    out and listed in the index.
    """
    from sm_train.toolkit.output import write_json
    from sm_train.toolkit.packing import PackJob, pack, parse_size
    from sm_train.toolkit.packing_report import document, progress_bar, summarize

    job = PackJob(
        source=source,
        destination=destination,
        captions=captions,
        shard_bytes=parse_size(shard_size),
        image_column=image_column,
        caption_column=caption_column,
        workers=workers or os.cpu_count() or 1,
    )
    with progress_bar() as on_progress:
        packed = pack(job, on_progress)
    summarize(packed)
    if as_json:
        write_json(document(packed))
