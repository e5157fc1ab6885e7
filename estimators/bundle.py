"""The source bundle: what a job receives, as one reproducible archive.

The archive holds the run document, the launch script, pinned requirements and the package
``sm_train.entrypoints`` under its own import path, so a line of training code is the same line
on a laptop and on 128 GPUs. Same inputs, same bytes: entries are sorted and carry no times,
owners or file modes of the machine that packed them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from importlib.resources import files

from sm_train.estimators.model_presets import entrypoints_folder
from sm_train.estimators.run_config import RunConfig

ARCHIVE_NAME = "sourcedir.tar.gz"
ENTRY_SCRIPT = "train.py"
LAUNCHER = "sm_train.entrypoints.launch"
"""The module of the bundle that starts the entry script on all GPUs of a machine."""
REQUIREMENTS = "requirements.txt"
_SHIPPED = (".py", ".json", ".typed")

_LAUNCH = """\
from sm_train.entrypoints.train import main

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class BundleFile:
    """One file of the bundle; ``bytes`` is its size."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Bundle:
    """The packed archive; ``sha256`` is the archive's own digest."""

    archive: bytes
    files: tuple[BundleFile, ...]
    sha256: str

    def as_dict(self) -> dict[str, object]:
        """The ``bundle`` part of ``submit --dry-run --json``; ``bytes`` is the archive's size."""
        return {
            "files": [{"path": file.path, "bytes": file.bytes} for file in self.files],
            "bytes": len(self.archive),
            "sha256": self.sha256,
        }


def build_bundle(config: RunConfig, framework_version: str | None) -> Bundle:
    """Pack the bundle for a container whose PyTorch is ``framework_version`` (None: unknown)."""
    contents = {
        "run.json": _json(run_document(config)),
        ENTRY_SCRIPT: _LAUNCH.encode(),
        REQUIREMENTS: requirements(framework_version).encode(),
    }
    folder = entrypoints_folder()
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in _SHIPPED and "__pycache__" not in path.parts:
            name = f"sm_train/entrypoints/{path.relative_to(folder).as_posix()}"
            contents[name] = path.read_bytes()
    archive = _archive(contents)
    return Bundle(
        archive,
        tuple(BundleFile(name, len(contents[name])) for name in sorted(contents)),
        hashlib.sha256(archive).hexdigest(),
    )


def requirements(framework_version: str | None) -> str:
    """The pinned packages that go on top of the image's own PyTorch.

    The newest libraries no longer import on the PyTorch 2.3 of the last SMDDP image.
    """
    old = framework_version is not None and framework_version.startswith("2.3")
    name = "requirements-torch-2.3.txt" if old else "requirements.txt"
    return (files("sm_train.estimators") / "data" / name).read_text(encoding="utf-8")


def run_document(config: RunConfig) -> dict[str, object]:
    """The run document; folders of the laptop mean nothing in the cluster and stay here."""
    return config.model_dump(
        mode="json", exclude={"data": {"local", "local_validation"}, "model": {"local_components"}}
    )


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _archive(contents: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name in sorted(contents):
            entry = tarfile.TarInfo(name)
            entry.size = len(contents[name])
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(contents[name]))
    return raw.getvalue()
