"""``sm-train sample``: sample images from a checkpoint into a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import sampling_options


@sm_train_command(
    "sm-train sample local-runs/my-model --prompts prompts.txt",
    "sm-train sample my-model --stage 512px --prompts prompts.txt",
    "sm-train sample checkpoints/step-00001000 --prompts prompts.txt --out grid.png",
)
@click.argument("checkpoint")
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
    "--stage", metavar="S", help="Stage of the run; default: the last one with a checkpoint."
)
@click.pass_obj
def command(
    options: dict[str, Any],
    checkpoint: str,
    prompts: Path,
    out: Path,
    steps: int,
    guidance: float,
    seed: int,
    as_json: bool,
    stage: str | None,
) -> None:
    """Sample one image for each prompt and write them as one grid.

    CHECKPOINT is a run's name, a local run's folder, a checkpoint (step-…), a stage's checkpoints,
    of which the latest complete one is used, or a model folder; the last three local or s3://….
    """
    from sm_train.toolkit.api.sampling import sample
    from sm_train.toolkit.models.sampling.prompts import read_prompts
    from sm_train.toolkit.models.sampling.sample import require_writable
    from sm_train.toolkit.terminal.console import note, write_json

    texts = read_prompts(prompts)
    require_writable(out, "PNG")
    samples = sample(
        checkpoint,
        texts,
        steps=steps,
        guidance=guidance,
        seed=seed,
        stage=stage,
        region=options["region"],
        profile=options["profile"],
    )
    samples.save(out)
    note(f"wrote {len(texts)} images from {samples.checkpoint} to {out}")
    if as_json:
        write_json({"out": str(out), "images": len(texts), "seed": seed})
