"""``sm-train compare``: a page for blind comparison of two checkpoints' images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import sampling_options


@sm_train_command(
    "sm-train compare step-00001000 step-00002000 --prompts prompts.txt",
    "sm-train compare my-model s3://photos/other/checkpoints/512px --prompts prompts.txt",
)
@click.argument("first")
@click.argument("second")
@sampling_options
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default="compare.html",
    show_default=True,
    help="Self-contained HTML file to write.",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    first: str,
    second: str,
    prompts: Path,
    out: Path,
    steps: int,
    guidance: float,
    seed: int,
    as_json: bool,
) -> None:
    """Sample every prompt from two checkpoints into a page for blind comparison.

    FIRST and SECOND are what `sm-train sample` takes; both get the same noise. The page counts
    which model wins and reveals which is which after the last pair. It works offline.
    """
    from sm_train.toolkit.api.sampling import compare
    from sm_train.toolkit.models.sampling.prompts import read_prompts
    from sm_train.toolkit.terminal.console import note, write_json

    texts = read_prompts(prompts)
    compare(
        first,
        second,
        texts,
        out,
        steps=steps,
        guidance=guidance,
        seed=seed,
        region=options["region"],
        profile=options["profile"],
    )
    note(f"wrote {len(texts)} pairs to {out}; open it in a browser")
    if as_json:
        write_json({"out": str(out), "pairs": len(texts), "seed": seed})
