"""Checks pretrained components against the run file, without downloading their weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.models.component_files import (
    ComponentReader,
    LocalComponents,
    has_component,
)
from sm_train.entrypoints.models.components import (
    TRANSFORMER,
    UNET,
    component_problems,
    read_preset,
)
from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.s3_components import S3Components
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.models.hub.hub_repository import read_repository

if TYPE_CHECKING:
    import boto3

COMPONENTS = Check("components", ("error",))


LORA_RANDOM_BASE = Check("lora-random-base", ("warning",))


def base_findings(config: RunConfig, components: str | None) -> Iterator[Finding]:
    """Check that an adapter has a pretrained model; ``components`` is the option of that name."""
    model = config.model
    named = model.components or model.local_components or components
    if config.entry is None and model.lora is not None and named is None:
        yield _random_base("model.components is not set")


def _random_base(reason: str) -> Finding:
    return LORA_RANDOM_BASE.found(
        "warning",
        "model.lora",
        f"the adapter would extend a network of random weights: {reason}",
        "set model.components to a pretrained model with a network",
    )


def components_findings(
    config: RunConfig, where: str, reader: ComponentReader
) -> Iterator[Finding]:
    """Check a model folder; ``where`` is the key or option that names it."""
    model = config.model.job_config()
    if model.lora is not None and not any(
        has_component(reader, component) for component in (UNET, TRANSFORMER)
    ):
        yield _random_base(f"{reader.location} has no network")
    if model.preset is None:
        return
    preset = read_preset(model.preset, model.preset_content)
    for problem in component_problems(reader, preset, model):
        message, _, fix = problem.rpartition("; ")
        yield COMPONENTS.found("error", where, f"{reader.location}: {message}", fix)


def local_components_findings(config: RunConfig, base: Path) -> Iterator[Finding]:
    """Check ``model.local_components`` if the folder is on this machine."""
    if config.model.local_components is None or config.entry is not None:
        return
    folder = base / config.model.local_components
    if folder.is_dir():
        reader = LocalComponents(folder)
        yield from components_findings(config, "model.local_components", reader)


def stored_components_findings(config: RunConfig, session: boto3.Session) -> Iterator[Finding]:
    """Check ``model.components`` in S3, unless the prefix is empty.

    Raises:
        ClientError: S3 rejects a request.
    """
    if config.model.components is None or config.entry is not None:
        return
    reader = S3Components(store_of(session), config.model.components)
    if reader.files:
        yield from components_findings(config, "model.components", reader)


def named_components_findings(
    config: RunConfig, target: str, session: boto3.Session | None
) -> Iterator[Finding]:
    """Check the model that ``--components`` names: a folder, an S3 prefix or a Hub repository.

    Raises:
        UserError: the Hub returns an error.
        ClientError: S3 rejects a request.
    """
    reader: ComponentReader
    if target.startswith("s3://"):
        assert session is not None
        reader = S3Components(store_of(session), target)
    elif Path(target).is_dir():
        reader = LocalComponents(Path(target))
    else:
        repository, _, revision = target.partition("@")
        reader = read_repository(repository, revision or None)
    yield from components_findings(config, "--components", reader)
