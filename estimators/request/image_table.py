"""AWS's images from the table that the SDK ships, without importing the SDK.

``sagemaker.core.image_uris.retrieve`` reads the same file, but importing it takes two seconds:
longer than everything else that a plan or a check does. What is not plainly in the table is left
to it.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

_SUFFIXES = {"cn": "amazonaws.com.cn", "us-iso": None, "eu-iso": None, "eusc": None}
"""By the beginning of a region; in other partitions hosts are named otherwise."""


def training_image(framework: str, version: str, region: str, machine: str) -> str | None:
    """The image for training on ``machine``; None where the table does not plainly say."""
    suffix = next(
        (found for begin, found in _SUFFIXES.items() if region.startswith(begin)), "amazonaws.com"
    )
    processor = _processor(machine)
    try:
        table = _table(framework)["training"]
        entry = table["versions"][table.get("version_aliases", {}).get(version, version)]
        account, repository = entry["registries"][region], entry["repository"]
        [python] = entry["py_versions"]
        plain = processor in table["processors"] and "container_version" not in entry
    except (LookupError, ValueError, TypeError):
        return None
    if suffix is None or not plain:
        return None
    # The SDK keeps a short version as it was given: 2.3 is a tag of its own.
    return f"{account}.dkr.ecr.{region}.{suffix}/{repository}:{version}-{processor}-{python}"


def _processor(machine: str) -> str:
    """``gpu``, ``cpu``, or the family of another accelerator: ml.p4d.24xlarge is a GPU machine."""
    family = machine.split(".")[1]
    if family.startswith(("inf", "trn")):
        return family
    return "gpu" if family[0] in "gp" else "cpu"


@cache
def _table(framework: str) -> dict[str, Any]:
    """The SDK's file; empty where it is not found like this."""
    spec = importlib.util.find_spec("sagemaker")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "core" / "image_uri_config" / f"{framework}.json"
        if path.is_file():
            table: dict[str, Any] = json.loads(path.read_bytes())
            return table
    return {}
