"""``sm-train data-preview``: a page with what training sees of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train data-preview run.yaml",
    "sm-train data-preview packed/ --where \"license = 'CC0'\" --samples 100",
    "sm-train data-preview s3://photos/ --resolution 1024 --html photos.html",
)
@click.argument("target", metavar="RUN|SHARDS")
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    default="data-preview.html",
    show_default=True,
    help="Self-contained HTML file to write.",
)
@click.option(
    "--samples",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=48,
    show_default=True,
    help="Samples that are drawn of each data set.",
)
@click.option("--stage", metavar="NAME", help="Stage of the run file; default: the first.")
@click.option(
    "--resolution",
    metavar="PX",
    type=click.IntRange(8, 4096),
    help="Resolution of the crops; default: the stage's, and 512 of SHARDS.",
)
@click.option(
    "--where",
    metavar="SQL",
    help="Draw samples that fulfil this condition, too, as `data.where` does.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the draw.",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    target: str,
    html: Path,
    samples: int,
    stage: str | None,
    resolution: int | None,
    where: str | None,
    seed: int,
    as_json: bool,
) -> int:
    """Write a page with samples as training gets them: crops, captions, columns and colors.

    RUN is a run file, of which a stage's data sets are shown as it reads them. SHARDS is a pack, or
    a folder or S3 prefix of shards that has an index. The loader of training decodes the samples.
    The page also counts profiles, depths, sizes and rejected images of the whole index. Of the
    shards only the drawn samples are read.
    """
    from sm_train.toolkit.base.errors import ExitCode
    from sm_train.toolkit.data_prep.data_preview.data_preview import preview_set, preview_sources
    from sm_train.toolkit.data_prep.data_preview.preview_page import preview_document, preview_page
    from sm_train.toolkit.data_prep.packing.pack_arguments import s3_access
    from sm_train.toolkit.report_html.html_page import write_html
    from sm_train.toolkit.terminal.console import note, write_json

    sources = preview_sources(target, stage, resolution, where)
    addresses = [source.address for source in sources]
    region = options["region"] or sources[0].region
    access = s3_access(addresses, region, options["profile"])
    sets = [preview_set(source, samples, seed, access) for source in sources]
    write_html(html, preview_page(sets))
    for preview in sets:
        for text in preview.warnings:
            note(f"warning: {preview.source.address}: {text}")
    shown = sum(len(preview.seen) for preview in sets)
    left_out = sum(len(preview.unusable) for preview in sets)
    note(f"wrote {shown} samples to {html}, {left_out} left out; open it in a browser")
    if as_json:
        write_json({"out": str(html), "seed": seed, "sets": preview_document(sets)})
    return ExitCode.OK
