"""Compares a run with its last submitted job: which keys of the run file have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from sm_train.estimators.bundle.bundle import run_document
from sm_train.estimators.request.training_request import COMMIT_TAG
from sm_train.toolkit.records.launch_record import DamagedRecordError, LaunchRecord, read_record
from sm_train.toolkit.records.run_job import RunJob

if TYPE_CHECKING:
    import boto3


class ChangeDocument(TypedDict):
    """A changed key in ``submit --dry-run --json``; a value that is not set is null."""

    key: str
    before: Any
    after: Any


class ChangesDocument(TypedDict):
    """What has changed since ``job``, in ``submit --dry-run --json``."""

    job: str
    created: str
    keys: list[ChangeDocument]


@dataclass(frozen=True)
class KeyChange:
    """A key such as ``stages.256px.learning_rate``, before and after; None is not set."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Changes:
    """What differs from the run's last submitted job, which was created at ``created``."""

    job: str
    created: datetime
    keys: tuple[KeyChange, ...]

    def as_dict(self) -> ChangesDocument:
        """Return the ``changes`` of ``submit --dry-run --json``."""
        return {
            "job": self.job,
            "created": self.created.isoformat(),
            "keys": [
                {"key": change.key, "before": change.before, "after": change.after}
                for change in self.keys
            ],
        }


def changes_since_last_job(
    session: boto3.Session,
    bucket: str,
    jobs: Sequence[RunJob],
    document: Mapping[str, Any],
    commit: str | None,
) -> Changes | None:
    """Compare ``document`` and ``commit`` with what the newest of the run's ``jobs`` got.

    ``bucket`` is the run's home bucket, which holds the launch records, and ``document`` the run
    document that would be recorded now. Return None if there is no job, or it left no record that
    can be read.

    Raises:
        UserError: AWS returns an error.
    """
    newest = max(jobs, key=lambda job: job.created, default=None)
    if newest is None:
        return None
    try:
        record = read_record(session, bucket, newest.run, newest.name)
    except DamagedRecordError:
        record = None  # which the command has said when it looked for the run
    if record is None:
        return None
    keys = list(changed_keys(recorded_document(record), document))
    before = newest.tags.get(COMMIT_TAG)
    if before != commit:
        keys.append(KeyChange("commit", before, commit))
    return Changes(newest.name, newest.created, tuple(keys))


def recorded_document(record: LaunchRecord) -> Mapping[str, Any]:
    """Return the recorded document with defaults for keys that are newer than it."""
    try:
        return run_document(record.config)
    except ValueError:  # a key that this version does not know, or a stricter rule
        return record.document


def changed_keys(before: Any, after: Any, key: str = "") -> Iterator[KeyChange]:
    """Yield the differences of two documents; stages and other named entries are matched by name.

    An entry that exists in only one of them is one difference.
    """
    if before == after:
        return
    old, new = _entries(before), _entries(after)
    if old is None or new is None:
        yield KeyChange(key, before, after)
        return
    for name in dict.fromkeys((*old, *new)):
        path = f"{key}.{name}" if key else str(name)
        yield from changed_keys(old.get(name), new.get(name), path)


def _entries(value: Any) -> Mapping[str, Any] | None:
    """Return the entries of a section, or of a list whose entries have names; None for others."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and value and all("name" in _keys(item) for item in value):
        return {item["name"]: item for item in value}
    return None


def _keys(value: Any) -> Iterable[str]:
    return value if isinstance(value, Mapping) else ()
