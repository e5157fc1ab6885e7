"""Tables of images and captions for the tests of packing."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Rows = list[dict[str, Any]]


def encode_table(kind: str, rows: Rows, **options: Any) -> bytes:
    """Return a CSV, JSONL or Parquet table; ``options`` are those of pyarrow's writer."""
    if kind == "parquet":
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), content, **options)
        return content.getvalue()
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def write_table(folder: Path, kind: str, rows: Rows) -> Path:
    """Write a table into ``folder`` and return its path."""
    path = folder / f"list.{kind}"
    path.write_bytes(encode_table(kind, rows))
    return path
