"""Measures packing images inside a Parquet table, as Hugging Face's data sets have them.

The peer is the same pack from image files. Both are packed by two processes, with every image
decoded; the physical limit is the time to read the table's bytes once. Peak memory is the largest
resident set size of a worker (getrusage(2)): it holds up to three row groups.

    python benchmarks/embedded_images.py [--images 4000] [--group 200]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pyarrow as pa
import pyarrow.parquet as pq
from photos import photo
from sm_train.toolkit.data_prep.pack_function import pack


def main() -> None:
    """Pack both sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--group", type=int, default=200)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    photos = [photo(512, number) for number in range(64)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "files").mkdir()
        rows = []
        for number in range(options.images):
            content, caption = photos[number % len(photos)], f"photo {number}"
            (folder / "files" / f"{number:06d}.jpg").write_bytes(content)
            (folder / "files" / f"{number:06d}.txt").write_text(caption)
            rows.append({"image": {"bytes": content, "path": None}, "caption": caption})
        table = folder / "in.parquet"
        pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=options.group)
        del rows
        started = time.perf_counter()
        table.read_bytes()
        print(f"reading the bytes once: {time.perf_counter() - started:.2f} s")
        seconds = {}
        for name, source in (("files", folder / "files"), ("table", table)):
            started = time.perf_counter()
            pack(source, folder / f"packed-{name}", workers=2)
            seconds[name] = time.perf_counter() - started
            peak = getrusage(RUSAGE_CHILDREN).ru_maxrss * 1024
            speed = options.images / seconds[name]
            print(f"{name}: {speed:,.0f} images/s, {peak / 1e6:.0f} MB in the largest worker")
        print(f"a table takes {seconds['table'] / seconds['files']:.2f} × as long as files")


if __name__ == "__main__":
    main()
