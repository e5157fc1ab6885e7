"""The files of a plan: partitions are read back exactly, from any row on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from sm_train.entrypoints.packing import plan_files
from sm_train.entrypoints.packing.plan import PackInput
from sm_train.entrypoints.packing.plan_files import (
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
    return PackInput(number, source, f"in/{source}", number, None, text)


def row(item: PackInput) -> tuple[bytes | int | None, ...]:
    default = item.address == f"in/{item.source}"
    next_to = item.caption_address == f"{item.address.removesuffix('.jpg')}.txt"
    text = None if item.caption_address is None or next_to else encode(item.caption_address)
    caption = None if item.caption is None else encode(item.caption)
    address = None if default else encode(item.address)
    return encode(item.source), address, item.bytes, caption, text, 2048


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
