"""``sm-train init``: write a commented run file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click
from sm_train.toolkit.errors import UserError

PRESETS = ("default", "bria-2.0", "demo", "tiny-pixels")


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default="run.yaml")
@click.option(
    "--preset",
    type=click.Choice(PRESETS),
    default="default",
    show_default=True,
    help="bria-2.0: its three published stages; demo: handwritten digits on this machine; "
    "tiny-pixels: your own photos on this machine.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(path: Path, preset: str, force: bool) -> None:
    """Write a commented run file to PATH (run.yaml)."""
    from sm_train.entrypoints.common.atomic_write import write_atomic

    if path.exists() and not force:
        raise UserError(f"{path}: already exists; --force overwrites it")
    text = (files("sm_train.toolkit") / "presets" / f"{preset}.yaml").read_bytes()
    try:
        write_atomic(path, text)
    except FileNotFoundError:
        raise UserError(f"{path.parent}: no such folder; create it first") from None
    click.echo(f"Wrote {path}. Next: sm-train submit {path} --dry-run", err=True)
