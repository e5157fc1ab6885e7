"""``sm-train enrich``: makes columns for images with a function of the user."""

from __future__ import annotations

import os
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
    from sm_train.toolkit.data_prep.enrichment.enrich import EnrichJob

_COUNT = click.IntRange(min=1)


@sm_train_command(
    "sm-train enrich photos/ scores/ --with scores:aesthetic --model models/clip/",
    "sm-train enrich packed/ scored/ --with scores:aesthetic --index-column aesthetic",
    "sm-train enrich s3://raw/ s3://scores/ --with captions:caption --on sagemaker --for run.yaml",
    option_groups={
        "Tables of images": ["--captions", "--image-column", "--where"],
        "How the function is called": [
            *("--code", "--model", "--batch-size", "--max-side", "--icc-profile", "--hdr"),
            "--workers",
            "--accept-changed-code",
        ],
        "On SageMaker Processing": [
            *("--on", "--for", "--instances", "--instance", "--images-per-second"),
            *("--dry-run", "--yes"),
        ],
    },
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--with",
    "function",
    metavar="MODULE:FUNCTION",
    required=True,
    help="Function that gets a batch of images and returns columns.",
)
@click.option(
    "--index-column",
    "index_columns",
    metavar="NAME",
    multiple=True,
    help="New column to store in the index of shards, too: data.where selects samples by it. "
    "Repeat it for several.",
)
@click.option(
    "--captions",
    metavar="TABLE",
    help="CSV, JSONL or Parquet table of the images below SRC, whose columns the function gets.",
)
@click.option(
    "--image-column",
    metavar="NAME",
    default="image",
    show_default=True,
    help="Column of a table with the images.",
)
@click.option(
    "--where",
    metavar="SQL",
    help="Take the rows of a table that fulfil this condition on its columns.",
)
@click.option(
    "--code",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the module, with its requirements.txt; by default the `code` of RUN, or the "
    "current folder without --for.",
)
@click.option(
    "--model",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of model files that the function gets.",
)
@click.option(
    "--batch-size",
    metavar="N",
    type=_COUNT,
    default=32,
    show_default=True,
    help="Images that the function gets at once.",
)
@click.option(
    "--max-side",
    metavar="PX",
    type=_COUNT,
    default=1024,
    show_default=True,
    help="Scale down images whose longer side exceeds PX before the function gets them.",
)
@click.option(
    "--workers",
    metavar="N",
    type=_COUNT,
    help="Number of worker processes; by default one per GPU, or per CPU without a GPU.",
)
@click.option(
    "--accept-changed-code",
    is_flag=True,
    help="Resume although the module has changed: finished parts keep the columns that they have.",
)
@color_options
@processing_options("Run", "ml.g5.2xlarge")
@click.option(
    "--for",
    "run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Run file with the role, the bucket, the network and the code.",
)
@click.option(
    "--images-per-second",
    metavar="R",
    type=click.FloatRange(min=0, min_open=True),
    help="Requires --on sagemaker. Speed of an instance, for the estimated cost.",
)
@click.pass_obj
def command(options: dict[str, Any], /, **arguments: Any) -> int:
    """Make columns for images with a function of your own.

    SRC is a source of `sm-train pack`: a folder of images, a pattern, an S3 prefix or a table. DST
    receives table/, Parquet files with the columns of the source and the new ones, which
    `sm-train pack --captions` reads. Or SRC is a set of shards with an index: DST receives shards/
    with the new columns in each sample's JSON file, and index.parquet.

    The function gets an EnrichmentBatch: upright images in the colors that training sees, the
    columns of each as a dict, the device and the folder of --model. It returns a dict of columns,
    each a list with a value for every image: a text, a number, a boolean, None or a vector. An
    image that cannot be decoded has no new columns.

    Each part is stored as a whole, so that each image has its columns once, however often a command
    is interrupted: run the same command again to resume. enriched.json says what was made, by which
    function, and lists the images without columns.
    """
    from sm_train.toolkit.base.errors import ExitCode
    from sm_train.toolkit.data_prep.enrichment.enrich import enrich
    from sm_train.toolkit.data_prep.enrichment.enrichment_report import (
        enrichment_document,
        enrichment_lines,
    )
    from sm_train.toolkit.data_prep.packing.pack_report import progress_bar
    from sm_train.toolkit.terminal.console import write_json, write_line

    job = _job(options, arguments)
    if arguments["on"]:
        return _enrich_on_sagemaker(job, options, arguments)
    require_local(arguments, "images_per_second")
    with progress_bar() as on_progress:
        enriched = enrich(job, on_progress)
    for line in enrichment_lines(enriched, names_all=bool(options.get("verbose"))):
        write_line(line, err=True)
    if arguments["as_json"]:
        write_json(enrichment_document(enriched))
    return ExitCode.OK


def _enrich_on_sagemaker(job: EnrichJob, options: dict[str, Any], arguments: dict[str, Any]) -> int:
    from sm_train.toolkit.base.errors import ExitCode
    from sm_train.toolkit.data_prep.enrichment.enrich_on_sagemaker import enrich_on_sagemaker

    config, processing, prices, region = read_processing(options, arguments)
    speed = arguments["images_per_second"]
    enrich_on_sagemaker(job, config, processing, speed, prices, region)
    return ExitCode.OK


def _job(options: dict[str, Any], arguments: dict[str, Any]) -> EnrichJob:
    from sm_train.toolkit.data_prep.enrichment.enrich import EnrichJob
    from sm_train.toolkit.data_prep.packing.pack_arguments import s3_access

    names = ("source", "destination", "function", "model", "batch_size", "max_side", "captions")
    return EnrichJob(
        **{name: arguments[name] for name in (*names, "image_column", "where", "index_columns")},
        **color_arguments(arguments),
        code=_code(arguments["code"], arguments["run"]),
        workers=arguments["workers"] or os.cpu_count() or 1,
        accepts_changed_code=arguments["accept_changed_code"],
        access=s3_access(
            (arguments["source"], arguments["destination"], arguments["captions"] or ""),
            options["region"],
            options["profile"],
        ),
    )


def _code(folder: Path | None, run: Path | None) -> Path:
    """Return the folder of the function's module."""
    from sm_train.toolkit.base.errors import UserError

    if folder is not None:
        return folder
    if run is None:
        return Path()
    code = load(run).code
    if code is None:
        raise UserError(f"--code: {run} sets no `code`; name the folder of the module")
    return run.parent / code
