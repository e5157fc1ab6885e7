"""Plans of unfinished and finished work are checked: a damaged one is one line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import read_enrichment
from sm_train.entrypoints.data_prep.enrichment.part_summary import (
    EnrichmentResult,
    ImageFailure,
    PartSummary,
)
from sm_train.entrypoints.data_prep.indexing.index_plan import (
    STATE,
    decode_unusable,
    encode_unusable,
    read_index_plan,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import PackPlan, read_plan
from sm_train.entrypoints.data_prep.packing.unusable_samples import UnusableSamples
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME
from sm_train.entrypoints.storage.lease import EXPIRES_SECONDS, Holder, Lease, LeaseHeldError
from sm_train.entrypoints.storage.lease_files import LocalLeaseFiles
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import S3Access

from tests.conftest import Cli
from tests.entrypoints.base.wrong_values import require_checked
from tests.support.image_files import read_tree, write_album

FUNCTION = {"function": "m:f", "batch_size": 8, "max_side": 512}
SHARDS = {
    "kind": "ShardSource",
    "address": "s3://b/set",
    "name": "shards",
    "images": 9,
    "index_columns": ["score"],
}
TABLE = {
    "kind": "TableSource",
    "images": 9,
    "root": "s3://b/",
    "image_column": "image",
    "part_rows": 1024,
    "made": {"caption": {"function": "m:caption", "icc_profile": "srgb", "hdr": "reject"}},
    "types": {"day": "date"},
}
PACK = {
    "inputs": "f1",
    "extends": [],
    "shard_bytes": 4 * 10**9,
    "options": {"where": "a = 1"},
    "started_ns": 1,
    "root": "/in/",
    "pack_options": {
        "pixels": True,
        "min_side": 64,
        "max_aspect": 3.5,
        "max_side": 2048,
        "quality": 90,
        "convert": False,
        "duplicates": True,
        "near_bits": 3,
        "latents": "/model",
        "latents_resolution": 512,
        "icc_profile": "srgb",
        "hdr": "reject",
        "index_columns": {"score": "number"},
    },
}
HEADER = {"inputs": "f1", "root": "", "image_bytes": 9, "rejected": 1, "shards": [4, 5]}
INDEX = {
    "parent": "s3://b/set",
    "name": "shards",
    "check": {
        "image": ["jpg"],
        "caption": [{"member": "json", "field": "caption", "weight": 0.5}],
        "find_missing": True,
    },
    "headers_only": False,
    "options": {"samples": "all"},
    "listed": [["0.tar", 10, "etag"]],
    "known": ["1.tar"],
    "version": "etag",
    "is_pack": False,
}


def enrichment(origin: dict[str, Any]) -> dict[str, Any]:
    plan = {"source": "s3://b/set", "inputs": "d", "function": FUNCTION, "model": "m"}
    return plan | {"origin": origin, "code": ["c"], "started_ns": 3}


def stored(folder: Path, name: str, document: Any) -> LocalFolder:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return LocalFolder(folder)


def pack_facts(plan: PackPlan) -> SimpleNamespace:
    """Return what a pack uses of its plan; its files are not read here."""
    first = plan.plans[0]
    facts = {
        "extends": plan.extends,
        "shard_bytes": plan.target_bytes,
        "shards": [len(each.inputs) for each in plan.plans],
        "options": asdict(first.options),
        "counts": [plan.image_bytes, len(plan.rejected)],
    }
    return SimpleNamespace(**facts)


def read_pack(folder: Path, document: Any, header: Any) -> Any:
    stored(folder, "inputs/f1/plan.json", header)
    try:
        plan = read_plan(stored(folder, PLAN_NAME, document), S3Access())
    except FileNotFoundError as error:
        raise PlanError(str(error)) from None  # the plan names other inputs
    return vars(pack_facts(plan))


READERS: dict[str, tuple[Any, Callable[[Path, Any], Any]]] = {
    "pack": (PACK, lambda folder, document: read_pack(folder, document, HEADER)),
    "header": (HEADER, lambda folder, header: read_pack(folder, PACK, header)),
    "index": (
        INDEX,
        lambda folder, document: _fields(
            read_index_plan(stored(folder, PLAN_NAME, document), S3Access()), "access", "options"
        ),
    ),
    "shards": (
        enrichment(SHARDS),
        lambda folder, document: _enrichment_fields(stored(folder, PLAN_NAME, document)),
    ),
    "table": (
        enrichment(TABLE),
        lambda folder, document: _enrichment_fields(stored(folder, PLAN_NAME, document)),
    ),
}


def _fields(record: Any, *without: str) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in without}


def _enrichment_fields(destination: LocalFolder) -> dict[str, Any]:
    plan = read_enrichment(destination, S3Access())
    fields = _fields(plan, "access", "destination", "function", "origin")
    return fields | {"origin": vars(plan.origin)}


@pytest.mark.parametrize("name", READERS)
def test_wrong_values_of_plans_are_one_line(name: str, tmp_path: Path) -> None:
    document, read = READERS[name]
    # What is only compared with the options of a command may have any value.
    require_checked(document, lambda value: read(tmp_path, value), PlanError, per_field=2)


def test_wrong_values_of_results_are_errors() -> None:
    failures = [ImageFailure("a.jpg", "image-corrupt", "cut")]
    summary = PartSummary(5, {"score": "number"}, failures)
    require_checked(summary.as_dict(), PartSummary.from_dict, ValueError)
    unusable = json.loads(encode_unusable({"no-image": UnusableSamples(3, ["a", "b"])}))
    require_checked(
        unusable,
        lambda value: {
            reason: asdict(samples)
            for reason, samples in decode_unusable(json.dumps(value)).items()
        },
        ValueError,
    )
    assert EnrichmentResult.of([summary], 1).failures == failures


COMMANDS = {
    "pack": ("pack", "in", "set"),
    "append": ("pack", "in", "set", "--append"),
    "index": ("index", "set/shards"),
}
PLACES = {
    "pack": PLAN_NAME,
    "append": "inputs/*/plan.json",
    "index": f"{STATE}/shards/{PLAN_NAME}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_name_a_damaged_plan_and_a_way_on(cli: Cli, tmp_path: Path, name: str) -> None:
    write_album(tmp_path / "in", 4)
    assert cli("pack", "in", "set", "--shard-size", "10KB").returncode == 0
    [header] = (tmp_path / "set").glob("inputs/*/plan.json")
    if name == "append":
        damaged = header
        header.write_text(json.dumps(json.loads(header.read_text()) | {"shards": 7}))
    else:
        damaged = tmp_path / "set" / PLACES[name]
        damaged.parent.mkdir(parents=True, exist_ok=True)
        damaged.write_text("[]")
        for index in (tmp_path / "set").glob("index.parquet*"):
            index.unlink()
    done = cli(*COMMANDS[name], *(("--shard-size", "10KB") if name != "index" else ()))
    assert done.returncode == 2, done.stderr
    file = damaged.relative_to(tmp_path)
    assert done.stderr.startswith(f"sm-train: {file}: damaged, or of another version of sm-train: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.integration
@pytest.mark.parametrize("inputs", ["", ".", "..", "../../precious", "a/b", "F1", 5])
def test_a_plan_names_no_folder_but_its_own(cli: Cli, tmp_path: Path, inputs: Any) -> None:
    """`pack` removes the folder of a plan that was not stored completely."""
    write_album(tmp_path / "in", 4)
    (tmp_path / "precious").mkdir()
    assert cli("pack", "in", "set", "--shard-size", "10KB").returncode == 0
    before = read_tree(tmp_path)
    stored(tmp_path / "set", PLAN_NAME, PACK | {"inputs": inputs})
    done = cli("pack", "in", "set", "--shard-size", "10KB", "--append")
    assert done.returncode == 2, done.stderr
    assert f"set/{PLAN_NAME}: damaged" in done.stderr
    (tmp_path / "set" / PLAN_NAME).unlink()
    (tmp_path / "set" / PLAN_NAME).parent.rmdir()
    assert read_tree(tmp_path) == before


@pytest.mark.slow
def test_a_header_of_more_images_than_there_are_is_damaged(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    assert cli("pack", "in", "set", "--shard-size", "10KB").returncode == 0
    [header] = (tmp_path / "set").glob("inputs/*/plan.json")
    document = json.loads(header.read_text())
    plan = PACK | {"inputs": document["inputs"]}
    destination = stored(tmp_path / "set", PLAN_NAME, plan)
    header.write_text(json.dumps(document | {"shards": [9]}))
    [shard] = read_plan(destination, S3Access()).plans
    with pytest.raises(PlanError, match="damaged: it has no row 4"):
        list(shard.inputs)
    [inputs] = header.parent.glob("inputs-*.parquet")
    inputs.write_bytes(inputs.read_bytes()[:-20])
    with pytest.raises(PlanError, match=rf"{inputs.name}: damaged: .*; pack the images again"):
        list(shard.inputs)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--max-aspect", value) for value in ("inf", "nan", "1e400")),
        ("--min-side", "3000000000"),
        ("--max-side", "3000000000"),
        ("--shard-size", "10000000000000TB"),
    ],
)
def test_an_option_that_no_plan_can_hold_is_refused_as_an_option(
    cli: Cli, tmp_path: Path, option: str, value: str
) -> None:
    write_album(tmp_path / "in", 2)
    done = cli("pack", "in", "set", option, value)
    assert done.returncode == 2
    assert done.stderr.startswith(f"sm-train: {option}: ")
    assert not (tmp_path / "set").exists()


def test_a_damaged_lease_counts_until_it_is_old(tmp_path: Path) -> None:
    files = LocalLeaseFiles(tmp_path)
    holder = Holder.of_this_process()
    lease = Lease(files, "lease.json", holder)
    (tmp_path / "lease.json").write_text('{"holder')
    with pytest.raises(LeaseHeldError, match="damaged"):
        lease.acquire()
    old = time.time() - EXPIRES_SECONDS - 60
    os.utime(tmp_path / "lease.json", (old, old))
    lease.acquire()
    lease.release()
    assert not (tmp_path / "lease.json").exists()
    holder.close()
