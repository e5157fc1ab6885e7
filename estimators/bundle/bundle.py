"""The source bundle: what a job receives, as one reproducible archive.

The archive holds the run file, the job configuration, the entry script, pinned requirements with
hashes, the user code with its own requirements, and the package ``sm_train.entrypoints`` under its
own import path, so that a line of training code is the same line on a laptop and on 128 GPUs. The
same inputs give the same bytes: entries are sorted and carry no times, owners or file modes of the
machine that packed them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from sm_train.entrypoints.base.pip_install import USER_REQUIREMENTS
from sm_train.entrypoints.job_interface.job_config import (
    JOB_FILE,
    RUN_FILE,
    major_minor,
    tracker_requirements,
)
from sm_train.estimators.bundle.job_configs import job_configs
from sm_train.estimators.bundle.user_code import (
    REQUIREMENTS,
    UserCode,
    UserCodeError,
)
from sm_train.estimators.config.presets import entrypoints_folder
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.secrets.secret_scan import find_secrets

ARCHIVE_NAME = "sourcedir.tar.gz"
ENTRY_SCRIPT = "train.py"
START_SCRIPT = "start_entry.py"
"""The script that starts the user's own (``entry``) and observes it."""
LAUNCHER = "sm_train.entrypoints.launcher.launch"
"""Module of the bundle that starts the entry script on all GPUs of a node."""
LARGE_BYTES = 50_000_000
"""Size to warn above: every instance of every attempt downloads and unpacks the bundle."""

_OLDER_REQUIREMENTS = {
    (2, 3): "requirements-torch-2.3.txt",
    (2, 4): "requirements-torch-2.5.txt",
    (2, 5): "requirements-torch-2.5.txt",
}

_LEVEL = 4
"""Of gzip: a sixth of the time of its default, for 6 % more bytes."""

_PACKAGE = "sm_train/"
_SHIPPED_SUFFIXES = (".py", ".json", ".csv", ".typed")

_SCRIPT_CODE = """\
from sm_train.entrypoints.base.pip_install import install_under_mpi

install_under_mpi()

from sm_train.entrypoints.{module} import main

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
    """The packed archive, its SHA-256, and the ``entry`` script to start."""

    archive: bytes
    files: tuple[BundleFile, ...]
    sha256: str
    entry: str

    def as_dict(self) -> dict[str, object]:
        """Return the ``bundle`` part of ``submit --dry-run --json``."""
        return {
            "files": [{"path": file.path, "bytes": file.bytes} for file in self.files],
            "bytes": len(self.archive),
            "sha256": self.sha256,
            "entry": self.entry,
        }


def build_bundle(
    config: RunConfig,
    framework_version: str | None,
    user_code: UserCode | None = None,
    predicted_speeds: Mapping[str, float] | None = None,
    model_plan: str | None = None,
) -> Bundle:
    """Pack the bundle for an image with PyTorch ``framework_version`` (None if unknown).

    ``predicted_speeds`` and ``model_plan`` are those of :func:`job_configs`.

    Raises:
        UserCodeError: the user code lacks the entry script, uses a reserved name or contains a
            credential.
    """
    user_code = user_code or UserCode()
    contents = {
        **_documents(config, predicted_speeds, model_plan),
        **_user_files(config, user_code),
    }
    if user_code.packages:
        contents[USER_REQUIREMENTS] = ("\n".join(user_code.packages) + "\n").encode()
    secrets = list(find_secrets(contents | _without_secret_names(contents, config)))
    if secrets:
        raise UserCodeError("\n".join(map(str, secrets)))
    if config.cluster.network_isolation:
        # The container can install nothing: its image has all packages.
        contents.pop(USER_REQUIREMENTS, None)
    else:
        contents[REQUIREMENTS] = job_requirements(config, framework_version).encode()
        contents |= _tracker_requirements(config)
    name, module = _script(config)
    contents[name] = _SCRIPT_CODE.format(module=module).encode()
    return pack(contents | _training_code(), name)


def _without_secret_names(contents: dict[str, bytes], config: RunConfig) -> dict[str, bytes]:
    """Return the generated documents without the names of secrets, which resemble passwords."""
    documents = {name: contents[name] for name in (RUN_FILE, JOB_FILE)}
    for secret in (*config.secret_names.values(), *config.kubernetes.secrets.values()):
        quoted = json.dumps(secret).encode()
        documents = {name: text.replace(quoted, b'"name"') for name, text in documents.items()}
    return documents


def _script(config: RunConfig) -> tuple[str, str]:
    """Return the name of the script that a job starts, and the module that it calls."""
    return (
        (ENTRY_SCRIPT, "training.train")
        if config.entry is None
        else (START_SCRIPT, "script.run_entry")
    )


def rebuild_bundle(
    archive: bytes,
    config: RunConfig,
    framework_version: str | None,
    *,
    same_image: bool,
    predicted_speeds: Mapping[str, float] | None = None,
    model_plan: str | None = None,
) -> Bundle:
    """Pack the code of an earlier bundle with another run file.

    The pinned packages stay unless the image has changed.
    """
    contents = unpack(archive) | _documents(config, predicted_speeds, model_plan)
    pinned = contents.pop(REQUIREMENTS, None)
    contents |= _tracker_requirements(config)
    if not config.cluster.network_isolation:
        if pinned is None or not same_image:
            pinned = job_requirements(config, framework_version).encode()
        contents[REQUIREMENTS] = pinned
    return pack(contents, _script(config)[0])


def run_document(config: RunConfig) -> dict[str, object]:
    """Return the run file as plain data, without the laptop's folders."""
    document = config.model_dump(
        mode="json",
        exclude={
            "data": {"local", "local_validation"},
            "model": {"local_components"},
            "channels": {"__all__": {"local"}},
        },
    )
    # In the bundle, the user code lies in the same folder as the run file.
    return document | {"code": "." if config.code is not None else None}


def _documents(
    config: RunConfig, predicted_speeds: Mapping[str, float] | None, model_plan: str | None
) -> dict[str, bytes]:
    """Return the run file and the job configuration of every stage."""
    jobs = job_configs(config, predicted_speeds, model_plan)
    stages = {name: asdict(job) for name, job in jobs.items()}
    return {RUN_FILE: _json(run_document(config)), JOB_FILE: _json(stages)}


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _user_files(config: RunConfig, user_code: UserCode) -> dict[str, bytes]:
    if config.entry is not None and config.entry not in user_code.files:
        raise UserCodeError(f"entry: {config.entry} is not among the files of code: {config.code}")
    reserved = {RUN_FILE, JOB_FILE, USER_REQUIREMENTS, _script(config)[0]}
    reserved |= _tracker_requirements(config).keys()
    for name in user_code.files:
        if name in reserved or name.startswith(_PACKAGE):
            raise UserCodeError(f"code: {name} is a reserved name in the bundle; rename it")
    return user_code.files


_API = "api"
"""Folder of ``sm_train`` itself in a source tree."""


def _training_code() -> dict[str, bytes]:
    # The same `import sm_train` as on a laptop; the version marks it as a job's.
    package = {
        f"{_PACKAGE}__init__.py": (files("sm_train") / "__init__.py").read_bytes(),
        f"{_PACKAGE}version.txt": f"{version('sm-train')}\n".encode(),
    }
    # The doctor predicts a step's time with the cost model.
    for folder in (entrypoints_folder(), Path(str(files("sm_train.cost")))):
        package |= {
            f"{_PACKAGE}{folder.name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
            and path.suffix in _SHIPPED_SUFFIXES
            and "__pycache__" not in path.parts
            and path.parent != folder / _API  # a source tree has it, an installation has not
        }
    return package


def pack(contents: dict[str, bytes], entry: str) -> Bundle:
    """Pack ``contents`` (path → bytes), of which ``entry`` is the script to start."""
    archive = _archive(contents)
    return Bundle(
        archive,
        tuple(BundleFile(name, len(contents[name])) for name in sorted(contents)),
        hashlib.sha256(archive).hexdigest(),
        entry,
    )


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the files of a bundle by path."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = ((member.name, tar.extractfile(member)) for member in tar.getmembers())
        return {name: file.read() for name, file in members if file is not None}


def job_requirements(config: RunConfig, framework_version: str | None) -> str:
    """Return :func:`requirements` and the packages of single features that the run file uses.

    The first line makes pip refuse a package without a hash, whoever starts pip: the start script
    of SageMaker's SDK takes no options.
    """
    # A package is a line with its version, and indented lines with its hashes.
    optional = re.split(r"\n(?=[a-z])", _data_file("requirements-optional.txt"))
    needed = _optional_packages(config)
    added = [
        f"{requirement.strip()}\n"
        for requirement in optional
        if requirement.partition("==")[0] in needed
    ]
    return "".join(["--require-hashes\n", requirements(framework_version), *added])


def requirements(framework_version: str | None) -> str:
    """Return the packages to install on top of the image's PyTorch, with versions and hashes.

    The newest libraries no longer import on the PyTorch of the images with SMDDP.
    """
    name = "requirements.txt"
    if framework_version is not None:
        name = _OLDER_REQUIREMENTS.get(major_minor(framework_version), name)
    return _data_file(name)


def _optional_packages(config: RunConfig) -> set[str]:
    needed = {
        "duckdb": bool(config.conditions),
        "bitsandbytes": config.training.optimizer.name == "adamw8bit",
        "peft": config.model.lora is not None,
        "torchao": config.training.precision == "fp8",
    }
    return {name for name, is_needed in needed.items() if is_needed}


def _tracker_requirements(config: RunConfig) -> dict[str, bytes]:
    """Return the packages of each tracker, which its own process installs."""
    if config.cluster.network_isolation:
        return {}
    names = [tracker_requirements(tracker.name) for tracker in config.trackers.job_config()]
    return {name: _data_file(name).encode() for name in names}


def _data_file(name: str) -> str:
    return (files("sm_train.estimators") / "data" / name).read_text(encoding="utf-8")


def _archive(contents: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with (
        # mtime=0 and fixed modes make the bytes depend on the contents only.
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=_LEVEL, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in sorted(contents):
            member = tarfile.TarInfo(name)
            member.size = len(contents[name])
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(contents[name]))
    return raw.getvalue()
