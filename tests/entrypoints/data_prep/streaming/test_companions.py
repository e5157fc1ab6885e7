"""The captions and columns of arriving images: in files next to them, or in tags."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sm_train
from sm_train.entrypoints.data_prep.streaming import lambda_handler
from sm_train.entrypoints.data_prep.streaming.companions import DeclaredColumns, NotYetError
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError
from sm_train.entrypoints.shards.shard_index import ShardIndex

from tests.conftest import Aws
from tests.support.image_files import image_bytes
from tests.support.streaming.deployment import Deployment, FakeContext, deploy

COLUMNS = "license text, expiry date, price number, is_model_released boolean"


@pytest.fixture
def deployment(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return deploy(aws, monkeypatch)


def declare(monkeypatch: pytest.MonkeyPatch, columns: str, origin: str = "sidecar") -> None:
    monkeypatch.setenv("SM_TRAIN_COLUMNS", columns)
    monkeypatch.setenv("SM_TRAIN_COLUMNS_FROM", origin)


def put(deployment: Deployment, key: str, content: Any) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    deployment.s3.put_object(Bucket="raw", Key=key, Body=body)


def read_index(deployment: Deployment, path: Path) -> ShardIndex:
    deployment.s3.download_file("packed", "set/index.parquet", str(path))
    return ShardIndex(path)


def values(index: ShardIndex, *names: str) -> dict[str, list[Any]]:
    """Return the values of columns of all samples."""
    [*tables] = (group.columns for group in index.samples_by_group(names))
    return {name: [cell for table in tables for cell in table[name].to_pylist()] for name in names}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("license", "Columns: 'license': write NAME TYPE, of text, integer"),
        ("a-b text", "Columns: 'a-b text': write NAME TYPE"),
        ("expiry day", "Columns: 'expiry day': write NAME TYPE"),
        ("source text", "Columns: source is a name of sm-train's; choose another name"),
        ("Source text", "Columns: Source is a name of sm-train's; choose another name"),
        ("a text, A date", "Columns: A is there twice; choose another name"),
    ],
)
def test_an_invalid_declaration_is_one_line(text: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        DeclaredColumns.of(text, "sidecar")
    assert str(raised.value).startswith(error)
    with pytest.raises(ValueError, match="ColumnsFrom: 'exif' is neither sidecar nor tags"):
        DeclaredColumns.of("", "exif")


@pytest.mark.parametrize(
    ("kind", "value", "cell"),
    [
        ("text", "CC BY", "CC BY"),
        ("text", "", None),
        ("text", 12, "12"),
        ("text", True, "true"),
        ("integer", "12", 12),
        ("integer", 123456789012345678, 123456789012345678),
        ("integer", "-9223372036854775808", -(2**63)),
        ("number", "1e3", 1000.0),
        ("number", 12, 12.0),
        ("number", "NaN", None),
        ("boolean", "True", True),
        ("boolean", "false", False),
        ("date", "2027-06-01", "2027-06-01"),
        ("timestamp", "2027-06-01T10:00:00+02:00", "2027-06-01T10:00:00+02:00"),
        ("timestamp", "2027-06-01", "2027-06-01"),
    ],
)
def test_a_value_has_the_type_of_its_column(kind: str, value: Any, cell: Any) -> None:
    declared = DeclaredColumns.of(f"a {kind}", "sidecar")
    found = declared.cells({"a": value, "b": 1}, "x.json")
    assert found == {"a": cell}
    assert type(found["a"]) is type(cell)
    assert declared.cells({}, "x.json") == {"a": None}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("integer", "007"),
        ("integer", 1.5),
        ("integer", 2**63),
        ("integer", "9223372036854775808"),
        ("number", "1e400"),
        ("number", "E100"),
        ("number", float("inf")),
        ("number", "much"),
        ("number", True),
        ("boolean", 1),
        ("date", "01/06/2027"),
        ("date", "2027-06-31"),
        ("date", "2027-06-01T10:00:00Z"),
        ("timestamp", 1811808000),
        ("text", ["a"]),
        ("text", {"a": 1}),
    ],
)
def test_a_value_of_another_type_is_named(kind: str, value: Any) -> None:
    with pytest.raises(NotYetError) as raised:
        DeclaredColumns.of(f"a {kind}", "sidecar").cells({"a": value}, "x.json")
    assert str(raised.value) == f"x.json: a: {json.dumps(value)} is no {kind}"


@pytest.mark.integration
def test_columns_of_sidecars_are_in_samples_and_index(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, COLUMNS)
    first = {"license": "CC BY", "expiry": "2027-06-01", "price": 12, "is_model_released": True}
    put(deployment, "0.json", first | {"photographer": "x"})
    put(deployment, "1.json", b'\xef\xbb\xbf{"license": null, "price": NaN}')
    for number in range(3):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    [failed] = deployment.drain()
    assert "2.jpg" in failed
    put(deployment, "2.json", {"expiry": "31.12.2027"})
    deployment.send(failed)
    assert deployment.drain() == {failed}
    put(deployment, "2.json", {"expiry": "2027-12-31"})
    deployment.send(failed)
    assert deployment.drain() == set()
    deployment.flush()
    index = read_index(deployment, tmp_path / "index.parquet")
    assert index.header.columns == {
        "license": "text",
        "expiry": "date",
        "price": "number",
        "is_model_released": "boolean",
    }
    assert index.header.options["index_columns"] == sorted(first)
    found = values(index, *first)
    rows = sorted(zip(*found.values(), strict=True), key=str)
    assert rows == sorted(
        [
            ("CC BY", date(2027, 6, 1), 12.0, True),
            (None, None, None, None),
            (None, date(2027, 12, 31), None, None),
        ],
        key=str,
    )
    documents = deployment.documents(tmp_path)
    assert documents["s3://raw/0.jpg"]["columns"] == first
    assert documents["s3://raw/1.jpg"]["columns"] == dict.fromkeys(first)


@pytest.mark.integration
def test_a_damaged_image_does_not_wait_for_its_files(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, COLUMNS)
    deployment.arrive("0.jpg", image_bytes(0)[:300], caption=None)
    deployment.arrive("1.jpg", image_bytes(1)[:300])
    assert deployment.drain() == set()
    put(deployment, "2.json", {})
    deployment.arrive("2.jpg", image_bytes(2))
    assert deployment.drain() == set()
    deployment.flush()
    index = read_index(deployment, tmp_path / "index.parquet")
    assert {(item.source, item.reason) for item in index.rejected()} == {
        ("s3://raw/0.jpg", "image-corrupt"),
        ("s3://raw/1.jpg", "image-corrupt"),
    }


@pytest.mark.integration
def test_columns_of_tags_are_texts_of_the_declared_types(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, "license text, expiry date, taken timestamp", "tags")
    deployment.s3.put_object(
        Bucket="raw",
        Key="a.jpg",
        Body=image_bytes(1),
        Tagging="license=CC%20BY&taken=2027-06-01T10:00:00Z&by=x",
    )
    deployment.arrive("a.jpg", image_bytes(1), tags="license=CC%20BY&taken=2027-06-01T10:00:00Z")
    deployment.arrive("b.jpg", image_bytes(2))
    assert deployment.drain() == set()
    deployment.flush()
    index = read_index(deployment, tmp_path / "index.parquet")
    found = values(index, "license", "expiry", "taken")
    assert sorted(found["license"], key=str) == ["CC BY", None]
    assert found["expiry"] == [None, None]
    assert datetime(2027, 6, 1, 10) in found["taken"]


@pytest.mark.integration
def test_captions_of_kohya_are_read_and_other_files_are_not_images(
    deployment: Deployment, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, suffix in (("a", ".caption"), ("b", ".txt"), ("b", ".caption")):
        put(deployment, f"{name}{suffix}", f"of {suffix}".encode())
    for number, name in enumerate("ab"):
        deployment.arrive(f"{name}.jpg", image_bytes(number), caption=None)
    put(deployment, "a.json", {})
    for name in ("a.caption", "b.txt", "a.json"):
        deployment.announce(name)
    assert deployment.drain() == set()
    assert "skipped" not in capfd.readouterr().out
    deployment.flush()
    captions = {
        name: document["caption_length"]
        for name, document in deployment.documents(tmp_path).items()
    }
    assert captions == {
        "s3://raw/a.jpg": len("of .caption"),
        "s3://raw/b.jpg": len("of .txt"),
    }


@pytest.mark.integration
def test_columns_that_are_declared_later_are_added_to_the_index(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of before have no value; a type that changes becomes one that holds all values."""
    deployment.arrive("0.jpg", image_bytes(0))
    assert deployment.drain() == set()
    deployment.flush()
    index = read_index(deployment, tmp_path / "0.parquet")
    assert (index.header.columns, "index_columns" in index.header.options) == ({}, False)
    for number, columns in enumerate(("expiry date", "expiry text, price number"), start=1):
        declare(monkeypatch, columns)
        put(deployment, f"{number}.json", {"expiry": "2027-06-01", "price": 2.5})
        deployment.arrive(f"{number}.jpg", image_bytes(number))
        assert deployment.drain() == set()
        deployment.flush()
        index = read_index(deployment, tmp_path / f"{number}.parquet")
        expiry = date(2027, 6, 1) if number == 1 else "2027-06-01"
        assert values(index, "expiry")["expiry"] == [None, *[expiry] * number]
    assert index.header.columns == {"expiry": "text", "price": "number"}
    assert values(index, "price")["price"] == [None, None, 2.5]
    assert index.header.options["index_columns"] == ["expiry", "price"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("before", "after", "kind", "found"),
    [
        (("id integer", 2**60 + 1), ("id number", 1.5), "number", [float(2**60), 1.5]),
        (("id date", "2027-06-01"), ("id timestamp", "2027-06-01T10:00:00Z"), "timestamp", None),
        (("id text", "a"), ("ID text", "b"), "text", ["a", "b"]),
    ],
)
def test_a_declaration_that_changes_keeps_the_index_going(
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[str, Any],
    after: tuple[str, Any],
    kind: str,
    found: list[Any] | None,
) -> None:
    """Names that differ in case are one column, as SQL has it."""
    for number, (columns, value) in enumerate((before, after)):
        declare(monkeypatch, columns)
        put(deployment, f"{number}.json", {columns.partition(" ")[0]: value})
        deployment.arrive(f"{number}.jpg", image_bytes(number))
        assert deployment.drain() == set()
        deployment.flush()
    index = read_index(deployment, tmp_path / "index.parquet")
    assert index.header.columns == {"id": kind}
    moments = [datetime(2027, 6, 1), datetime(2027, 6, 1, 10)]
    assert values(index, "id")["id"] == (moments if found is None else found)


@pytest.mark.integration
def test_a_decimal_of_a_pack_and_a_number_of_a_stream_are_numbers(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.jpg").write_bytes(image_bytes(0))
    table = {"image": ["0.jpg"], "caption": ["a"], "price": pa.array([Decimal("9.50")])}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    source, target = str(tmp_path / "t.parquet"), "s3://packed/set"
    sm_train.pack(source, target, index_column="price", region="us-east-1", shard_size="20000")
    declare(monkeypatch, "price number")
    put(deployment, "1.json", {"price": 12.5})
    deployment.arrive("1.jpg", image_bytes(1))
    assert deployment.drain() == set()
    deployment.flush()
    index = read_index(deployment, tmp_path / "index.parquet")
    assert index.header.columns == {"price": "number"}
    assert values(index, "price")["price"] == [9.5, 12.5]


@pytest.mark.integration
def test_a_large_sidecar_is_not_read(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    declare(monkeypatch, "license text")
    put(deployment, "0.json", {"license": "x" * 1_000_000})
    deployment.arrive("0.jpg", image_bytes(0))
    assert len(deployment.drain()) == 1
    assert "0.json has more than 1,000,000 bytes" in capfd.readouterr().out


@pytest.mark.integration
def test_staged_samples_of_other_types_name_the_remedy(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, "expiry text")
    put(deployment, "0.json", {"expiry": "soon"})
    deployment.arrive("0.jpg", image_bytes(0))
    assert deployment.drain() == set()
    declare(monkeypatch, "expiry date")
    with pytest.raises(PlanError, match='expiry: "soon" is no date; declare it as it was, or as'):
        deployment.flush()
    declare(monkeypatch, "license text")
    with pytest.raises(PlanError, match="expiry: the stack declares no such column; declare it as"):
        deployment.flush()
    declare(monkeypatch, "expiry text")
    deployment.flush()
    index = read_index(deployment, tmp_path / "index.parquet")
    assert values(index, "expiry")["expiry"] == ["soon"]


@pytest.mark.integration
def test_a_wrong_declaration_fails_before_any_message(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, "expiry dat")
    deployment.arrive("0.jpg", image_bytes(0))
    with pytest.raises(ValueError, match="Columns: 'expiry dat'"):
        lambda_handler.stage({"Records": deployment.receive()}, FakeContext())
