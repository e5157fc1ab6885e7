"""The files of a plan: partitions are read back exactly, from any row on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from sm_train.entrypoints.data_prep.packing import plan_files
from sm_train.entrypoints.data_prep.packing.plan import PackInput
from sm_train.entrypoints.data_prep.packing.plan_files import (
    INPUT_SCHEMA,
    INPUTS,
    PartitionWriter,
    PlanFiles,
    PlannedInputs,
    encode,
    partition_names,
)

ODD_NAME = "caf\udce9 🖼/a.b.jpg"
"""A file name with a byte that is not UTF-8, as Python decodes it."""


def planned(number: int) -> PackInput:
    """Return inputs of all kinds: near the root or elsewhere, with a caption or a file of it."""
    source = f"{number:03}/{ODD_NAME}"
    if number % 3 == 0:
        return PackInput(number, source, f"s3://other/{number}.jpg", 5, f"half a \ud83d {number}")
    text = f"captions/{number}.txt" if number % 3 == 1 else f"in/{number:03}/caf\udce9 🖼/a.b.txt"
    fields = '{"columns": {"license": "CC0"}}' if number % 3 == 1 else None
    return PackInput(number, source, f"in/{source}", number, None, text, fields)


def row(item: PackInput) -> tuple[bytes | int | None, ...]:
    default = item.address == f"in/{item.source}"
    next_to = item.caption_address == f"{item.address.removesuffix('.jpg')}.txt"
    text = None if item.caption_address is None or next_to else encode(item.caption_address)
    caption = None if item.caption is None else encode(item.caption)
    address = None if default else encode(item.address)
    fields = None if item.table_fields is None else encode(item.table_fields)
    return encode(item.source), address, item.bytes, caption, text, 2048, fields


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_inputs_are_read_back_from_any_row_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(plan_files, "PARTITION_ROWS", 10)
    monkeypatch.setattr(plan_files, "_GROUP_ROWS", 4)
    items = [planned(number) for number in range(33)]
    with PartitionWriter(tmp_path, INPUTS, INPUT_SCHEMA) as writer:
        for first in range(0, len(items), batch):
            cells = zip(*map(row, items[first : first + batch]), strict=True)
            columns = [
                pa.array(column, field.type)
                for column, field in zip(cells, INPUT_SCHEMA, strict=True)
            ]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=INPUT_SCHEMA))
    assert sorted(path.name for path in tmp_path.iterdir()) == partition_names(INPUTS, 33)
    files = PlanFiles(str(tmp_path))
    for first, count in [(0, 33), (0, 0), (9, 2), (10, 10), (3, 29), (32, 1)]:
        inputs = PlannedInputs(files, "in/", first, count)
        assert len(inputs) == count
        assert list(inputs) == items[first : first + count]


def test_plans_of_earlier_versions_have_no_fields_of_a_table(tmp_path: Path) -> None:
    items = [planned(number) for number in (0, 2, 5)]
    schema = pa.schema([field for field in INPUT_SCHEMA if field.name != "table_fields"])
    with PartitionWriter(tmp_path, INPUTS, schema) as writer:
        rows = zip(*(row(item)[:-1] for item in items), strict=True)
        cells = [pa.array(cell, field.type) for cell, field in zip(rows, schema, strict=True)]
        writer.write(pa.RecordBatch.from_arrays(cells, schema=schema))
    read = list(PlannedInputs(PlanFiles(str(tmp_path)), "in/", 0, 3))
    assert [item.source for item in read] == [item.source for item in items]
    assert {item.table_fields for item in read} == {None}
