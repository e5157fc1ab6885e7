"""``sm-train init``: write a commented run file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.command_base.command import command as sm_train_command

if TYPE_CHECKING:
    from sm_train.toolkit.init.template import Values

PRESETS = ("default", "bria-2.0", "infiniband-20b", "demo", "tiny-pixels")
KUBERNETES_PRESETS = ("infiniband-20b",)
LOCAL_PRESETS = ("demo", "tiny-pixels")
"""Presets that train on this machine, and so need no AWS account."""


class _Preset(click.Choice[str]):
    """A preset of a run file; for another name, what the user may mean."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(f"{error.message}{_preset_hint(value)}", ctx, param) from None


def _preset_hint(name: str) -> str:
    from difflib import get_close_matches

    from sm_train.estimators.config.presets import preset_hint, preset_names

    starting = [preset for preset in PRESETS if preset.startswith(name)]
    if close := starting or get_close_matches(name, PRESETS, n=1):
        return f" Did you mean {close[0]!r}?"
    if name in preset_names():
        return f" It is a model: --model {name}."
    hint = preset_hint(name)
    return f" Models are chosen with --model; {hint}." if hint else ""


@sm_train_command(
    "sm-train init",
    "sm-train init run.yaml --region eu-west-1 --data s3://photos/shards/",
    "sm-train init run.yaml --model sdxl --instance-type ml.p5.48xlarge --instances 4",
    "sm-train init big.yaml --preset infiniband-20b --image registry.example.com/team/train:1",
    "sm-train init digits.yaml --preset demo",
)
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default="run.yaml")
@click.option(
    "--preset",
    type=_Preset(PRESETS),
    default="default",
    show_default=True,
    help="bria-2.0: its three published stages; infiniband-20b: 20 B parameters on 16 nodes of "
    "8 H100 with Kubernetes; demo: handwritten digits on this machine; "
    "tiny-pixels: your own photos on this machine.",
)
@click.option("--name", metavar="NAME", help="Name of the run.")
@click.option("--role", metavar="ARN", help="IAM role of the jobs.")
@click.option("--bucket", metavar="BUCKET", help="Bucket for code, checkpoints and results.")
@click.option("--data", metavar="URI", help="S3 prefix of the shards.")
@click.option("--model", metavar="PRESET", help="Model preset, such as sd2, sdxl or mmdit-2b.")
@click.option("--instance-type", metavar="TYPE", help="Instance type; `sm-train instances`.")
@click.option(
    "--instances", type=click.IntRange(1), metavar="N", help="Number of instances of the stage."
)
@click.option("--image", metavar="IMAGE", help="Container image of the pods (infiniband-20b).")
@click.option(
    "--rdma-resource",
    metavar="NAME",
    help="RDMA resource of the nodes, such as rdma/hca_shared_devices_a (infiniband-20b).",
)
@click.option("--no-input", is_flag=True, help="Ask nothing, also on a terminal.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.pass_obj
def command(
    options: dict[str, Any],
    /,
    path: Path,
    preset: str,
    no_input: bool,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Write a commented run file to PATH (run.yaml).

    On a terminal, it asks for the values that no flag gives, and lists roles, buckets and quotas of
    the AWS account if there are credentials. Your defaults (`sm-train config`) are filled in. The
    effective batch size of each stage is kept on another cluster.
    """
    from sm_train.entrypoints.base.atomic_write import write_atomic
    from sm_train.toolkit.init.template import Values, fill, placeholders_in, read_template
    from sm_train.toolkit.terminal.console import note, write_json

    if path.exists() and not force:
        raise UserError(f"{path}: already exists; --force overwrites it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; create it first")
    template = read_template(preset)
    values = _with_defaults(Values(region=options["region"], **flags))
    fill(template, values)  # a mistake in a flag is reported before the first question
    on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if on_terminal and not no_input and not as_json and preset not in LOCAL_PRESETS:
        from sm_train.toolkit.init.wizard import ask_values

        values = ask_values(
            values,
            options["profile"],
            default_type=_instance_type(template),
            on_kubernetes=preset in KUBERNETES_PRESETS,
        )
    text = fill(template, values)
    missing = placeholders_in(text, str(path))
    write_atomic(path, text.encode())
    note(f"Wrote {path}")
    for line in _organization_defaults(path, preset):
        note(line)
    if missing:
        purpose = "To train on SageMaker, fill" if preset in LOCAL_PRESETS else "Fill"
        note(f"{purpose} in: {', '.join(missing)}")
    if preset in KUBERNETES_PRESETS:
        note(f"Next: sm-train manifest {path} --to trainjob")
    else:
        note(f"Next: sm-train submit {path} --dry-run")
    if as_json:
        write_json({"path": str(path), "placeholders": missing})


def _organization_defaults(path: Path, preset: str) -> list[str]:
    """Return what the organization's defaults for SageMaker have and the run file lacks."""
    from sm_train.toolkit.checks.organization import organization_findings
    from sm_train.toolkit.run_file.run_file import load

    if preset in LOCAL_PRESETS or preset in KUBERNETES_PRESETS:
        return []
    return [f"{found.message}: {found.fix}" for found in organization_findings(load(path))]


def _with_defaults(values: Values) -> Values:
    """Return ``values`` with the user's defaults where a flag is missing."""
    from dataclasses import replace

    from sm_train.toolkit.base.settings import from_config, from_environment

    found = {key: from_environment(key) or from_config(key) for key in ("region", "role", "bucket")}
    defaults = {key: setting.value for key, setting in found.items() if setting is not None}
    return replace(
        values,
        region=values.region or defaults.get("region"),
        role=values.role or defaults.get("role"),
        bucket=values.bucket or defaults.get("bucket"),
    )


def _instance_type(template: str) -> str:
    import yaml

    name: str = yaml.safe_load(template)["cluster"]["instance_type"]
    return name
