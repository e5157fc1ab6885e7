"""When another process may start a job whose name has been claimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sm_train.entrypoints.storage.lease import Holder, StoredLease
from sm_train.toolkit.records.launch_record import LaunchRecord, StoredRecord


def is_expired(holder: Holder, age: float) -> bool:
    return StoredRecord(LaunchRecord({}, {}), StoredLease(holder, {}, "v", age)).expired


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Holder:
    """Return a process of this machine that was killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    holder = Holder.of_this_process()
    holder.close(settled=False)
    return holder


def test_a_request_of_a_killed_process_may_arrive_for_a_minute(ended: Holder) -> None:
    assert not is_expired(ended, 59.0)
    assert is_expired(ended, 61.0)


def test_a_claim_of_another_machine_expires_after_a_quarter_of_an_hour(ended: Holder) -> None:
    elsewhere = replace(ended, token="of another", host="another-computer")
    assert not is_expired(elsewhere, 899.0)
    assert is_expired(elsewhere, 901.0)
