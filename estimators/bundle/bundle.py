"""The source bundle: what a job receives, as one reproducible archive.

The archive holds the run document, the launch script, pinned requirements, the package
``sm_train.entrypoints`` under its own import path, so a line of training code is the same line
on a laptop and on 128 GPUs, and the user's own code. Same inputs, same bytes: entries are sorted
and carry no times, owners or file modes of the machine that packed them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from importlib.resources import files

from sm_train.estimators.bundle.expectations import expectations
from sm_train.estimators.bundle.user_code import (
    OWN_PACKAGES,
    REQUIREMENTS,
    CodeError,
    UserCode,
    merged,
)
from sm_train.estimators.config.cluster import SMDDP_FRAMEWORK, release
from sm_train.estimators.config.presets import entrypoints_folder
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.secret_scan import secrets_in

ARCHIVE_NAME = "sourcedir.tar.gz"
ENTRY_SCRIPT = "train.py"
LAUNCHER = "sm_train.entrypoints.launch"
"""The module of the bundle that starts the entry script on all GPUs of a machine."""
DOCUMENT = "run.json"
EXPECTED = "expected"
"""The document's key that is no part of the run file: what is expected of the machines."""
LARGE_BYTES = 50_000_000
"""Every instance of every attempt fetches and unpacks the bundle; more than this is a mistake."""

_PACKAGE = "sm_train/"
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
    """The packed archive; ``sha256`` is the archive's own digest, ``entry`` the script to start."""

    archive: bytes
    files: tuple[BundleFile, ...]
    sha256: str
    entry: str

    def as_dict(self) -> dict[str, object]:
        """The ``bundle`` part of ``submit --dry-run --json``; ``bytes`` is the archive's size."""
        return {
            "files": [{"path": file.path, "bytes": file.bytes} for file in self.files],
            "bytes": len(self.archive),
            "sha256": self.sha256,
            "entry": self.entry,
        }


def build_bundle(
    config: RunConfig, framework_version: str | None, own: UserCode | None = None
) -> Bundle:
    """Pack the bundle for a container whose PyTorch is ``framework_version`` (None: unknown).

    ``own`` are the files of the run's ``code:``.

    Raises:
        CodeError: the user's code lacks the entry, takes a name of ours or holds a secret.
    """
    own = own or UserCode()
    contents = {DOCUMENT: _json(_job_document(config)), **_own_files(config, own)}
    if not config.cluster.network_isolation:
        # Isolated, nothing can be fetched: the image has it all.
        contents[REQUIREMENTS] = merged(requirements(framework_version), own.packages).encode()
    found = list(secrets_in(contents))
    if found:
        raise CodeError("\n".join(f"{one}; take it out of what is uploaded" for one in found))
    if config.entry is None:
        contents[ENTRY_SCRIPT] = _LAUNCH.encode()
    return pack(contents | _training_code(), config.entry or ENTRY_SCRIPT)


def bundle_again(
    archive: bytes, config: RunConfig, framework_version: str | None, *, same_image: bool
) -> Bundle:
    """The code of an earlier bundle with another run document.

    Its packages stay, too, unless the image has changed and takes others.
    """
    contents = unpack(archive)
    contents[DOCUMENT] = _json(_job_document(config))
    ours, _, own = contents.pop(REQUIREMENTS, b"").decode().partition(OWN_PACKAGES)
    if not config.cluster.network_isolation:
        needed = ours if ours and same_image else requirements(framework_version)
        contents[REQUIREMENTS] = merged(needed, tuple(own.split("\n")[1:-1])).encode()
    return pack(contents, config.entry or ENTRY_SCRIPT)


def _own_files(config: RunConfig, own: UserCode) -> dict[str, bytes]:
    if config.entry is not None and config.entry not in own.files:
        raise CodeError(f"entry: {config.entry} is not among the files of code: {config.code}")
    taken = {DOCUMENT} if config.entry is not None else {DOCUMENT, ENTRY_SCRIPT}
    for name in own.files:
        if name in taken or name.startswith(_PACKAGE):
            raise CodeError(f"code: {name} is a name of sm-train's own in the bundle; rename it")
    return own.files


def _training_code() -> dict[str, bytes]:
    folder = entrypoints_folder()
    return {
        f"{_PACKAGE}entrypoints/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in _SHIPPED and "__pycache__" not in path.parts
    }


def pack(contents: dict[str, bytes], entry: str) -> Bundle:
    """Pack ``contents``, whose ``entry`` is started."""
    archive = _archive(contents)
    return Bundle(
        archive,
        tuple(BundleFile(name, len(contents[name])) for name in sorted(contents)),
        hashlib.sha256(archive).hexdigest(),
        entry,
    )


def unpack(archive: bytes) -> dict[str, bytes]:
    """The files of a bundle."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = ((entry.name, tar.extractfile(entry)) for entry in tar.getmembers())
        return {name: file.read() for name, file in files if file is not None}


def requirements(framework_version: str | None) -> str:
    """The pinned packages that go on top of the image's own PyTorch.

    The newest libraries no longer import on the PyTorch 2.3 of the last SMDDP image.
    """
    old = framework_version is not None and release(framework_version) == release(SMDDP_FRAMEWORK)
    name = "requirements-torch-2.3.txt" if old else "requirements.txt"
    return (files("sm_train.estimators") / "data" / name).read_text(encoding="utf-8")


def run_document(config: RunConfig) -> dict[str, object]:
    """The run document; folders of the laptop mean nothing in the cluster and stay here."""
    document = config.model_dump(
        mode="json",
        exclude={
            "data": {"local", "local_validation"},
            "model": {"local_components"},
            "channels": {"__all__": {"local"}},
        },
    )
    # The files of the run's own code lie beside the document.
    return document | {"code": "." if config.code is not None else None}


def _job_document(config: RunConfig) -> dict[str, object]:
    """The run document, with what the job should know of its machines."""
    return run_document(config) | {EXPECTED: expectations(config)}


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _archive(contents: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in sorted(contents):
            entry = tarfile.TarInfo(name)
            entry.size = len(contents[name])
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(contents[name]))
    return raw.getvalue()
