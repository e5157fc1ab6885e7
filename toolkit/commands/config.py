"""``sm-train config``: the user's defaults, with the origin of each value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command

if TYPE_CHECKING:
    from sm_train.toolkit.base.settings import Setting


@sm_train_command(
    "sm-train config",
    "sm-train config --run run.yaml",
    "sm-train config set region eu-west-1",
    "sm-train config set role arn:aws:iam::210987654321:role/SageMaker",
    "sm-train config unset bucket",
)
@click.argument("action", type=click.Choice(["set", "unset"]), required=False)
@click.argument("key", required=False)
@click.argument("value", required=False)
@click.option(
    "--run", type=click.Path(path_type=Path), metavar="RUN", help="Include the values of RUN."
)
@click.pass_obj
def command(
    options: dict[str, Any],
    action: str | None,
    key: str | None,
    value: str | None,
    run: Path | None,
    as_json: bool,
) -> None:
    """Show the defaults and where each comes from, or set one.

    KEY is region, profile, role or bucket. A value comes from the first of: the command's flag, the
    variable SM_TRAIN_KEY, the run file, ~/.config/sm-train/config.toml (in XDG_CONFIG_HOME, if that
    is set). Without any, AWS's own variables and profile count.
    """
    from sm_train.toolkit.base.settings import write_setting
    from sm_train.toolkit.terminal.console import note

    if action is None:
        _show(options, run, as_json)
        return
    if run is not None:
        raise UserError(f"--run: shows values only; edit the run file instead of config {action}")
    if key is None or (value is None) == (action == "set"):
        raise UserError(f"config {action}: write config {_USAGE[action]}")
    path = write_setting(key, value)
    note(f"{key} set in {path}" if value else f"{key} removed from {path}")
    if as_json:
        _show(options, None, as_json)


_USAGE = {"set": "set KEY VALUE", "unset": "unset KEY"}


def _show(options: dict[str, Any], run: Path | None, as_json: bool) -> None:
    from sm_train.toolkit.base.settings import KEYS, config_path
    from sm_train.toolkit.terminal.console import write_json, write_line
    from sm_train.toolkit.terminal.text_table import terminal_width, text_table

    found = {key: _setting(key, options, run) for key in KEYS}
    if as_json:
        values = {
            key: {
                "value": setting.value if setting else None,
                "origin": setting.origin if setting else None,
            }
            for key, setting in found.items()
        }
        write_json({"file": str(config_path()), "settings": values})
        return
    rows = [
        (key, setting.value if setting else "not set", setting.origin if setting else KEYS[key])
        for key, setting in found.items()
    ]
    for line in text_table(("setting", "value", "origin"), rows, left=3, width=terminal_width()):
        write_line(line)


def _setting(key: str, options: dict[str, Any], run: Path | None) -> Setting | None:
    """Return the value that commands use for ``key``, in the order of precedence."""
    from sm_train.toolkit.base.settings import Setting, from_config, from_environment

    if key in ("region", "profile") and options.get(f"{key}_flag"):
        return Setting(options[key], f"--{key}")
    if (setting := from_environment(key)) is not None:
        return setting
    if run is not None and (value := _in_run_file(run, key)) is not None:
        return Setting(value, str(run))
    return from_config(key) or _of_aws(key, options)


def _in_run_file(run: Path, key: str) -> str | None:
    from sm_train.toolkit.run_file.run_file import load_without_defaults

    value: str | None = getattr(load_without_defaults(run), key, None)
    return value


def _of_aws(key: str, options: dict[str, Any]) -> Setting | None:
    """Return the region of the AWS profile."""
    from sm_train.toolkit.aws.session import profile_region
    from sm_train.toolkit.base.settings import Setting

    if key != "region":
        return None
    region = profile_region(options["profile"])
    return Setting(region, f"AWS profile {options['profile'] or 'default'}") if region else None
