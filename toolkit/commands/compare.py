"""``sm-train compare``: a page for blind comparison of two checkpoints' images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.commands._options import sampling_options


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
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
    from contextlib import ExitStack

    from sm_train.entrypoints.common.atomic_write import write_atomic
    from sm_train.toolkit.models.opened_checkpoint import open_checkpoint
    from sm_train.toolkit.sampling.comparison_page import comparison_page
    from sm_train.toolkit.sampling.prompts import read_prompts
    from sm_train.toolkit.sampling.sample import (
        find_source,
        require_training_packages,
        require_writable,
        sample_images,
    )
    from sm_train.toolkit.terminal.console import note, write_json

    texts = read_prompts(prompts)
    require_writable(out, "page")
    require_training_packages()
    with ExitStack() as opened:
        # Both are found before the first one is sampled, which takes minutes.
        sources = [
            find_source(opened.enter_context(open_checkpoint(target, None, options, note)).folder)
            for target in (first, second)
        ]
        first_images, second_images = (
            sample_images(source, texts, steps=steps, guidance=guidance, seed=seed)
            for source in sources
        )
    names = (first, second)
    page = comparison_page(names, texts, (first_images, second_images), seed)
    write_atomic(out, page.encode())
    note(f"wrote {len(texts)} pairs to {out}; open it in a browser")
    if as_json:
        write_json({"out": str(out), "pairs": len(texts), "seed": seed})
