"""``sm-train data-report`` and the model card state what the index knows of a data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sm_train.entrypoints.lineage.data_facts import MOST_VALUES, data_facts, fact_rows
from sm_train.entrypoints.models.model_card import TrainingRecord, model_card
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.shard_index import ShardIndex

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


@pytest.mark.slow
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
    assert facts["options"] == {"min_side": 8, "icc_profile": "srgb", "hdr": "reject"}


@pytest.mark.slow
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


NEVER = "9999-12-31T23:59:59-05:00"
"""A moment that no date in UTC states."""


def test_dates_are_compared_as_moments(cli: Cli, tmp_path: Path) -> None:
    """Times of several zones: 01:14+05:30 of November 1st is the evening of October 31st in UTC."""
    write_album(tmp_path / "in", 4, flat=True)
    moments = ["2026-11-01T00:37:00+00:00", "2026-11-01T01:14:00+05:30", NEVER, None]
    rows = [
        {"image": f"in/{n:03}.jpg", "caption": "a", "uploaded": moment, "day": f"2026-11-0{n + 1}"}
        for n, moment in enumerate(moments)
    ]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--index-column", "uploaded", "--index-column", "day")
    assert cli("pack", "list.jsonl", "out", *columns).returncode == 0
    [facts] = json.loads(cli("data-report", "out", "--json").stdout)["sets"]
    uploaded, day = facts["columns"]["uploaded"], facts["columns"]["day"]
    assert (uploaded["first"], uploaded["last"]) == (
        "2026-10-31T19:44:00+00:00",
        "9999-12-31T23:59:59+00:00",
    )
    assert (day["first"], day["last"]) == ("2026-11-01", "2026-11-04")


MAKERS = """
def captions(batch):
    return {"generated_caption": ["a machine's words" for _ in batch.images]}

def scores(batch):
    return {"score": [0.5 for _ in batch.images]}

def rights(batch):
    return {"rights": ["agency" for _ in batch.images]}
"""


@pytest.mark.slow
def test_columns_that_a_program_has_made_are_stated(cli: Cli, tmp_path: Path) -> None:
    """Captions of a table of `enrich`, and columns of two enrichments of the shards."""
    write_album(tmp_path / "in", 4, flat=True)
    (tmp_path / "makers.py").write_text(MAKERS)

    def run(*arguments: str) -> None:
        done = cli(*arguments)
        assert done.returncode == 0, done.stderr

    run("enrich", "in", "captioned", "--with", "makers:captions", "--workers", "1")
    captions = ("--caption-column", "generated_caption")
    run("pack", "in", "packed", "--captions", "captioned/table", *captions)
    # A table that was made in two steps has the captions of the first.
    run("enrich", "in", "two", "--captions", "captioned/table", "--with", "makers:rights")
    run("pack", "in", "later", "--captions", "two/table", *captions)
    [facts] = json.loads(cli("data-report", "later", "--json").stdout)["sets"]
    assert facts["made_captions"] == {"generated_caption": "makers:captions"}
    run("enrich", "packed/shards", "scored", "--with", "makers:scores", "--workers", "1")
    run("enrich", "scored/shards", "cleared", "--with", "makers:rights", "--workers", "1")
    done = cli("data-report", "cleared", "--json")
    assert done.returncode == 0, done.stderr
    [facts] = json.loads(done.stdout)["sets"]
    assert facts["made_captions"] == {"generated_caption": "makers:captions"}
    assert facts["made_columns"] == {"score": "makers:scores", "rights": "makers:rights"}
    text = cli("data-report", "cleared").stdout
    assert "| captions made by a program | `generated_caption` by `makers:captions` |" in text
    synthetic = text.partition("### 2.5. Synthetic data")[2].partition("###")[0]
    assert "a program has made the captions of `generated_caption` (`makers:captions`)" in synthetic


@pytest.mark.slow
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


@pytest.mark.slow
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
