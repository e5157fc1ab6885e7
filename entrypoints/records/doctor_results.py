"""Stored results of the doctor, and the nodes that they flagged.

``checkpoints/doctor/TIME.json`` is one result. SageMaker copies the folder to S3 and back, so a
restarted stage finds its own results; the final model carries the newest on to the next stage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sm_train.entrypoints.base.atomic_write import write_atomic

FOLDER = "doctor"
VERSION = 2
MAX_RESULTS = 50
"""Number of newest results that are read."""


def write_result(folder: Path, document: dict[str, Any]) -> Path:
    """Write a result atomically; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['time'].replace(':', '').replace('-', '')}.json"
    write_atomic(path, (json.dumps(document, indent=1) + "\n").encode())
    return path


def timestamp() -> str:
    """Return the current time in UTC, as results are named and sorted."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_results(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the results in ``folders``, the oldest first; skips damaged ones."""
    documents = []
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        try:
            document = json.loads(path.read_bytes())
            if document["version"] == VERSION:
                documents.append(document)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(documents, key=lambda document: str(document["time"]))[-MAX_RESULTS:]


def unfit_nodes(documents: Sequence[dict[str, Any]], since: str) -> list[str]:
    """Return the nodes that results since a time (of :func:`timestamp`) found unfit, by the names
    of their machines, where these are known.
    """
    return sorted(
        {
            node["instance_id"] or node["node"]
            for document in documents
            if str(document["time"]) >= since
            for node in document["flagged_nodes"]
            if node["level"] == "fail"
        }
    )
