"""Loads a run file for a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.common.bucket_owner import declare_owners
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig


RUN_FILE_ENDINGS = (".yaml", ".yml")


def load(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Load the run file at ``path`` with ``changes`` such as ``cluster.retries=5``.

    From then on, S3 requests expect the owners of buckets that it names.

    Raises:
        UserError: it is invalid; one line for each error.
    """
    from sm_train.estimators.config.load import RunFileError, load_run

    try:
        config = load_run(path, changes)
    except RunFileError as error:
        raise UserError(str(error)) from None
    declare_owners(config.bucket_owners)
    return config


def load_dict(document: dict[str, Any]) -> RunConfig:
    """Validate the content of a run file, as :func:`load` does with a file.

    Raises:
        UserError: it is invalid; one line for each error.
    """
    from sm_train.estimators.config.load import RunFileError, load_document

    try:
        config = load_document(document, (), "run")
    except RunFileError as error:
        raise UserError(str(error)) from None
    declare_owners(config.bucket_owners)
    return config
