"""``sm-train completion``: click's own completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    'eval "$(sm-train completion bash)"',
    prints_json=False,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    For bash: eval "$(sm-train completion bash)" in ~/.bashrc.
    """
    maker = get_completion_class(shell)
    if maker is None:
        raise UserError(f"{shell}: no completion for this shell")
    click.echo(maker(ctx.find_root().command, {}, "sm-train", "_SM_TRAIN_COMPLETE").source())
