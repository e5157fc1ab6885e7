"""``sm-train sample``: sample images from a checkpoint into a grid."""

from __future__ import annotations

from pathlib import Path

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.commands._options import sampling_options


@sm_train_command(
    "sm-train sample local-runs/my-model --prompts prompts.txt",
    "sm-train sample checkpoints/step-00001000 --prompts prompts.txt --out grid.png",
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@sampling_options
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default="grid.png",
    show_default=True,
    help="PNG file to write.",
)
@click.option(
    "--columns",
    metavar="N",
    type=click.IntRange(1, 100),
    default=10,
    show_default=True,
    help="Images in a row.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
def command(
    checkpoint: Path,
    prompts: Path,
    out: Path,
    steps: int,
    guidance: float,
    seed: int,
    columns: int,
    as_json: bool,
) -> None:
    """Sample one image for each prompt and write them as one grid.

    CHECKPOINT is a local run's folder (or its stage's), a final model's folder, a checkpoint
    (step-…), or a folder of checkpoints, of which the latest complete one is used.
    """
    from sm_train.toolkit.api.sampling import sample
    from sm_train.toolkit.sampling.prompts import read_prompts
    from sm_train.toolkit.sampling.sample import require_writable
    from sm_train.toolkit.terminal.console import note, write_json

    texts = read_prompts(prompts)
    require_writable(out, "PNG")
    samples = sample(checkpoint, texts, steps=steps, guidance=guidance, seed=seed)
    samples.save(out, columns)
    note(f"wrote {len(texts)} images from {samples.checkpoint} to {out}")
    if as_json:
        write_json({"out": str(out), "images": len(texts), "seed": seed})
