"""Atomic file writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

NOT_UPLOADED_SUFFIX = ".sagemaker-ignore"
"""SageMaker does not upload files with this suffix from a checkpoint folder (AWS's own
aws/sagemaker-xgboost-container writes its checkpoints under such names first; checkpointing.py,
read 2026-11)."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file in the same folder, then rename it.

    After any failure ``path`` holds either its previous content or all of ``content``.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=NOT_UPLOADED_SUFFIX
        )
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # noqa: PTH101  mkstemp creates files with mode 0600
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        os.unlink(temporary)  # noqa: PTH108
        raise
