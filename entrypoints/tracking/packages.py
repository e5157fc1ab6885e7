"""Installs a tracker's packages, in a folder of their own.

Only the tracker's process imports them, on one node: no package of the training gets another
version, and a failed installation costs the tracker alone.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

from sm_train.entrypoints.base.pip_install import PackageInstallError, pip_install
from sm_train.entrypoints.job_interface.job_config import TrackerConfig, tracker_requirements
from sm_train.entrypoints.tracking.tracker import TrackerError

_BUNDLE = Path(__file__).parents[3]


def import_names(tracker: TrackerConfig) -> list[str]:
    """Return the modules that the tracker needs; an ARN is read by a plugin."""
    plugin = tracker.name == "mlflow" and (tracker.uri or "").startswith("arn:")
    return [tracker.name, *(["sagemaker_mlflow"] if plugin else [])]


def ensure_packages(tracker: TrackerConfig, bundle: Path = _BUNDLE) -> None:
    """Make the tracker's packages importable: the image's or the user's own, else the bundle's.

    Raises:
        TrackerError: they are not installed and cannot be.
    """
    missing = [name for name in import_names(tracker) if importlib.util.find_spec(name) is None]
    if not missing:
        return
    requirements = bundle / tracker_requirements(tracker.name)
    if not requirements.exists():
        raise TrackerError(f"{', '.join(missing)} is not installed; run pip install {tracker.name}")
    folder = tempfile.mkdtemp(prefix=f"sm-train-{tracker.name}-")
    try:
        pip_install("--no-deps", "--require-hashes", "--target", folder, requirements=requirements)
    except PackageInstallError as error:
        raise TrackerError(str(error)) from None
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
