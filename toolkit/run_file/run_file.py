"""Loads a run file for a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.storage.bucket_settings import declare_buckets
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.settings import from_config, from_environment
from sm_train.toolkit.run_file.index_facts import with_local_index

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig


RUN_FILE_ENDINGS = (".yaml", ".yml")


def load(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Load the run file at ``path`` with ``changes`` such as ``cluster.retries=5``.

    A role or bucket of the environment replaces the run file's; one of the configuration file
    stands in where the run file has none. From then on, S3 requests expect the owners of buckets
    that it names. The index of ``data.local`` says what the run file does not.

    A load only reads: ``sharding: auto`` stays until
    :func:`~sm_train.toolkit.memory.sharding_choice.with_sharding` plans the memory of the stages.

    Raises:
        UserError: it is invalid; one line for each error.
    """
    from sm_train.estimators.config.load import RunFileError

    try:
        return load_or_problems(path, changes)
    except RunFileError as error:
        raise UserError(str(error)) from None


def declare_run_buckets(config: RunConfig) -> None:
    """Send the owners and KMS keys of the run's buckets with every S3 request of this process."""
    declare_buckets(config.bucket_owners, config.bucket_keys)


def load_or_problems(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Load as :func:`load` does, for a caller that shows each problem.

    Raises:
        RunFileError: it is invalid.
        UserError: a default of the environment or the configuration file is invalid.
    """
    return _completed(_load_run(path, changes), changes, path.parent)


def load_dict(document: dict[str, Any], base: Path) -> RunConfig:
    """Validate the content of a run file, as :func:`load` does with a file in ``base``.

    Raises:
        UserError: it is invalid; one line for each error.
    """
    from sm_train.estimators.config.load import RunFileError, load_document

    try:
        config = load_document(document, (), "run")
    except RunFileError as error:
        raise UserError(str(error)) from None
    return _completed(config, (), base)


def _completed(config: RunConfig, changes: Sequence[str], base: Path) -> RunConfig:
    """Return ``config`` with what comes from elsewhere than its file, which is in ``base``."""
    config = with_local_index(with_defaults(config, changes), base)
    declare_run_buckets(config)
    return config


def load_recorded(document: dict[str, Any], changes: Sequence[str], source: str) -> RunConfig:
    """Validate the recorded settings of a run, ``source``, with ``changes``.

    Raises:
        UserError: a change is invalid, or this version cannot read the record.
    """
    from sm_train.estimators.config.load import RunFileError, load_document

    try:
        return load_document(document, changes, source)
    except RunFileError as error:
        raise UserError(str(error)) from None


def load_without_defaults(path: Path) -> RunConfig:
    """Return what the run file itself says.

    Raises:
        UserError: it is invalid; one line for each error.
    """
    from sm_train.estimators.config.load import RunFileError

    try:
        return _load_run(path)
    except RunFileError as error:
        raise UserError(str(error)) from None


def _load_run(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    from sm_train.estimators.config.load import load_run

    return load_run(path, changes)


def with_defaults(config: RunConfig, changes: Sequence[str] = ()) -> RunConfig:
    """Return ``config`` with the user's role and bucket; those of ``changes`` stay.

    Raises:
        UserError: a default is invalid.
    """
    given = {change.partition("=")[0] for change in changes}
    for key in ("role", "bucket"):
        setting = from_environment(key)
        if setting is None and getattr(config, key) is None:
            setting = from_config(key)
        if setting is not None and key not in given:
            config = config.model_copy(update={key: setting.value})
    return config
