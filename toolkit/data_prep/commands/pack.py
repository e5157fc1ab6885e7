"""``sm-train pack``: packs images and captions into WebDataset shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.data_prep.commands._options import (
    color_arguments,
    color_options,
    processing_options,
    read_processing,
    require_local,
)
from sm_train.toolkit.run_file.run_file import load

if TYPE_CHECKING:
    from sm_train.toolkit.data_prep.packing.append import Comparison
    from sm_train.toolkit.data_prep.packing.pack import PackJob

_SIDE = click.IntRange(min=1)


@sm_train_command(
    "sm-train pack photos/ packed/",
    "sm-train pack photos/ s3://photos/ --for run.yaml --drop-duplicates",
    "sm-train pack captions.csv packed/ --dry-run",
    "sm-train pack captions.csv packed/ --min-side 512 --where 'aesthetic>5'",
    "sm-train pack photos/ packed/ --append",
    "sm-train pack s3://raw/ s3://photos/ --on sagemaker --for run.yaml --dry-run",
    option_groups={
        "Tables of images": [
            *("--captions", "--image-column", "--caption-column", "--keep", "--index-column"),
            "--where",
        ],
        "What is rejected": [
            *("--min-side", "--max-aspect", "--drop-duplicates", "--near-duplicates"),
            *("--headers-only", "--removed"),
        ],
        "What is encoded": [
            *("--max-side", "--quality", "--convert", "--latents", "--resolution"),
            *("--icc-profile", "--hdr"),
        ],
        "On SageMaker Processing": [
            *("--on", "--instances", "--instance", "--yes"),
        ],
    },
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--captions",
    metavar="TABLE",
    help="CSV, JSONL or Parquet table with image and caption columns, instead of caption files.",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    default="4GB",
    show_default=True,
    help="Maximum size of a shard; all shards are about equally large.",
)
@click.option(
    "--for",
    "run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Make the number of shards a multiple of the instances of RUN's largest stage.",
)
@click.option(
    "--image-column",
    metavar="NAME",
    default="image",
    show_default=True,
    help="Column of a table with the images.",
)
@click.option(
    "--caption-column",
    "caption_columns",
    metavar="NAME",
    multiple=True,
    default=("caption",),
    show_default=True,
    help="Column of a table with the captions. Repeat it to store several; the first that is not "
    "blank is the .txt file.",
)
@click.option(
    "--keep",
    metavar="NAME",
    multiple=True,
    help="Column of a table to store in each sample's JSON file, or '*' for all. Repeat it for "
    "several.",
)
@click.option(
    "--index-column",
    "index_columns",
    metavar="NAME",
    multiple=True,
    help="Like --keep, and also store it in the index: data.where selects samples by it. `source` "
    "is each image's path or address.",
)
@click.option(
    "--where",
    metavar="SQL",
    help="Pack the rows of a table that fulfil this condition on its columns.",
)
@click.option(
    "--min-side", metavar="PX", type=_SIDE, help="Reject images whose shorter side is below PX."
)
@click.option(
    "--max-aspect",
    metavar="R",
    type=click.FloatRange(min=1),
    help="Reject images whose longer side is more than R times the shorter.",
)
@click.option("--drop-duplicates", is_flag=True, help="Reject images with the same bytes.")
@click.option(
    "--near-duplicates",
    metavar="BITS",
    type=click.IntRange(0, 16),
    help="Reject images whose perceptual hashes differ in at most BITS of 64 (try 3).",
)
@click.option(
    "--max-side",
    metavar="PX",
    type=_SIDE,
    help="Scale down images whose longer side exceeds PX, and encode them as JPEG.",
)
@click.option(
    "--quality",
    metavar="Q",
    type=click.IntRange(1, 100),
    help="Re-encode all images as JPEG of this quality; --max-side alone uses 95.",
)
@click.option(
    "--convert",
    is_flag=True,
    help="Also pack HEIC, AVIF, TIFF, GIF, BMP and JPEG 2000 files: encode them as JPEG.",
)
@click.option(
    "--latents",
    metavar="MODEL",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Add latents and text states encoded by MODEL (vae/, text_encoder/, tokenizer/).",
)
@click.option(
    "--resolution",
    metavar="PX",
    type=_SIDE,
    help="Resolution of the latents: that of the stage to train.",
)
@color_options
@click.option(
    "--headers-only",
    is_flag=True,
    help="Skip decoding: faster, but corrupt images are not detected.",
)
@click.option(
    "--append",
    is_flag=True,
    help="Add the images that the pack in DST does not have, in new shards.",
)
@click.option(
    "--removed",
    metavar="PACK",
    multiple=True,
    help="Leave out the images that `sm-train remove` removed from PACK, as from DST. Repeat it "
    "for several.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Number of worker processes and threads; by default one per CPU.",
)
@processing_options(
    "Pack",
    "ml.c7i.8xlarge, and ml.g5.2xlarge with --latents",
    "Show the number of images and shards, and the columns of a table with their types and the "
    "cells that do not fit; with --on sagemaker also the request. Pack nothing.",
)
@click.pass_obj
def command(options: dict[str, Any], /, **arguments: Any) -> int:
    """Pack images and captions into WebDataset shards.

    SRC is a folder of images (jpg, jpeg, png, webp), a pattern such as 'photos/**/*.jpg', an S3
    prefix or the manifest.json of an S3 Inventory; the caption of each image is a .txt file of the
    same name, or else a .caption file. Or SRC is a table of images and captions, with s3:// URIs or
    paths relative to the table: a file (also .gz), a folder of Parquet parts, or an image folder of
    Hugging Face. DST, a folder or an S3 prefix, receives shards/, index.parquet and inputs/, the
    list of images; the data channel is DST/shards.

    Corrupt images and invalid captions are rejected and listed in the index; -v prints each. Files
    of other formats are skipped, counted and named; --convert packs some of them. To resume an
    interrupted pack, run the same command again.

    --append compares the images of SRC with the packed ones by path, size, caption and kept
    columns. The exit code is 3 if an image differs from the packed one of the same name.
    """
    from sm_train.toolkit.data_prep.packing.pack import pack
    from sm_train.toolkit.data_prep.packing.pack_report import (
        pack_document,
        print_pack_summary,
        progress_bar,
    )
    from sm_train.toolkit.terminal.console import write_json

    job = _job(options, arguments)
    if arguments["on"]:
        return _pack_on_sagemaker(job, options, arguments)
    require_local(arguments, except_for=("dry_run",))
    if arguments["dry_run"]:
        return _preview(job, as_json=arguments["as_json"])
    with progress_bar() as on_progress:
        result = pack(job, on_progress)
    print_pack_summary(result, list_rejected=bool(options.get("verbose")))
    if arguments["as_json"]:
        write_json(pack_document(result))
    return _exit_code(None if result.appended is None else result.appended.comparison)


def _preview(job: PackJob, *, as_json: bool) -> int:
    from sm_train.toolkit.data_prep.packing.pack_preview import preview_pack
    from sm_train.toolkit.data_prep.packing.pack_report import print_lines
    from sm_train.toolkit.terminal.console import write_json

    preview = preview_pack(job)
    print_lines(preview.lines)
    if as_json:
        write_json(preview.document)
    return _exit_code(preview.comparison)


def _pack_on_sagemaker(job: PackJob, options: dict[str, Any], arguments: dict[str, Any]) -> int:
    from sm_train.toolkit.data_prep.packing.on_sagemaker import pack_on_sagemaker

    config, processing, prices, region = read_processing(options, arguments)
    return _exit_code(pack_on_sagemaker(job, config, processing, prices, region))


def _exit_code(comparison: Comparison | None) -> int:
    from sm_train.toolkit.base.errors import ExitCode

    return ExitCode.PREFLIGHT if comparison is not None and comparison.changed else ExitCode.OK


def _job(options: dict[str, Any], arguments: dict[str, Any]) -> PackJob:
    from dataclasses import fields

    from sm_train.toolkit.data_prep.packing.pack_arguments import PackArguments

    given = arguments | {"instances": _max_instances(arguments["run"])}
    given |= {name: options[name] for name in ("region", "profile")}
    given |= color_arguments(arguments)
    packed = PackArguments(**{field.name: given[field.name] for field in fields(PackArguments)})
    return packed.job(on_sagemaker=bool(arguments["on"]))


def _max_instances(run: Path | None) -> int:
    return 1 if run is None else max(stage.instances for stage in load(run).stages)
