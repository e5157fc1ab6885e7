"""Look up AWS's images in the table that the SDK ships, without importing the SDK.

``sagemaker.core.image_uris.retrieve`` reads the same file, but its import takes two seconds, longer
than everything else that a plan or a check does. Ambiguous entries are left to it. A base install
has no SDK: ``estimators/data/images.json`` is a copy of its table (`make images` writes it).
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

FRAMEWORKS = ("pytorch", "pytorch-amzn2023")
"""The SDK's tables that a run's image can be in."""

_DOMAINS = {"cn": "amazonaws.com.cn", "us-iso": None, "eu-iso": None, "eusc": None}
"""Region prefix → domain of ECR. None: another partition, whose hostnames differ."""


def training_image(framework: str, version: str, region: str, instance: str) -> str | None:
    """Return the training image for the instance type; None if the table is not unambiguous."""
    domain = next(
        (domain for prefix, domain in _DOMAINS.items() if region.startswith(prefix)),
        "amazonaws.com",
    )
    processor = _processor(instance)
    try:
        table = _table(framework)["training"]
        entry = table["versions"][table.get("version_aliases", {}).get(version, version)]
        account, repository = entry["registries"][region], entry["repository"]
        tag = _tag(entry, version, processor)
        is_built = processor in table["processors"]
    except (LookupError, ValueError, TypeError):
        return None
    if domain is None or not is_built:
        return None
    return f"{account}.dkr.ecr.{region}.{domain}/{repository}:{tag}"


def _tag(entry: dict[str, Any], version: str, processor: str) -> str:
    """Return the tag of a version's image.

    Raises:
        LookupError, ValueError: the entry has another form, or several images.
    """
    if "tag_prefix" in entry and not entry["processor_in_tag"]:
        return f"{entry['tag_prefix']}-{entry['container_version'][processor]}"
    if "container_version" in entry:
        raise ValueError("several operating systems")
    [python] = entry["py_versions"]
    # The SDK keeps a version without a patch number: 2.3 is a tag of its own.
    return f"{version}-{processor}-{python}"


def _processor(instance: str) -> str:
    """Return ``gpu``, ``cpu``, or the family of another accelerator, as in the image tags."""
    family = instance.split(".")[1]
    if family.startswith(("inf", "trn")):
        return family
    return "gpu" if family[0] in "gp" else "cpu"


@cache
def _table(framework: str) -> dict[str, Any]:
    """Return the table of a framework: that of the SDK if it is installed, else our copy of it."""
    return sdk_table(framework) or _copied_tables().get(framework, {})


def _copied_tables() -> dict[str, Any]:
    content = (files("sm_train.estimators") / "data" / "images.json").read_bytes()
    tables: dict[str, Any] = json.loads(content)["tables"]
    return tables


def sdk_table(framework: str) -> dict[str, Any]:
    """Return the SDK's table of a framework; empty if the file is not found."""
    spec = importlib.util.find_spec("sagemaker")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "core" / "image_uri_config" / f"{framework}.json"
        if path.is_file():
            table: dict[str, Any] = json.loads(path.read_bytes())
            return table
    return {}
