"""``sm-train pack``: images and captions into WebDataset shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

_SIDE = click.IntRange(min=1)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--captions",
    metavar="TABLE",
    type=click.Path(path_type=Path),
    help="CSV, JSONL or parquet with image and caption columns; .txt files otherwise.",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    default="4GB",
    show_default=True,
    help="Shards are near-equal, and at most this large.",
)
@click.option(
    "--for",
    "run",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Make as many shards as the instances of RUN's largest stage divide.",
)
@click.option("--image-column", metavar="NAME", default="image", show_default=True)
@click.option("--caption-column", metavar="NAME", default="caption", show_default=True)
@click.option("--min-side", metavar="PX", type=_SIDE, help="Leave out images less high or wide.")
@click.option(
    "--max-aspect",
    metavar="R",
    type=click.FloatRange(min=1),
    help="Leave out images whose longer side is more than R times the shorter.",
)
@click.option("--drop-duplicates", is_flag=True, help="Leave out images of the same bytes.")
@click.option(
    "--near-duplicates",
    metavar="BITS",
    type=click.IntRange(0, 16),
    help="Leave out images whose perceptual hashes differ in at most BITS of 64 (try 3).",
)
@click.option("--max-side", metavar="PX", type=_SIDE, help="Scale larger images down, as JPEG.")
@click.option(
    "--quality",
    metavar="Q",
    type=click.IntRange(1, 100),
    help="Encode images anew as JPEG of this quality; with --max-side 95 by default.",
)
@click.option(
    "--latents",
    metavar="MODEL",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Put in latents and text states too, by MODEL (vae/, text_encoder/, tokenizer/).",
)
@click.option(
    "--resolution", metavar="PX", type=_SIDE, help="Of the latents: that of the stage to train."
)
@click.option(
    "--headers-only", is_flag=True, help="Do not decode images: faster, and damage goes unseen."
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Processes and threads that look at images; one for each CPU by default.",
)
@click.option(
    "--on", type=click.Choice(["sagemaker"]), help="Pack on SageMaker Processing; needs --for RUN."
)
@click.option(
    "--instances", metavar="N", type=click.IntRange(min=1), default=1, help="Of --on sagemaker."
)
@click.option(
    "--instance",
    metavar="TYPE",
    help="Of --on; ml.c7i.8xlarge by default, and ml.g5.2xlarge with --latents.",
)
@click.option(
    "--prices",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --on: your own prices, as CSV, of kind processing.",
)
@click.option("--dry-run", is_flag=True, help="With --on: show the request and send nothing.")
@click.option("--yes", is_flag=True, help="With --on: do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_obj
def command(options: dict[str, Any], /, **given: Any) -> None:
    """Pack images and captions into WebDataset shards.

    SRC is a folder of images (jpg, jpeg, png, webp), a pattern such as 'photos/**/*.jpg' or an S3
    prefix, each image with its caption in a .txt file beside it; or a table of images and
    captions, with paths relative to the table or s3:// addresses. DST, a folder or an S3 prefix,
    receives shards/ and index.parquet; the data channel is DST/shards.

    Broken images and captions are left out and listed in the index. A pack that was broken off
    goes on when the same command is given again.
    """
    from sm_train.toolkit.errors import UserError
    from sm_train.toolkit.packing.pack import pack
    from sm_train.toolkit.packing.report import document, progress_bar, summarize
    from sm_train.toolkit.terminal.console import write_json

    job = _job(options, given)
    if given["on"]:
        _pack_on_sagemaker(job, options, given)
        return
    for name in ("dry_run", "yes", "instance", "prices"):
        if given[name]:
            raise UserError(f"--{name.replace('_', '-')}: belongs to --on sagemaker")
    with progress_bar() as on_progress:
        packed = pack(job, on_progress)
    summarize(packed)
    if given["as_json"]:
        write_json(document(packed))


def _pack_on_sagemaker(job: Any, options: dict[str, Any], given: dict[str, Any]) -> None:
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.costing.price_table import price_table
    from sm_train.toolkit.errors import UserError
    from sm_train.toolkit.packing.on_sagemaker import (
        cost_of,
        document,
        plan_cloud_pack,
        show,
        submit,
    )
    from sm_train.toolkit.terminal.console import stderr_console, write_json

    if given["run"] is None:
        raise UserError("--on: needs --for RUN, which names the role, the bucket and the network")
    config = _run(given["run"])
    region = resolve_region(options["region"], config.region, options["profile"])
    instance_type = given["instance"] or ("ml.g5.2xlarge" if given["latents"] else "ml.c7i.8xlarge")
    table = price_table(given["prices"])
    cloud = plan_cloud_pack(
        job, config, instance_type=instance_type, machines=given["instances"], region=region
    )
    cost = cost_of(cloud, table, region)
    show(cloud, cost)
    if given["dry_run"]:
        write_json(document(cloud, cost))
        return
    name = submit(cloud, job, config, region=region, yes=given["yes"])
    stderr_console().print(f"started {name}" if name else "already packed: nothing was started")
    if given["as_json"]:
        write_json({"processing_job_name": name, "region": region})


def _job(options: dict[str, Any], given: dict[str, Any]) -> Any:
    from sm_train.entrypoints.packing.plan import PackOptions
    from sm_train.toolkit.errors import UserError
    from sm_train.toolkit.packing.pack import PackJob, parse_size

    if given["headers_only"] and given["near_duplicates"] is not None:
        raise UserError("--headers-only: perceptual hashes need the pixels; leave one of them out")
    if (given["latents"] is None) != (given["resolution"] is None):
        raise UserError("--latents: and --resolution belong together; give both")
    if given["latents"] is not None:
        _require_latents(given["latents"], given["resolution"], here=not given["on"])
    return PackJob(
        source=given["source"],
        destination=given["destination"],
        captions=given["captions"],
        shard_bytes=parse_size(given["shard_size"]),
        image_column=given["image_column"],
        caption_column=given["caption_column"],
        workers=given["workers"] or os.cpu_count() or 1,
        instances=_instances(given["run"]),
        options=PackOptions(
            pixels=not given["headers_only"],
            min_side=given["min_side"],
            max_aspect=given["max_aspect"],
            max_side=given["max_side"],
            quality=given["quality"],
            duplicates=given["drop_duplicates"] or given["near_duplicates"] is not None,
            near_bits=given["near_duplicates"],
            latents=str(given["latents"]) if given["latents"] else None,
            latents_resolution=given["resolution"],
        ),
        access=_access(options, given),
    )


def _require_latents(model: Path, resolution: int, *, here: bool) -> None:
    from importlib.util import find_spec

    from sm_train.entrypoints.models.components import ComponentsError, describe_latents
    from sm_train.toolkit.errors import UserError

    try:
        describe_latents(model, resolution)
    except ComponentsError as error:
        raise UserError(f"--latents: {error}") from None
    if here and find_spec("diffusers") is None:
        raise UserError("--latents: needs diffusers and PyTorch: pip install 'sm-train[train]'")


def _instances(run: Path | None) -> int:
    return 1 if run is None else max(stage.instances for stage in _run(run).stages)


def _run(path: Path) -> Any:
    from sm_train.estimators.config.load import RunFileError, load_run
    from sm_train.toolkit.errors import UserError

    try:
        return load_run(path)
    except RunFileError as error:
        raise UserError(str(error)) from None


def _access(options: dict[str, Any], given: dict[str, Any]) -> Any:
    """How to reach S3: credentials and a region are asked for where an address needs them."""
    from sm_train.entrypoints.packing.storage import S3Access

    table = str(given["captions"] or given["source"])
    if not any(str(given[name]).startswith("s3://") for name in ("source", "destination")):
        if not table.endswith((".csv", ".jsonl", ".parquet")):
            return S3Access()
        return S3Access(options["profile"], options["region"])
    from sm_train.toolkit.aws.session import open_session, resolve_region

    region = resolve_region(options["region"], None, options["profile"])
    open_session(options["profile"], region)
    return S3Access(options["profile"], region)
