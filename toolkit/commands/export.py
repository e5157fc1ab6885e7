"""``sm-train export``: turn a checkpoint into a model for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train export my-model model/",
    "sm-train export local-runs/my-model model.safetensors --format single-file --dtype bf16",
    "sm-train export s3://photos/my-model/checkpoints/512px model/ --push-to-hub org/name",
)
@click.argument("checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(["ema", "raw"]),
    help="Averaged or raw weights; default: averaged, if the run kept them.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Precision of all weights; default: that of the checkpoint.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["diffusers", "single-file", "dcp"]),
    default="diffusers",
    show_default=True,
    help="A diffusers folder, one safetensors file (sd2, sdxl), or PyTorch's DCP.",
)
@click.option(
    "--merge", is_flag=True, help="Add a LoRA adapter to the weights of the model that it extends."
)
@click.option(
    "--stage", metavar="S", help="Stage of the run; default: the last one with a checkpoint."
)
@click.option("--push-to-hub", metavar="ORG/NAME", help="Also upload to this Hub repository.")
@click.option("--private", is_flag=True, help="Create the Hub repository as private.")
@click.option("--dry-run", is_flag=True, help="Show what would be read and written.")
@click.pass_obj
def command(
    options: dict[str, Any],
    checkpoint: str,
    out: Path,
    weights: Any,
    dtype: str | None,
    kind: Any,
    merge: bool,
    stage: str | None,
    push_to_hub: str | None,
    private: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the model of a checkpoint to OUT: from any step, also of a stopped run.

    CHECKPOINT is a run's name, a local run's folder, a checkpoint (step-…), a stage's checkpoints,
    of which the latest complete one is used, or a model folder; the last three local or s3://….
    """
    from dataclasses import asdict

    from sm_train.toolkit.api.model_export import export
    from sm_train.toolkit.terminal.console import stderr_console, write_json
    from sm_train.toolkit.terminal.formatting import format_bytes

    console = stderr_console()
    exported = export(
        checkpoint,
        out,
        stage=stage,
        weights=weights,
        dtype=dtype,
        format=kind,
        merge=merge,
        push_to_hub=push_to_hub,
        private=private,
        dry_run=dry_run,
        region=options["region"],
        profile=options["profile"],
    )
    verb, size = "would write" if dry_run else "wrote", exported.download_bytes
    download = f" ({format_bytes(size)} to download)" if dry_run and size is not None else ""
    console.print(f"{verb} {out} from {exported.source}{download}", soft_wrap=True)
    if exported.commit_url:
        console.print(f"pushed to {exported.commit_url}", soft_wrap=True)
    if as_json:
        write_json(asdict(exported) | {"out": str(out)})
