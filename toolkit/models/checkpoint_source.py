"""Finds the checkpoint that a user names: a folder, an S3 prefix, or a run and its stage."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.base.sagemaker_paths import stays_below
from sm_train.entrypoints.job_interface.checkpoint_layout import FINAL_MODEL, parse_step_folder
from sm_train.entrypoints.job_interface.lora_layers import LORA_FILE, PEFT_FILE
from sm_train.entrypoints.records.upload_notes import UPLOAD_NOTES
from sm_train.entrypoints.storage.store import StoredObject, store_of
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import open_bucket_session, split_uri
from sm_train.toolkit.aws.s3_download import download_all
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.platforms.find_run import find_run, parse_target
from sm_train.toolkit.platforms.target import Kind
from sm_train.toolkit.records.checkpoints import (
    StoredCheckpoint,
    require_stored,
    stored_checkpoints,
)
from sm_train.toolkit.records.local_folder import find_local_run

if TYPE_CHECKING:
    from collections.abc import Callable

    import boto3

_COMPONENTS, _SAMPLES = "components", "samples"
"""Folders next to the checkpoints (entrypoints/models/image_sampling.py, which imports PyTorch)."""

_COMPONENTS_FILE = f"{_COMPONENTS}/components.json"

_MODEL_INDEX = "model_index.json"


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint or model folder in S3: its objects by their paths below a local folder.

    ``source`` is the folder among these paths that holds the checkpoint or the model.
    """

    session: boto3.Session
    region: str
    bucket: str
    uri: str
    files: dict[str, StoredObject]
    source: str

    @property
    def bytes(self) -> int:
        return sum(stored.bytes for stored in self.files.values())

    def download(self, folder: Path, progress: Callable[[int], None]) -> Path:
        """Download everything below ``folder``; return the checkpoint's or model's folder."""
        store = store_of(self.session, self.region)
        files = [(stored, folder / path) for path, stored in self.files.items()]
        download_all(store, self.bucket, files, progress)
        return folder / self.source


def find_stored(
    target: str, stage: str | None, options: dict[str, Any], *, whole_model: bool = False
) -> StoredModel | None:
    """Return the checkpoint or model in S3 that ``target`` names; None for a local folder
    or run.

    Of an adapter, the model that it extends is left out unless ``whole_model``.

    Raises:
        UserError: there is none, it is incomplete, or ``--stage`` does not apply.
    """
    named = parse_target(target)
    if named.kind is Kind.NAME and parse_step_folder(target) is not None:
        raise UserError(f"{target}: no such folder; name a checkpoint's folder, a run or s3://…")
    if named.is_read_as_files and named.place is not None:
        return None
    if stage is not None and named.kind not in (Kind.RUN_FILE, Kind.NAME):
        raise UserError("--stage: applies to the name of a run only")
    if named.kind is Kind.ADDRESS:
        session = open_bucket_session(target, options["region"], options["profile"])
        stored = _at_uri(session, target.rstrip("/"), session.region_name)
    elif named.kind in (Kind.FOLDER, Kind.RUN_FOLDER):
        return None
    else:
        stored = _of_run(target, stage, options)
    return stored if whole_model else _without_base(stored)


def _without_base(stored: StoredModel) -> StoredModel:
    """Leave out the components of a model that an adapter extends: its export needs none."""
    manifest = stored.files.get(_COMPONENTS_FILE)
    if manifest is None:
        return stored
    body = store_of(stored.session, stored.region).get(stored.bucket, manifest.key)
    if json.loads(body).get("base") is None:
        return stored
    files = {
        path: file
        for path, file in stored.files.items()
        if path == _COMPONENTS_FILE or not path.startswith(f"{_COMPONENTS}/")
    }
    return replace(stored, files=files)


def local_stage(target: str, stage: str | None) -> Path:
    """Return the local folder of ``target``: of a run, that of ``stage`` if it is set.

    Raises:
        UserError: the run has no such stage.
    """
    run = find_local_run(target)
    if run is None or stage is None:
        return parse_target(target).path
    if run.stage is not None or stage not in [run_stage.name for run_stage in run.stages]:
        names = ", ".join(run_stage.name for run_stage in run.stages)
        raise UserError(f"--stage: {stage!r} is not in {run.target}; it has {names}")
    return run.path / stage


def _of_run(target: str, stage: str | None, options: dict[str, Any]) -> StoredModel:
    """Return the newest checkpoint of a run's stage, of the last stage that has one."""
    run = find_run(target, options)
    stage = stage or run.stage
    names = [candidate.name for candidate in run.config.stages]
    if stage is not None and stage not in names:
        raise UserError(f"--stage: {stage!r} is not one of {', '.join(names)}")
    jobs = run.jobs()
    for candidate in reversed(run.config.stages):
        if stage in (None, candidate.name):
            stored = run.stored(candidate, [job for job in jobs if job.stage == candidate.name])
            if stored.step is not None or stored.final:
                return _stored_model(run.target, stored, options)
    where = f"stage {stage}" if stage else "any stage"
    raise UserError(
        f"{run.name}: {where} has no complete checkpoint; the first is written after "
        "checkpoint.every_steps steps",
        ExitCode.PREFLIGHT,
    )


def _stored_model(run: str, stored: StoredCheckpoint, options: dict[str, Any]) -> StoredModel:
    """Return a checkpoint in S3."""
    if not stored.uri.startswith("s3://"):
        raise UserError(f"{run}: its checkpoints are in the folder {stored.uri}; name that")
    region = stored.region or options["region"]
    session = open_bucket_session(stored.uri, region, options["profile"])
    folder = "" if stored.step is None else f"/{_own_format(stored)}"
    return _at_uri(session, f"{stored.uri}{folder}", session.region_name)


def _at_uri(session: boto3.Session, uri: str, region: str) -> StoredModel:
    """Return the model or checkpoint at ``uri``, or the newest checkpoint below it."""
    parent, _, name = uri.rpartition("/")
    if parse_step_folder(name) is not None:
        require_stored(session, parent, region, name)
        return _checkpoint(session, region, parent, name)
    listed = _relative(session, region, uri)
    if _MODEL_INDEX in listed:
        bucket = split_uri(uri)[0]
        return StoredModel(session, region, bucket, uri, listed, ".")
    if LORA_FILE in listed or PEFT_FILE in listed:
        return _adapter(session, region, uri, listed)
    stored = stored_checkpoints(session, uri, region)
    if stored.step is not None:
        return _checkpoint(session, region, uri, _own_format(stored))
    if stored.final:
        return _at_uri(session, f"{uri}/{FINAL_MODEL}", region)
    if stored.skipped:
        folder, problem = stored.skipped[0]
        raise UserError(f"{uri}/{folder}: incomplete ({problem})", ExitCode.PREFLIGHT)
    raise UserError(
        f"{uri}: holds no checkpoint and no model; give a stage's checkpoints, a step-… folder or "
        "a model folder",
        ExitCode.PREFLIGHT,
    )


def _adapter(
    session: boto3.Session, region: str, uri: str, files: dict[str, StoredObject]
) -> StoredModel:
    """Return a final adapter, with the description of the model that it extends."""
    parent, _, name = uri.rpartition("/")
    described = _relative(session, region, f"{parent}/{_COMPONENTS}").get("components.json")
    if described is None:
        raise UserError(
            f"{uri}: holds an adapter without the model that it extends; give the run's "
            "checkpoints, or open it with diffusers (README.md)",
            ExitCode.PREFLIGHT,
        )
    paths = {f"{name}/{path}": file for path, file in files.items()}
    bucket = split_uri(uri)[0]
    paths[_COMPONENTS_FILE] = described
    return StoredModel(session, region, bucket, uri, paths, name)


def _own_format(stored: StoredCheckpoint) -> str:
    """Return the folder of the newest checkpoint.

    Raises:
        UserError: a script of the user's own wrote it.
    """
    name = stored.name or ""
    if parse_step_folder(name) is None:
        raise UserError(
            f"{stored.uri}/{name}: was written by the run's own script (entry), which "
            "saves its models itself; export reads checkpoints of the built-in training"
        )
    return name


def _checkpoint(session: boto3.Session, region: str, uri: str, name: str) -> StoredModel:
    """Return a checkpoint, with its components and the newest image grid up to its step."""
    files = {
        f"{folder}/{path}": stored
        for folder in (name, _COMPONENTS)
        for path, stored in _relative(session, region, f"{uri}/{folder}").items()
    }
    if _COMPONENTS_FILE not in files:
        raise UserError(
            f"{uri}/{_COMPONENTS}: is missing or incomplete; resume the run once to write it",
            ExitCode.PREFLIGHT,
        )
    step = parse_step_folder(name) or 0
    grids = _relative(session, region, f"{uri}/{_SAMPLES}")
    steps = {path: parse_step_folder(path.removesuffix(".png")) for path in grids}
    earlier = [path for path, number in steps.items() if number is not None and number <= step]
    if earlier:
        newest = max(earlier, key=lambda path: steps[path] or 0)
        files[f"{_SAMPLES}/{newest}"] = grids[newest]
    bucket = split_uri(uri)[0]
    return StoredModel(session, region, bucket, f"{uri}/{name}", files, name)


def _relative(session: boto3.Session, region: str, uri: str) -> dict[str, StoredObject]:
    """Return the objects below ``uri`` by their relative paths, without SageMaker's notes.

    Raises:
        UserError: AWS returns an error, or a key leads out of the folder to download to.
    """
    bucket, prefix = split_uri(f"{uri}/")
    with translate_aws_errors(f"s3://{bucket}/{prefix}"):
        found = {
            stored.key.removeprefix(prefix): stored
            for stored in store_of(session, region).objects(bucket, prefix)
            if stored.key != prefix and not Path(stored.key).match(UPLOAD_NOTES)
        }
    for path, stored in found.items():
        if not stays_below(path):
            raise UserError(
                f"s3://{bucket}: the key {stored.key!r} leads out of its folder; remove the object",
                ExitCode.PREFLIGHT,
            )
    return found
