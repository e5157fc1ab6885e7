"""``sm-train enrich`` on this machine: tables, shards, failures, interruptions and changed code."""

from __future__ import annotations

import json
import signal
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.data_prep.enrichment import enrichment_plan
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import TableSource
from sm_train.entrypoints.data_prep.enrichment.table_parts import read_summary
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.enrichment.enrich import EnrichJob, enrich

from tests.conftest import Cli
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair

SIZE = ("--shard-size", "10KB")

CODE = '''
import os
import signal
from pathlib import Path

import numpy as np


def facts(batch):
    """Columns of each type; every call is noted."""
    with Path(__file__).with_name("calls.txt").open("a") as file:
        file.writelines(f"{name}\\n" for name in batch.names)
    return {
        "brightness": np.asarray([np.asarray(image).mean() for image in batch.images]),
        "is_wide": [image.width > image.height for image in batch.images],
        "area": [image.width * image.height for image in batch.images],
        "text": [f"{row.get('caption')} of {name}" for name, row in zip(batch.names, batch.rows)],
        "vector": np.ones((len(batch), 3), np.float32),
        "nothing": [None] * len(batch),
    }


def facts_or_kill(batch):
    """Kill the command at the image that a file names."""
    victim = Path(__file__).with_name("kill.txt")
    if victim.exists() and victim.read_text() in batch.names:
        victim.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return facts(batch)


def raises(batch):
    raise ValueError("no\\nweights")


def short(batch):
    return {"score": [1]}


def nested(batch):
    return {"score": [[[1]]] * len(batch)}


def known(batch):
    return {"caption": ["x"] * len(batch)}


def mixed(batch):
    return {"score": [1 if name < "004" else "high" for name in batch.names]}


def no_dict(batch):
    return [1] * len(batch)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with code and an album of nine images, one of them damaged."""
    (tmp_path / "scores.py").write_text(CODE)
    write_album(tmp_path / "in", 8)
    write_pair(tmp_path / "in", "cut.jpg", image_bytes()[:300], "damaged")
    return tmp_path


def rows(folder: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path) for path in sorted((folder / "table").iterdir())]
    found: list[dict[str, Any]] = pa.concat_tables(tables, promote_options="default").to_pylist()
    return found


def documents(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the JSON file of every sample by its key."""
    found = {}
    for path in sorted((folder / "shards").iterdir()):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    file = tar.extractfile(member)
                    assert file is not None
                    found[member.name.removesuffix(".json")] = json.load(file)
    return found


@pytest.mark.slow
def test_a_folder_becomes_a_table_that_pack_reads(cli: Cli, folder: Path) -> None:
    write_pair(folder / "in", "uncaptioned.png", image_bytes(99, (20, 40), "PNG"), None)
    result = cli("enrich", "in", "out", "--with", "scores:facts", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["columns"] == {
        "brightness": "number",
        "is_wide": "boolean",
        "area": "integer",
        "text": "text",
        "vector": "vector",
        "nothing": None,
    }
    assert document["failed"] == {"image-corrupt": 1}
    assert "cut.jpg: " in result.stderr
    table = rows(folder / "out")
    assert [row["image"] for row in table] == sorted(row["image"] for row in table)
    assert list(table[0]) == ["image", "caption", *document["columns"]]
    by_name = {row["image"]: row for row in table}
    assert len(by_name) == len(table) == 10
    first = by_name["000.jpg"]
    assert (first["is_wide"], first["area"], first["vector"]) == (True, 48 * 32, [1.0, 1.0, 1.0])
    assert first["text"] == "picture 0 of 000.jpg"
    assert by_name["uncaptioned.png"]["text"] == "None of uncaptioned.png"
    assert by_name["cut.jpg"]["brightness"] is None
    next_command = result.stderr.partition("next: sm-train ")[2].strip()
    assert next_command == "pack in PACK --captions out/table --keep '*'"
    packed = cli(*next_command.replace("PACK", "packed").replace("'", "").split())
    assert packed.returncode == 0, packed.stderr
    first_sample = documents(folder / "packed")["000000000"]
    assert first_sample["columns"]["area"] == 48 * 32
    again = cli("enrich", "in", "out", "--with", "scores:facts")
    assert again.stderr.startswith("up to date: 10 images")


@pytest.mark.slow
def test_a_table_keeps_its_columns_and_a_condition_selects_rows(cli: Cli, folder: Path) -> None:
    lines = ["photo,license,year,caption"]
    lines += [f"{number:03}.jpg,L{number % 2},{2000 + number},dog" for number in (0, 1, 3, 4)]
    (folder / "in" / "list.csv").write_text("\n".join(lines))
    options = ("--image-column", "photo", "--where", "license = 'L1'", "--with", "scores:facts")
    result = cli("enrich", "in/list.csv", "out", *options)
    assert result.returncode == 0, result.stderr
    assert [(row["photo"], row["license"], row["year"]) for row in rows(folder / "out")] == [
        ("001.jpg", "L1", 2001),
        ("003.jpg", "L1", 2003),
    ]
    next_command = result.stderr.partition("next: sm-train ")[2].strip()
    packed = cli(*next_command.replace("PACK", "packed").replace("'", "").split())
    assert "packed 2 samples" in packed.stderr, packed.stderr
    assert documents(folder / "packed")["000000000"]["columns"]["license"] == "L1"


@pytest.mark.integration
def test_columns_of_a_table_keep_their_types(cli: Cli, folder: Path) -> None:
    """A condition on the new table selects the rows that it selects on the old one."""
    names = sorted(path.name for path in (folder / "in").rglob("*.jpg"))
    lines = [
        "image,caption,expiry,score,code",
        *(
            f"{path.relative_to(folder / 'in').as_posix()},text,2027-0{1 + row}-01,{row},0{row}"
            for row, path in enumerate(sorted((folder / "in").rglob("*.jpg")))
            if row < 8
        ),
    ]
    assert len(names) >= 8
    (folder / "list.csv").write_text("\n".join([*lines[:-1], lines[-1].replace(",7,", ",7.5,")]))
    done = cli("enrich", "in", "out", "--captions", "list.csv", "--with", "scores:facts")
    assert done.returncode == 0, done.stderr
    [part] = (folder / "out/table").iterdir()
    schema = pq.read_schema(part)
    found = [str(schema.field(name).type) for name in ("expiry", "score", "code", "caption")]
    assert found == ["date32[day]", "double", "string", "string"]
    condition = "expiry >= DATE '2027-06-01' and score < 7"
    counts = [
        json.loads(
            cli(
                "pack", "in", "x", "--captions", table, "--where", condition, "--dry-run", "--json"
            ).stdout
        )["images"]
        for table in ("list.csv", "out/table")
    ]
    assert counts == [2, 2]


def test_shards_keep_their_samples_and_get_columns(cli: Cli, folder: Path) -> None:
    assert cli("pack", "in", "packed", *SIZE).returncode == 0
    assert cli("remove", "packed", "001.jpg", "--yes").returncode == 0
    options = ("--with", "scores:facts", "--index-column", "brightness", "--index-column", "area")
    result = cli("enrich", "packed", "out", *options)
    assert result.returncode == 0, result.stderr
    before, after = documents(folder / "packed"), documents(folder / "out")
    assert before.keys() == after.keys()
    for key, document in after.items():
        columns = document.pop("columns")
        assert document == before[key]
        assert (columns["area"], columns["nothing"]) == (48 * 32, None)
    index = ShardIndex(folder / "out" / "index.parquet")
    assert index.header.columns == {"brightness": "number", "area": "integer"}
    for number, name in enumerate(index.names):
        verify_shard(folder / "out" / "shards" / name, index.shard(number))
    # Images are found by their paths, as in the pack.
    removed = cli("remove", "out", "003.jpg", "--dry-run")
    assert "removes 1 of 7 samples" in removed.stderr
    appended = cli("pack", "in", "out", *SIZE, "--append")
    assert "has columns of `sm-train enrich`" in appended.stderr


@pytest.mark.integration
def test_columns_of_an_index_keep_their_types(cli: Cli, folder: Path) -> None:
    values: dict[str, Any] = {
        "day": pa.array([date(2027, 6, 1), None]),
        "time": pa.array([datetime(2027, 6, 1, 10), None]),
        "price": pa.array([Decimal("9.50"), None]),
        "score": pa.array([0.1, None], pa.float32()),
        "hash": pa.array([2**64 - 1, 3], pa.uint64()),
        "flag": pa.array([True, None]),
        "license": pa.array(["CC0", None]),
    }
    images = sorted(path.name for path in (folder / "in").glob("*.jpg"))[:2]
    table = pa.table({"image": images, "caption": ["a", "b"], **values})
    pq.write_table(table, folder / "rights.parquet")
    columns = [part for name in values for part in ("--index-column", name)]
    packed = cli("pack", "in", "packed", "--captions", "rights.parquet", *columns)
    assert packed.returncode == 0, packed.stderr
    done = cli(*ENRICH, "scores:facts")
    assert done.returncode == 0, done.stderr
    before, after = (ShardIndex(folder / name / "index.parquet") for name in ("packed", "out"))
    assert after.header.columns == before.header.columns | {"area": "integer"}
    kept = {name: cells for name, cells in after.shard(0).columns.items() if name in values}
    assert kept == before.shard(0).columns


def test_a_killed_command_resumes_and_each_image_has_its_columns_once(
    cli: Cli, folder: Path
) -> None:
    assert cli("pack", "in", "packed", "--shard-size", "5KB").returncode == 0
    options = ("--with", "scores:facts_or_kill", "--index-column", "area", "--workers", "1")
    assert cli("enrich", "packed", "expected", *options).returncode == 0
    expected = read_tree(folder / "expected")
    (folder / "calls.txt").unlink()
    (folder / "kill.txt").write_text("000000005")
    killed = cli("enrich", "packed", "out", *options)
    assert killed.returncode == -signal.SIGKILL
    finished = (folder / "calls.txt").read_text().split()
    assert 0 < len(finished) < 8
    resumed = cli("enrich", "packed", "out", *options)
    assert resumed.returncode == 0, resumed.stderr
    assert read_tree(folder / "out") == expected
    # A command that was killed before its clean-up leaves its plan: the next one removes it.
    (folder / "out" / ".packing").mkdir()
    (folder / "out" / ".packing" / "plan.json").write_text("{}")
    (folder / "out" / ".packing" / "source-index.parquet").write_bytes(
        (folder / "packed" / "index.parquet").read_bytes()
    )
    assert cli("enrich", "packed", "out", *options).stderr.startswith("up to date")
    assert read_tree(folder / "out") == expected
    # What was finished is not computed again.
    calls = (folder / "calls.txt").read_text().split()
    assert sorted(calls) == sorted(documents(folder / "out"))


def job(folder: Path, **changes: Any) -> EnrichJob:
    places = str(folder / "in"), str(folder / "out")
    made = EnrichJob(*places, "scores:facts", folder, None, 2, 64, workers=1)
    return replace(made, **changes)


def test_a_failed_function_keeps_finished_parts_and_new_code_is_accepted_on_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrichment_plan, "_MIN_ROWS", 2)
    fails = '"area": [1 / (name != "006.jpg") for name in batch.names] and ['
    (folder / "scores.py").write_text(CODE.replace('"area": [', fails))
    with pytest.raises(UserError, match=r":\d+: ZeroDivisionError") as raised:
        enrich(job(folder), lambda progress: None)
    # The worker may have taken and finished a part after the failed one before it was stopped.
    kept = len(list((folder / "out").glob("table/*.parquet")))
    assert 2 <= kept < 5
    assert f"; {kept} of 5 parts are finished and kept, run the same" in str(raised.value)
    (folder / "scores.py").write_text(CODE)
    with pytest.raises(UserError, match=r"another version of scores:facts; .*--accept-changed"):
        enrich(job(folder), lambda progress: None)
    finished = enrich(job(folder, accepts_changed_code=True), lambda progress: None)
    assert (finished.result.images, finished.result.parts) == (9, 5)
    assert len({row["image"] for row in rows(folder / "out")}) == 9
    assert len(json.loads((folder / "out" / "enriched.json").read_text())["code"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "scores:raises: 000.jpg: scores.py:34: ValueError: no weights"),
        ("short", "scores:short: column score has 1 values for 8 images"),
        ("nested", "scores:nested: column score holds a nested list; return texts, numbers"),
        ("known", "scores:known: column caption: 000.jpg has it already"),
        ("mixed", "scores:mixed: column score mixes int and str; return one type"),
        ("no_dict", "scores:no_dict: returned list; return a dict of columns"),
        ("missing", "scores.py defines no missing"),
    ],
)
def test_a_wrong_function_is_one_line_and_leaves_nothing(
    folder: Path, function: str, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        enrich(job(folder, function=f"scores:{function}", batch_size=32), lambda progress: None)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_invalid_arguments_are_one_line(cli: Cli, folder: Path) -> None:
    assert cli("pack", "in", "packed", *SIZE).returncode == 0
    cases = [
        (("packed", "out", "--with", "scores"), "--with: scores: write module:function"),
        (("in", "out", "--with", "other:f"), "no module other in .; name its folder with --code"),
        (("in", "packed", "--with", "scores:facts"), "packed: is not empty; choose another"),
        (("in", "out", "--with", "scores:facts", "--index-column", "area"), "no set of shards"),
        (("packed", "out", "--with", "scores:facts", "--where", "a > 1"), "it needs a table"),
        (("packed", "out", "--with", "scores:facts", "--index-column", "vector"), "holds lists"),
        (("packed", "out", "--with", "scores:facts", "--index-column", "x"), "returns no column x"),
        (("in", "out", "--with", "scores:facts", "--yes"), "--yes: requires --on sagemaker"),
        (("in", "out", "--with", "scores:facts", "--on", "sagemaker"), "--on: requires --for RUN"),
        (("packed/shards/shard-000000.tar", "out", "--with", "scores:facts"), "neither a folder"),
    ]
    for arguments, message in cases:
        result = cli("enrich", *arguments)
        assert result.returncode != 0, arguments
        assert message in result.stderr, arguments
        assert result.stderr.count("\n") == 1, result.stderr
    assert not (folder / "out").exists()


@given(st.integers(1, 10**9))
def test_parts_cover_all_images_once(images: int) -> None:
    source = TableSource.of(images, "", "image", {}, {})
    assert 1024 <= source.part_rows <= 8192
    last = f"part-{-(-images // source.part_rows) - 1:06d}.parquet"
    files = enrichment_plan.PlanFiles("")
    last_inputs = source.inputs(last, files)
    assert source.inputs("part-000000.parquet", files).first == 0
    assert last_inputs.first + len(last_inputs) == images
    assert 0 < len(last_inputs) <= source.part_rows


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:100],
    "empty": lambda content: b"",
    "footer": lambda content: content[:-300] + bytes(200) + content[-100:],
}


@pytest.mark.integration
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_finished_part_is_made_again(cli: Cli, folder: Path, damage: str) -> None:
    """The same command rebuilds it: what was finished before an interruption may be cut."""
    assert cli("pack", "in", "packed", "--shard-size", "5KB").returncode == 0
    options = ("--with", "scores:facts_or_kill", "--workers", "1", "--index-column", "area")
    assert cli("enrich", "packed", "expected", *options).returncode == 0
    (folder / "kill.txt").write_text("000000005")
    assert cli("enrich", "packed", "out", *options).returncode == -signal.SIGKILL
    finished = [*(folder / "out" / ".packing").glob("shard-*.parquet")]
    assert finished
    for record in finished:
        record.write_bytes(DAMAGE[damage](record.read_bytes()))
    resumed = cli("enrich", "packed", "out", *options)
    assert resumed.returncode == 0, resumed.stderr
    assert read_tree(folder / "out") == read_tree(folder / "expected")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_a_table_is_not_finished(cli: Cli, folder: Path, damage: str) -> None:
    assert cli("enrich", "in", "out", "--with", "scores:facts").returncode == 0
    plan: Any = SimpleNamespace(destination=LocalFolder(folder / "out"))
    [part] = (folder / "out" / "table").iterdir()
    assert read_summary(plan, part.name) is not None
    part.write_bytes(DAMAGE[damage](part.read_bytes()))
    assert read_summary(plan, part.name) is None


ENRICH = ("enrich", "packed", "out", "--index-column", "area", "--with")


def grow(cli: Cli, folder: Path, first: int, count: int) -> None:
    """Pack an album, or add more images to it."""
    for number in range(first, first + count):
        write_pair(folder / "in", f"new{number:03}.jpg", image_bytes(number), f"picture {number}")
    packed = cli("pack", "in", "packed", *SIZE, *["--append"] * (folder / "packed").exists())
    assert packed.returncode == 0, packed.stderr


def names_of_calls(folder: Path) -> list[str]:
    found = (folder / "calls.txt").read_text().split()
    (folder / "calls.txt").unlink()
    return found


def test_only_added_shards_are_enriched(cli: Cli, folder: Path) -> None:
    """The result equals that of all shards at once."""
    grow(cli, folder, 0, 3)
    first = cli(*ENRICH, "scores:facts", "--json")
    assert first.returncode == 0, first.stderr
    assert len(names_of_calls(folder)) == json.loads(first.stdout)["images"] == 11
    grow(cli, folder, 3, 4)
    grown = cli(*ENRICH, "scores:facts", "--json")
    assert grown.returncode == 0, grown.stderr
    assert len(names_of_calls(folder)) == 4
    document = json.loads(grown.stdout)
    assert (document["images"], document["up_to_date"]) == (15, False)
    assert document["columns"] == json.loads(first.stdout)["columns"]
    at_once = cli("enrich", "packed", "whole", *ENRICH[3:], "scores:facts", "--json")
    assert at_once.returncode == 0, at_once.stderr
    assert read_tree(folder / "out/shards") == read_tree(folder / "whole/shards")
    out, whole = (ShardIndex(folder / name / "index.parquet") for name in ("out", "whole"))
    assert out.header == whole.header
    assert [out.shard(n) for n in range(len(out))] == [whole.shard(n) for n in range(len(whole))]
    assert [*out.rejected()] == [*whole.rejected()]
    assert not (folder / "out/.packing").exists()
    again = cli(*ENRICH, "scores:facts", "--json")
    assert json.loads(again.stdout)["up_to_date"] is True


def test_growing_is_resumed_also_if_the_source_grows_meanwhile(cli: Cli, folder: Path) -> None:
    grow(cli, folder, 0, 2)
    assert cli(*ENRICH, "scores:facts_or_kill").returncode == 0
    known = {*names_of_calls(folder)}
    grow(cli, folder, 2, 30)
    kept = read_tree(folder / "out/shards")
    index = ShardIndex(folder / "packed/index.parquet")
    (folder / "kill.txt").write_text(index.keys(len(index) - 1)[0])
    killed = cli(*ENRICH, "scores:facts_or_kill", "--workers", "1")
    assert killed.returncode == -signal.SIGKILL
    made = names_of_calls(folder)
    assert 0 < len(made) < 30
    grow(cli, folder, 32, 2)
    resumed = cli(*ENRICH, "scores:facts_or_kill", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["images"] == 42
    packed = ShardIndex(folder / "packed/index.parquet")
    keys = {key for number in range(len(packed)) for key in packed.keys(number)}
    assert {*made, *names_of_calls(folder)} == keys - known
    assert read_tree(folder / "out/shards").items() >= kept.items()
    out = ShardIndex(folder / "out/index.parquet")
    assert out.header.samples == 42
    assert all("area" in found["columns"] for found in documents(folder / "out").values())


def test_an_error_while_growing_keeps_what_was_finished(cli: Cli, folder: Path) -> None:
    grow(cli, folder, 0, 2)
    assert cli(*ENRICH, "scores:facts").returncode == 0
    before = read_tree(folder / "out")
    grow(cli, folder, 2, 2)
    code = (folder / "scores.py").read_text()
    (folder / "scores.py").write_text(
        code.replace("def facts(batch):", "def facts(batch):\n    1 / 0")
    )
    refused = cli(*ENRICH, "scores:facts")
    assert "was enriched with another version of scores:facts" in refused.stderr
    failed = cli(*ENRICH, "scores:facts", "--accept-changed-code")
    assert failed.returncode == 2
    assert "division by zero" in failed.stderr
    assert read_tree(folder / "out") == before


def test_shards_that_were_replaced_are_named(cli: Cli, folder: Path) -> None:
    grow(cli, folder, 0, 2)
    assert cli(*ENRICH, "scores:facts").returncode == 0
    assert cli("remove", "packed", "000000001", "--yes").returncode == 0
    refused = cli(*ENRICH, "scores:facts")
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert "was enriched from shards that" in line
    assert "such as shard-000000.tar; enrich into another folder" in line


def test_a_column_without_values_gets_the_type_of_the_added_ones(cli: Cli, folder: Path) -> None:
    command = ("enrich", "packed", "out", "--index-column", "score", "--with", "scores:sometimes")
    code = (folder / "scores.py").read_text()
    for added, value in ((0, "None"), (2, "7")):
        made = f"{{'score': [{value}] * len(batch)}}"
        (folder / "scores.py").write_text(f"{code}\n\ndef sometimes(batch):\n    return {made}\n")
        grow(cli, folder, added, 2)
        assert cli(*command, "--accept-changed-code").returncode == 0
    out = ShardIndex(folder / "out/index.parquet")
    assert out.header.columns == {"score": "integer"}
    values = [value for n in range(len(out)) for value in out.shard(n).columns["score"]]
    assert (values.count(None), values.count(7)) == (10, 2)
    # A column of another type is refused, and the shards that are there stay.
    made = "{'score': ['high'] * len(batch)}"
    (folder / "scores.py").write_text(f"{code}\n\ndef sometimes(batch):\n    return {made}\n")
    grow(cli, folder, 4, 2)
    refused = cli(*command, "--accept-changed-code")
    assert refused.returncode == 2
    assert "return one type; the columns of the added shards are made again" in refused.stderr
    made = "{'score': [8] * len(batch)}"
    (folder / "scores.py").write_text(f"{code}\n\ndef sometimes(batch):\n    return {made}\n")
    assert cli(*command, "--accept-changed-code").returncode == 0
    assert ShardIndex(folder / "out/index.parquet").header.samples == 14


def test_a_destination_that_was_changed_is_refused_in_one_line(cli: Cli, folder: Path) -> None:
    grow(cli, folder, 0, 2)
    assert cli(*ENRICH, "scores:facts").returncode == 0
    assert cli("enrich", "packed/", *ENRICH[2:], "scores:facts").returncode == 0
    grow(cli, folder, 2, 2)
    for name, damage in (
        ("enriched.json", b"[" * 100_000),
        ("index.parquet", b"PAR1"),
        ("enriched-shards.parquet", b"PAR1"),
        ("shards/shard-000000.tar", b""),
    ):
        path = folder / "out" / name
        content = path.read_bytes()
        path.write_bytes(damage)
        refused = cli(*ENRICH, "scores:facts")
        assert refused.returncode == 2
        [line] = refused.stderr.splitlines()
        assert name in line
        assert line.endswith("enrich into another folder")
        path.write_bytes(content)
    assert cli(*ENRICH, "scores:facts").returncode == 0
