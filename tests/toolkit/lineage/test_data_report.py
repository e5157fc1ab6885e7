"""``sm-train data-report`` and the model card state what the index knows of a data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.lineage.data_facts import MOST_VALUES, data_facts, fact_rows
from sm_train.entrypoints.models.model_card import TrainingRecord, model_card
from sm_train.entrypoints.removal.removal_list import RemovalList

from tests.conftest import Cli
from tests.support.image_files import write_album
from tests.support.models import record

IMAGES = 24


@pytest.fixture
def packed(cli: Cli, tmp_path: Path) -> Path:
    write_album(tmp_path / "in", IMAGES, flat=True)
    rows = [
        {
            "image": f"in/{n:03}.jpg",
            "caption": "a",
            "license": ("CC0", "agency | x", None)[n % 3],
            "contributor": n,
            "expiry": f"2027-01-{n + 1:02}",
        }
        for n in range(IMAGES)
    ]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = [
        part
        for name in ("license", "contributor", "expiry", "source")
        for part in ("--index-column", name)
    ]
    done = cli("pack", "list.jsonl", "out", "--shard-size", "20KB", *columns, "--min-side", "8")
    assert done.returncode == 0, done.stderr
    return tmp_path / "out"


def test_facts_are_counted_by_every_column(cli: Cli, packed: Path) -> None:
    done = cli("remove", "out", "in/000.jpg", "in/003.jpg", "--yes")
    assert done.returncode == 0, done.stderr
    document = json.loads(cli("data-report", "out", "--json").stdout)
    assert document["published"] == "European Commission, 24 July 2025"
    [facts] = document["sets"]
    assert (facts["samples"], facts["origins"]) == (22, {"in": 22})
    assert facts["columns"]["license"]["counts"] == {"agency | x": 8, "CC0": 6}
    assert facts["columns"]["license"]["missing"] == 8
    contributor = facts["columns"]["contributor"]
    assert (contributor["distinct"], len(contributor["counts"])) == (22, MOST_VALUES)
    assert (contributor["first"], contributor["last"]) == ("1", "23")
    assert facts["columns"]["expiry"]["first"] == "2027-01-02"
    assert list(facts["removed"].values()) == [2]
    assert facts["options"] == {"min_side": 8}


def test_the_report_has_the_order_of_the_template(cli: Cli, packed: Path) -> None:
    done = cli("data-report", "out", "--column", "license", "--where", "contributor < 9")
    assert done.returncode == 0, done.stderr
    headings = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert [line.split()[1] for line in headings[1:]] == (
        "1. 1.1. 1.2. 1.3. 2. 2.1. 2.2. out/shards 2.3. 2.4. 2.5. 2.6. 3. 3.1. 3.2. 3.3.".split()
    )
    assert "| by `license` | CC0 3, agency \\| x 3; 3 without a value |" in done.stdout
    assert "| selected by | contributor < 9 |" in done.stdout
    assert "by `contributor`" not in done.stdout
    assert "It does not claim that this report complies" in done.stdout
    assert "*To be stated by the provider.*" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--column", "licence"), "--column: out/shards has no column licence; it has "),
        (("--where", "x = 1"), "--where: the index has no column x"),
        (("--runs", "elsewhere"), "--runs: elsewhere: no such folder of runs"),
    ],
)
def test_mistakes_are_one_line(
    cli: Cli, packed: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = cli("data-report", "out", *arguments)
    assert (done.returncode, done.stderr.startswith(f"sm-train: {message}")) == (2, True)


def test_the_model_card_states_the_data(packed: Path) -> None:
    facts = data_facts(ShardIndex(packed / "index.parquet"), RemovalList(), ["license"])
    stated = record(data={"train": fact_rows(facts)})
    parsed = TrainingRecord.parse(json.loads(json.dumps(stated.as_dict())))
    card = model_card(
        parsed, pipeline_class="X", standard=True, step=1, weights="ema", has_grid=False
    )
    assert "## Data of the channel `train`" in card
    assert "| by `license` | CC0 8, agency \\| x 8; 8 without a value |" in card
    assert "| removed later | 0 |" in card
    old = {name: value for name, value in stated.as_dict().items() if name != "data"}
    assert TrainingRecord.parse(old).data == {}
