"""Compares the run with the organization's defaults for SageMaker's SDK.

sm-train sends the request that it shows, and nothing of these files (sagemaker 3.27,
core/config/config.py): what they require, the run file has to state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.extras import is_installed

ORGANIZATION_DEFAULTS = Check("organization-defaults", ("warning",))

_VARIABLES = {"SAGEMAKER_ADMIN_CONFIG_OVERRIDE": "site", "SAGEMAKER_USER_CONFIG_OVERRIDE": "user"}
"""Variable with the path of a file of defaults → the kind of its usual folder."""


def organization_findings(config: RunConfig) -> Iterator[Finding]:
    """Name each default of a training job that the run file lacks."""
    if config.is_outside_of_aws:
        return
    for path in _files():
        for key, where, value in _missing(_training_job(path), config):
            yield ORGANIZATION_DEFAULTS.found(
                "warning",
                where,
                f"{path} has {key} {value} as a default, the run file has none",
                f"write {where}, if jobs of this account must have it",
            )


def _files() -> Iterator[Path]:
    """Yield the files of defaults on this machine; an address in S3 is not read."""
    for variable, kind in _VARIABLES.items():
        given = os.environ.get(variable)
        if given is not None:
            yield Path(given) / "config.yaml" if Path(given).is_dir() else Path(given)
        elif is_installed("platformdirs"):
            import platformdirs

            folder = getattr(platformdirs, f"{kind}_config_dir")("sagemaker")
            yield Path(folder) / "config.yaml"


def _training_job(path: Path) -> Mapping[str, Any]:
    """Return the defaults of training jobs; none if the file is missing or not readable."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        section = document["SageMaker"]["TrainingJob"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return {}
    return section if isinstance(section, Mapping) else {}


def _missing(defaults: Mapping[str, Any], config: RunConfig) -> Iterator[tuple[str, str, object]]:
    """Yield each default that the run does not have: its name, the run file's key, its value."""
    cluster = config.cluster
    output = defaults.get("OutputDataConfig") or {}
    resources = defaults.get("ResourceConfig") or {}
    stated: dict[str, tuple[str, object, object]] = {
        "VpcConfig": ("cluster.vpc", defaults.get("VpcConfig"), cluster.vpc),
        "OutputDataConfig.KmsKeyId": (
            "output_kms_key",
            output.get("KmsKeyId"),
            config.output_kms_key or config.bucket_keys,
        ),
        "ResourceConfig.VolumeKmsKeyId": (
            "cluster.volume_kms_key",
            resources.get("VolumeKmsKeyId"),
            cluster.volume_kms_key,
        ),
        "EnableNetworkIsolation": (
            "cluster.network_isolation",
            defaults.get("EnableNetworkIsolation"),
            cluster.network_isolation,
        ),
        "EnableInterContainerTrafficEncryption": (
            "cluster.encrypt_traffic",
            defaults.get("EnableInterContainerTrafficEncryption"),
            cluster.encrypt_traffic,
        ),
    }
    for name, (key, default, own) in stated.items():
        if default and not own:
            yield name, key, default
    for tag in defaults.get("Tags") or ():
        if isinstance(tag, Mapping) and tag.get("Key") not in config.tags:
            yield "the tag", f"tags.{tag.get('Key')}", tag.get("Value")
