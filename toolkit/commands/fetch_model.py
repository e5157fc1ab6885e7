"""``sm-train fetch-model``: copy a pretrained model from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.entrypoints.storage.store import store_of
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train fetch-model stabilityai/stable-diffusion-2-base s3://models/sd2/",
    "sm-train fetch-model black-forest-labs/FLUX.1-schnell flux/ --dry-run",
)
@click.argument("hub_id")
@click.argument("destination")
@click.option("--revision", metavar="REV", help="Branch, tag or commit; default: main.")
@click.option("--fp16", is_flag=True, help="Copy half-precision weights where there are some.")
@click.option("--dry-run", is_flag=True, help="Show the files and sizes, and copy nothing.")
@click.pass_obj
def command(
    options: dict[str, Any],
    hub_id: str,
    destination: str,
    revision: str | None,
    fp16: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy the model HUB_ID (ORG/NAME) to DESTINATION, s3://… or a folder.

    Copies what training needs, as safetensors, from one commit, and records its digests in
    sm-train-model.json. `check` and the training job compare the files with them.
    """
    from sm_train.entrypoints.models.component_files import MANIFEST_FILE
    from sm_train.toolkit.aws.s3 import open_bucket_session
    from sm_train.toolkit.base.errors import UserError
    from sm_train.toolkit.models.fetch import (
        describe,
        fetch_to_folder,
        fetch_to_s3,
        is_copy,
        plan_fetch,
        staging_folder,
    )
    from sm_train.toolkit.models.hub.hub_repository import read_repository
    from sm_train.toolkit.models.opened_checkpoint import require_space
    from sm_train.toolkit.models.progress import byte_progress
    from sm_train.toolkit.terminal.console import stderr_console, write_json
    from sm_train.toolkit.terminal.formatting import format_bytes

    console = stderr_console()
    is_s3, folder = destination.startswith("s3://"), Path(destination)
    if not is_s3 and not folder.absolute().parent.is_dir():
        raise UserError(f"{folder.parent}: no such folder; create it first")
    plan = plan_fetch(read_repository(hub_id, revision), fp16=fp16)
    source = plan.source
    is_complete = not is_s3 and is_copy(plan, folder)
    if not is_s3 and folder.exists() and not is_complete:
        raise UserError(f"{folder}: exists; remove it or name another folder")
    console.print(
        f"{source.repository} at commit {source.revision}: {format_bytes(plan.bytes)}",
        soft_wrap=True,
    )
    for name, folder_bytes in describe(plan):
        console.print(f"  {name:<16} {format_bytes(folder_bytes):>8}")
    if is_complete:
        console.print(f"{folder}: already copied", soft_wrap=True)
    elif not dry_run:
        with byte_progress("copying", plan.bytes) as progress:
            if is_s3:
                session = open_bucket_session(destination, options["region"], options["profile"])
                staging = staging_folder(source)
                staging.mkdir(parents=True, exist_ok=True)
                require_space(staging, max(plan.files.values()))
                fetch_to_s3(plan, store_of(session), destination, staging, progress)
            else:
                require_space(folder, plan.bytes)
                fetch_to_folder(plan, folder, progress)
        console.print(f"copied to {destination}, with digests in {MANIFEST_FILE}", soft_wrap=True)
    if as_json:
        write_json(
            {
                "repository": source.repository,
                "revision": source.revision,
                "destination": destination,
                "dry_run": dry_run,
                "bytes": plan.bytes,
                "files": plan.files,
            }
        )
