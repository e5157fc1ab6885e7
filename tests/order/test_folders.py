"""Commands that write packs, indexes and tables to a folder, killed at any of their calls."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard

from tests.conftest import clean_environment
from tests.support.image_files import image_bytes, write_album, write_pair
from tests.support.order.traced import Call, Program, not_durable, read_trace

State = object
"""What readers find in a folder: equal states hold the same samples."""

LAST = ("index.parquet", "enriched.json")
"""What is named last: it vouches for everything else."""

PACK = ("pack", "in", "out", "--shard-size", "3KB")
ENRICH = ("enrich", "in", "table", "--with", "columns:describe")
FUNCTION = """
def describe(batch):
    return {"width": [image.width for image in batch.images]}
"""


def pack_state(folder: Path) -> State:
    """Return the samples of a pack; None without an index. All its shards must be intact."""
    path = folder / "out" / "index.parquet"
    if not path.exists():
        return None
    index = ShardIndex(path)
    for number, name in enumerate(index.names):
        verify_shard(folder / "out" / "shards" / name, index.shard(number))
    keys = [key for number in range(len(index)) for key in index.keys(number)]
    return keys, len(list(index.rejected()))


def table_state(folder: Path) -> State:
    """Return the rows of an enriched table; None while it is not finished."""
    if not (folder / "table" / "enriched.json").exists():
        return None
    files = sorted((folder / "table" / "table").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def add_images(folder: Path) -> None:
    for number in range(20, 23):
        write_pair(folder / "in", f"{number}.jpg", image_bytes(number), "later")


def damage_nothing(folder: Path) -> None:
    """The command begins with what is there."""


@dataclass(frozen=True)
class Writer:
    """A command, what comes before it, and how its result is read."""

    before: tuple[tuple[str, ...], ...]
    change: Callable[[Path], None]
    arguments: tuple[str, ...]
    state: Callable[[Path], State]


def move_shard(folder: Path) -> None:
    """A shard that the index does not have yet."""
    shards = folder / "out" / "shards"
    shutil.copy(shards / "shard-000000.tar", shards / "later.tar")


WRITERS = {
    "pack": Writer((), damage_nothing, PACK, pack_state),
    "append": Writer((PACK,), add_images, (*PACK, "--append"), pack_state),
    "remove": Writer((PACK,), damage_nothing, ("remove", "out", "003.jpg", "--yes"), pack_state),
    "index": Writer((PACK,), move_shard, ("index", "out/shards"), pack_state),
    "enrich": Writer((), damage_nothing, ENRICH, table_state),
}


class Prepared:
    """A writer's folder before its command, of which each attempt gets a copy."""

    def __init__(self, writer: Writer, folder: Path) -> None:
        self.writer, self._folder = writer, folder
        self._copies = 0
        start = folder / "start"
        start.mkdir(parents=True)
        write_album(start / "in", 7)
        (start / "columns.py").write_text(FUNCTION)
        for arguments in writer.before:
            done = self._program(start, arguments).run(folder / "trace")
            assert done.returncode == 0, done.stderr
        writer.change(start)

    def copy(self) -> Path:
        self._copies += 1
        copy = self._folder / f"copy-{self._copies}"
        shutil.copytree(self._folder / "start", copy)
        return copy

    def run(self, folder: Path, kill_at: int = 0, fail_at: int = 0) -> tuple[Any, list[Call]]:
        trace = self._folder / "trace"
        done = self._program(folder, self.writer.arguments).run(trace, kill_at, fail_at)
        return done, read_trace(trace) if trace.exists() else []

    @staticmethod
    def _program(folder: Path, arguments: tuple[str, ...]) -> Program:
        return Program(folder, clean_environment(folder), arguments)


@pytest.fixture(params=WRITERS, name="prepared")
def _prepared(request: pytest.FixtureRequest, tmp_path: Path) -> Prepared:
    return Prepared(WRITERS[request.param], tmp_path)


def below(calls: list[Call], folder: Path) -> list[Call]:
    """Return the calls that change the results: those below ``folder``."""
    return [call for call in calls if call.path.startswith(f"{folder}/")]


def results(folder: Path) -> Path:
    return folder / ("table" if (folder / "table").exists() else "out")


@pytest.mark.integration
def test_content_is_flushed_before_its_name_and_names_before_removals(prepared: Prepared) -> None:
    folder = prepared.copy()
    done, calls = prepared.run(folder)
    assert done.returncode == 0, done.stderr
    written = [call for call in calls if call.path.startswith(str(results(folder)))]
    assert any(call.kind == "name" for call in written)
    assert [*not_durable(written)] == []
    # Nothing was written under its final name: all that is new got it from a temporary one.
    named = {call.path for call in written if call.kind == "name"}
    before = {path.relative_to(folder) for path in results(folder).rglob("*")}
    before -= {path.relative_to(folder) for path in map(Path, named)}
    start = prepared.copy()
    assert all((start / path).exists() for path in before if (folder / path).is_file()), before
    if prepared.writer.arguments[0] != "remove":
        last = [call for call in written if call.kind == "name"][-1]
        assert last.name.startswith(LAST), last


def require_recovery(prepared: Prepared, numbers: list[int]) -> None:
    """Require that a kill at each of these calls leaves the state before or after the command.

    The same command then ends with the state after.
    """
    before = prepared.writer.state(prepared.copy())
    whole = prepared.copy()
    done, _ = prepared.run(whole)
    assert done.returncode == 0, done.stderr
    after = prepared.writer.state(whole)
    assert after != before
    for number in numbers:
        folder = prepared.copy()
        killed, calls = prepared.run(folder, kill_at=number)
        if killed.returncode == 0:
            continue  # a run with fewer calls: threads differ in their number
        assert prepared.writer.state(folder) in (before, after), (number, calls[-1])
        again, _ = prepared.run(folder)
        assert again.returncode == 0, (number, calls[-1], again.stderr)
        assert prepared.writer.state(folder) == after, (number, calls[-1])
        shutil.rmtree(folder)


def deciding_calls(prepared: Prepared) -> list[int]:
    """Return the numbers of the calls that change the results."""
    folder = prepared.copy()
    done, calls = prepared.run(folder)
    assert done.returncode == 0, done.stderr
    changing = {id(call) for call in below(calls, results(folder))}
    return [number for number, call in enumerate(calls, start=1) if id(call) in changing]


@pytest.mark.integration
def test_a_kill_at_some_calls_leaves_the_state_before_or_after(prepared: Prepared) -> None:
    numbers = deciding_calls(prepared)
    # The last calls name the index and remove the state of the work.
    chosen = random.Random(0).sample(numbers, 1) + numbers[-12::8]
    require_recovery(prepared, chosen)


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_the_state_before_or_after(prepared: Prepared) -> None:
    require_recovery(prepared, deciding_calls(prepared))


_PATH = re.compile(r"[\w.-]+\.(?:tar|parquet|jsonl?)\b|out/|table/")
"""A file of the results, or one of their folders."""


def require_named_error(prepared: Prepared, numbers: list[int]) -> None:
    """Require that a failure of each of these calls is one line that names a file, with code 1."""
    for number in numbers:
        folder = prepared.copy()
        failed, calls = prepared.run(folder, fail_at=number)
        # Another call may make up for a removal that failed.
        if failed.returncode != 0:
            errors = [line for line in failed.stderr.splitlines() if line.startswith("sm-train: ")]
            assert failed.returncode == 1, (calls[-1], failed.stderr)
            assert len(errors) == 1, failed.stderr
            assert _PATH.search(errors[0]), errors
            assert "Input/output error" in errors[0]
        again, _ = prepared.run(folder)
        assert again.returncode == 0, (number, calls[-1], again.stderr)
        shutil.rmtree(folder)


def flushes_and_names(prepared: Prepared) -> list[int]:
    folder = prepared.copy()
    done, calls = prepared.run(folder)
    assert done.returncode == 0, done.stderr
    kinds = {id(call) for call in below(calls, results(folder)) if call.kind in ("flush", "name")}
    return [number for number, call in enumerate(calls, start=1) if id(call) in kinds]


@pytest.mark.integration
@pytest.mark.parametrize("prepared", ["pack"], indirect=True)
def test_an_error_of_the_disk_names_the_file(prepared: Prepared) -> None:
    require_named_error(prepared, random.Random(2).sample(flushes_and_names(prepared), 2))


@pytest.mark.slow
def test_an_error_of_the_disk_at_any_call_names_the_file(prepared: Prepared) -> None:
    require_named_error(prepared, flushes_and_names(prepared))
