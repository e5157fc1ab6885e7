"""Compares the run with the organization's defaults for SageMaker's SDK.

sm-train sends the request that it shows, and nothing of these files (sagemaker 3.27,
core/config/config.py): what they require, the run file has to state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.extras import is_installed
from sm_train.toolkit.checks.finding import Check, Finding

ORGANIZATION_DEFAULTS = Check("organization-defaults", ("warning",))

_VARIABLES = {"SAGEMAKER_ADMIN_CONFIG_OVERRIDE": "site", "SAGEMAKER_USER_CONFIG_OVERRIDE": "user"}
"""Variable with the path of a file of defaults → the kind of its usual folder."""


def organization_findings(config: RunConfig) -> Iterator[Finding]:
    """Name each default of a training job that the run file lacks."""
    if config.is_outside_of_aws:
        return
    for path in _files():
        try:
            defaults = _training_job(path)
        except ValueError as error:
            yield ORGANIZATION_DEFAULTS.found(
                "warning",
                str(path),
                f"{path}: not compared with the run: {error}",
                "repair the file",
            )
            continue
        for name, key, value in _missing(defaults, config):
            yield ORGANIZATION_DEFAULTS.found(
                "warning",
                key,
                f"{path} sets {name} {json.dumps(value, default=str)} for training jobs, the run "
                "file does not",
                f"write {key}, if jobs of this account must have it",
            )


def _files() -> Iterator[Path]:
    """Yield the files of defaults on this machine that exist; an address in S3 is not read."""
    for variable, kind in _VARIABLES.items():
        given = os.environ.get(variable)
        if given is None and is_installed("platformdirs"):
            import platformdirs

            given = getattr(platformdirs, f"{kind}_config_dir")("sagemaker")
        path = Path(given or "")
        path = path / "config.yaml" if path.is_dir() else path
        if path.is_file():
            yield path


def _training_job(path: Path) -> Mapping[str, Any]:
    """Return the defaults of training jobs, whose sections have the types that they need.

    Raises:
        ValueError: the file cannot be read, or a section has another type.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    sagemaker = _section(document or {}, "SageMaker")
    found = dict(_section(sagemaker, "TrainingJob"))
    for name in ("VpcConfig", "OutputDataConfig", "ResourceConfig"):
        found[name] = _section(found, name)
    tags = found.get("Tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, Mapping) for tag in tags):
        raise ValueError("SageMaker.TrainingJob.Tags: must be a list of Key and Value")
    return found | {"Tags": tags}


def _section(document: Any, name: str) -> Mapping[str, Any]:
    section = document.get(name) if isinstance(document, Mapping) else 0
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(f"{name}: must be a section")
    return section or {}


def _missing(defaults: Mapping[str, Any], config: RunConfig) -> Iterator[tuple[str, str, object]]:
    """Yield each default that the run does not have: its name, the run file's key, its value."""
    cluster = config.cluster
    output, resources = defaults["OutputDataConfig"], defaults["ResourceConfig"]
    encrypts = "EnableInterContainerTrafficEncryption"
    isolates = "EnableNetworkIsolation"
    stated: list[tuple[str, str, object, object]] = [
        ("VpcConfig", "cluster.vpc", defaults["VpcConfig"], cluster.vpc),
        (
            "OutputDataConfig.KmsKeyId",
            "output_kms_key",
            output.get("KmsKeyId"),
            config.output_kms_key or config.bucket_keys,
        ),
        (
            "ResourceConfig.VolumeKmsKeyId",
            "cluster.volume_kms_key",
            resources.get("VolumeKmsKeyId"),
            cluster.volume_kms_key,
        ),
        (isolates, "cluster.network_isolation", defaults.get(isolates), cluster.network_isolation),
        (encrypts, "cluster.encrypt_traffic", defaults.get(encrypts), cluster.encrypt_traffic),
    ]
    for name, key, default, own in stated:
        if default and not own:
            yield name, key, default
    for tag in defaults["Tags"]:
        key = " ".join(str(tag.get("Key", "")).split())
        if key and key not in config.tags:
            yield f"the tag {key}", f"tags.{key}", tag.get("Value")
