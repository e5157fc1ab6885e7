"""Reads the JSON files of plans, by which nodes share work and commands resume it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.base.stored_fields import record_of
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME
from sm_train.entrypoints.storage.storage import Storage

Checks = Mapping[str, Callable[[Any], Any]]
"""The checks of the fields of a file (`stored_fields`)."""


class PlanError(Error):
    """A stored plan cannot be used; the message is one line that names its file."""


def one_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def read_checked(destination: Storage, name: str, checks: Checks, rebuild: str) -> dict[str, Any]:
    """Return the object in a JSON file; ``rebuild`` says how to do without it.

    The fields with a check must be there, and are what the check returns.

    Raises:
        FileNotFoundError: there is no such file.
        PlanError: it is damaged, or of another version of sm-train.
    """
    content = destination.read(name)
    try:
        document = json.loads(content)
        fields = record_of(checks)(document)
        return {**document, **fields}
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{destination.address(name)}: damaged, or of another version of sm-train: {error}; "
            f"{rebuild}"
        ) from None


def read_plan_document(destination: Storage) -> dict[str, Any] | None:
    """Return what describes the unfinished work in the destination; None if there is none.

    It may be that of any command, so it is compared before its fields are used.

    Raises:
        PlanError: it is no JSON object.
    """
    try:
        return read_checked(destination, PLAN_NAME, {}, "use another destination")
    except FileNotFoundError:
        return None
