"""Records from storage are checked for types and ranges: another value is one error, or ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sm_train.cost.assumptions import Observed
from sm_train.cost.throughput import Measurement
from sm_train.entrypoints.common.checkpoint_layout import (
    FORMAT_VERSION,
    CheckpointFile,
    CheckpointMarker,
    MarkerError,
)
from sm_train.entrypoints.leases.holder import Holder
from sm_train.entrypoints.leases.lease import Lease, read_lease
from sm_train.entrypoints.leases.lease_files import LocalLeaseFiles
from sm_train.entrypoints.lineage.data_record import (
    Anchor,
    ChannelRecord,
    DataRecord,
    RecordError,
    decode_record,
)
from sm_train.toolkit.costing import history, measured_speeds
from sm_train.toolkit.costing.measured_speeds import MeasuredSpeed
from sm_train.toolkit.errors import UserError

WRONG = ("a text", -3, 1e999, float("nan"), True, None, [], {}, [1], {"a": 1}, 2**70)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value that is no object or list, and of each object and list."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from leaves(item, (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    if not path:
        return value
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


def shape(value: Any) -> Any:
    """Return the types in a value, by which a program uses it; a number may be whole."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shape(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return type(value).__name__


MARKER = json.loads(
    CheckpointMarker(
        5, 8, "f", (CheckpointFile("data.npz", 3, "ab"), CheckpointFile("x", 4, "cd")), "sagemaker"
    ).to_json()
)
MEASUREMENT = Measurement(
    "job", 1.8, 32, 256, 2048, "ml.p4de.24xlarge", 3600.0, 1.7, 1.9, False, 8, 1, "bf16"
)
SPEED = MeasuredSpeed(
    *("256px", "w", MEASUREMENT, "job", "2026-11-29", 4, 200, 3686.4, 0.01, 0.4),
    *(10**10, 1e10, "images", {"level": "ok"}, 0.21),
)
HISTORY = {
    "version": history._VERSION,
    "observed": asdict(Observed(2, 10.5, 1, 300.0, 400.0, 0.5, 60.0)),
    "measurements": [asdict(MEASUREMENT)],
}
SPEEDS = {
    "version": measured_speeds._VERSION,
    "speeds": [json.loads(json.dumps(asdict(SPEED)))],
}

RECORD = json.loads(
    DataRecord(
        *("demo", "256px", "demo-1", "indexed", "d1"),
        (ChannelRecord("train", "s3://b/index.parquet", "d1", "content", 9, "a = 1", 2.0),),
        2,
        (Anchor(0, 0, 0, "2026-11-29T00:00:00+00:00", {"train": 3}),),
        "shards.parquet",
        b"state",
        "sagemaker",
    ).encode()
)

READERS: dict[str, tuple[Any, Callable[[bytes], Any], type[Exception]]] = {
    "marker": (MARKER, CheckpointMarker.parse, MarkerError),
    "data record": (RECORD, lambda content: decode_record(content, "r"), RecordError),
    "history": (HISTORY, lambda content: history._parse(content, "s3://b/h"), UserError),
    "speeds": (SPEEDS, lambda content: measured_speeds._parse(content, "s3://b/m"), UserError),
}


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_value_is_one_error_or_is_not_read(name: str) -> None:
    document, read, error = READERS[name]
    valid = shape(plain(read(json.dumps(document).encode())))
    refused = 0
    for path in leaves(document):
        for value in WRONG:
            content = json.dumps(with_value(document, path, value)).encode()
            found = outcome(read, content, error)
            if isinstance(found, str):
                assert "\n" not in found
                refused += 1
            else:
                require_shape(shape(plain(found)), valid)
    assert refused > 3 * len(list(leaves(document)))
    with pytest.raises(error):
        read(b"{")


def outcome(read: Callable[[bytes], Any], content: bytes, error: type[Exception]) -> Any:
    """Return what a reader returns, or the text of its error."""
    try:
        return read(content)
    except error as refusal:
        return str(refusal)


def plain(found: Any) -> Any:
    return [asdict(item) for item in found] if isinstance(found, tuple) else asdict(found)


def require_shape(found: Any, valid: Any) -> None:
    """Require that each value has its type, or is None; lists may be empty."""
    if isinstance(valid, dict) and isinstance(found, dict):
        for name in found.keys() & valid.keys():
            require_shape(found[name], valid[name])
    elif isinstance(valid, list) and isinstance(found, list):
        for item in found:
            require_shape(item, valid[0])
    else:
        assert found in (valid, "NoneType")


def test_versions_are_named() -> None:
    content = json.dumps(MARKER | {"format": FORMAT_VERSION + 1}).encode()
    with pytest.raises(MarkerError, match=f"this version reads {FORMAT_VERSION}"):
        CheckpointMarker.parse(content)


def test_a_lease_of_wrong_values_is_damaged(tmp_path: Path) -> None:
    files = LocalLeaseFiles(tmp_path)
    Lease(files, "lease.json", Holder("t", "host", 7), {"work": 1}).take(None)
    stored = read_lease(files, "lease.json")
    assert stored is not None
    document = json.loads((tmp_path / "lease.json").read_text())
    for path in leaves(document["holder"]):
        for value in WRONG:
            is_own_type = (path == ("process",) and value == -3) or (
                path in [("token",), ("host",), ("job",)] and isinstance(value, str)
            )
            wrong = document | {"holder": with_value(document["holder"], path, value)}
            (tmp_path / "lease.json").write_text(json.dumps(wrong))
            if is_own_type:
                assert read_lease(files, "lease.json") is not None
                continue
            with pytest.raises(ValueError, match=r"."):
                read_lease(files, "lease.json")
