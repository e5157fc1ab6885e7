"""``sm-train sample``: images from a checkpoint into a grid."""

from __future__ import annotations

from pathlib import Path

import click
from sm_train.toolkit.errors import UserError


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--prompts", type=click.Path(path_type=Path), required=True, help="Text file, one a line."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default="grid.png", show_default=True, help="PNG."
)
@click.option("--steps", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--guidance", type=click.FloatRange(0, 100), default=5.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--columns", type=click.IntRange(1, 100), default=10, show_default=True)
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
    """Draw one image for each prompt and write them as one grid.

    CHECKPOINT is a final model's folder, one checkpoint (step-…), or a run's checkpoints, of
    which the newest complete one is taken.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: no such folder; give a model's or a run's checkpoints")
    lines = _read_prompts(prompts)
    if out.is_dir():
        raise UserError(f"--out: {out}: is a folder; name the PNG in it")
    if not out.parent.is_dir():
        raise UserError(f"--out: {out.parent}: no such folder; make it first")
    try:
        from sm_train.entrypoints import sampling
        from sm_train.entrypoints.checkpoint import CheckpointError
    except ImportError as error:
        raise UserError(
            f"sample: {error.name} is not installed; pip install 'sm-train[train]'"
        ) from None
    from sm_train.entrypoints.files import write_whole
    from sm_train.entrypoints.grid import draw_grid, png
    from sm_train.toolkit.output import people, write_json

    try:
        source = sampling.find_source(checkpoint)
        pipeline = sampling.load(source)
    except CheckpointError as error:
        raise UserError(str(error)) from None
    with people().status(f"drawing {len(lines)} images"):
        images = sampling.draw(pipeline, lines, steps=steps, guidance=guidance, seed=seed)
    write_whole(out, png(draw_grid(images, lines, min(columns, len(lines)))))
    people().print(f"wrote {len(images)} images from {source.checkpoint or source.model} to {out}")
    if as_json:
        write_json({"out": str(out), "images": len(images), "seed": seed})


def _read_prompts(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"--prompts: {path}: no such file; write one prompt a line") from None
    except IsADirectoryError:
        raise UserError(f"--prompts: {path}: is a folder; give a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts: {path}: not UTF-8 (byte {error.start})") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"--prompts: {path}: is empty; write one prompt a line")
    return lines
