"""Tests that a failure is found in every common form of a log: exports, prefixes, mixed lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sm_train.toolkit.analysis.diagnose.diagnosis import NO_FAILURE, UNKNOWN, Diagnosis, diagnose
from sm_train.toolkit.analysis.diagnose.log_exports import plain_lines
from sm_train.toolkit.analysis.diagnose.log_files import log_files

from tests.support.log_lines import DONE, diagnosed, stream
from tests.toolkit.analysis.diagnose.log_exports_support import PREFIXES, SECOND, STREAM, iso

ERROR = 'ValueError: "batch" is 7 instead of 8'
FAILURE = [
    "step 10 loss 0.31 lr 1.0e-04",
    "Traceback (most recent call last):",
    '  File "/opt/ml/code/train.py", line 212, in <module>',
    "    main()",
    '  File "/opt/ml/code/train.py", line 88, in main',
    "    raise ValueError(f'\"batch\" is {batch} instead of 8')",
    "           ^^^^^^^^^^^^",
    ERROR,
]


def milliseconds(number: int) -> int:
    return round(1000 * (SECOND + number / 10))


def as_csv(header: list[str], rows: list[list[object]], **options: object) -> str:
    text = io.StringIO()
    writer = csv.writer(text, **options)  # type: ignore[arg-type]
    writer.writerows([header, *rows])
    return text.getvalue()


NUMBERED = list(enumerate(FAILURE))
EXPORTS: dict[str, tuple[str, str | None]] = {
    "console.csv": (
        as_csv(["timestamp", "message"], [[milliseconds(n), line] for n, line in NUMBERED]),
        None,
    ),
    "console-one-event.csv": (
        as_csv(["timestamp", "message"], [[milliseconds(0), "\n".join(FAILURE)]]),
        None,
    ),
    "insights.csv": (
        as_csv(
            ["@timestamp", "@message", "@logStream"],
            [[iso(n).replace("T", " "), line, STREAM] for n, line in reversed(NUMBERED)],
            quoting=csv.QUOTE_ALL,
        ),
        "algo-2",
    ),
    "insights-console.json": (
        json.dumps(
            [
                {"@timestamp": iso(n).replace("T", " "), "@message": line, "@logStream": STREAM}
                for n, line in reversed(NUMBERED)
            ]
        ),
        "algo-2",
    ),
    "get-query-results.json": (
        json.dumps(
            {
                "results": [
                    [
                        {"field": "@timestamp", "value": iso(n).replace("T", " ")},
                        {"field": "@message", "value": line},
                        {"field": "@logStream", "value": STREAM},
                        {"field": "@ptr", "value": f"CmEKJg{n}"},
                    ]
                    for n, line in reversed(NUMBERED)
                ],
                "statistics": {"recordsMatched": 8.0, "bytesScanned": 700.0},
                "status": "Complete",
            },
            indent=4,
        ),
        "algo-2",
    ),
    "get-log-events.json": (
        json.dumps(
            {
                "events": [
                    {"timestamp": milliseconds(n), "message": line, "ingestionTime": 1}
                    for n, line in NUMBERED
                ],
                "nextForwardToken": "f/3",
            },
            indent=4,
        ),
        None,
    ),
    "filter-log-events.json": (
        json.dumps(
            {
                "events": [
                    {
                        "logStreamName": STREAM,
                        "timestamp": milliseconds(n),
                        "message": line,
                        "eventId": str(n),
                    }
                    for n, line in NUMBERED
                ]
            }
        ),
        "algo-2",
    ),
    "docker.json": (
        "".join(
            json.dumps({"log": f"{line}\n", "stream": "stderr", "time": iso(n) + "123456Z"}) + "\n"
            for n, line in NUMBERED
        ),
        None,
    ),
    "journald.json": (
        "".join(
            json.dumps(
                {
                    "MESSAGE": line,
                    "__REALTIME_TIMESTAMP": str(1000 * milliseconds(n)),
                    "_HOSTNAME": "ip-10-0-1-5",
                }
            )
            + "\n"
            for n, line in NUMBERED
        ),
        "ip-10-0-1-5",
    ),
    "structlog.json": (
        json.dumps({"level": "info", "message": "step 10", "timestamp": iso(0)})
        + "\n"
        + json.dumps(
            {
                "level": "error",
                "message": "the training failed",
                "timestamp": iso(1),
                "exc_info": "\n".join(FAILURE[1:]),
            }
        )
        + "\n",
        None,
    ),
}


EXPORTS["structlog-events.json"] = (
    EXPORTS["structlog.json"][0].replace('"message"', '"event"'),
    None,
)


def diagnosed_file(path: Path) -> Diagnosis:
    return diagnose(log_files([path]))


@pytest.mark.parametrize("name", EXPORTS)
def test_failure_is_found_in_every_export(tmp_path: Path, name: str) -> None:
    content, node = EXPORTS[name]
    path = tmp_path / f"export-{name}"
    path.write_text(content)
    found = diagnosed_file(path)
    assert found.title == f"The program raised {ERROR}"
    assert found.first is not None
    assert found.first.node == node
    assert found.first.time is not None
    assert 0 <= found.first.time - SECOND < 1


def test_json_rows_without_a_message_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"timestamp": iso(0), "exception": "\n".join(FAILURE[1:])}) + "\n")
    assert diagnosed_file(path).title == f"The program raised {ERROR}"


def test_messages_separated_by_tabs_are_lines(tmp_path: Path) -> None:
    """As `aws logs get-log-events --query events[].message --output text` writes them."""
    path = tmp_path / "messages.txt"
    path.write_text("\t".join(FAILURE) + "\n")
    assert diagnosed_file(path).title == f"The program raised {ERROR}"


@pytest.mark.parametrize("mark", ["    ", "\t", "> ", "| ", "  # "])
def test_common_start_of_all_lines_is_no_part_of_them(tmp_path: Path, mark: str) -> None:
    """A code block or a quotation that was copied."""
    path = tmp_path / "copied.log"
    path.write_text("".join(f"{mark}{line}\n" for line in FAILURE))
    assert diagnosed_file(path).title == f"The program raised {ERROR}"
    path.write_text("".join(f"{mark}{line}\n" for line in ("step 1", "step 2", "Bus error")))
    assert diagnosed_file(path).cause == "bus-error"


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("name", EXPORTS)
def test_block_size_does_not_matter_for_exports(name: str, size: int) -> None:
    content = EXPORTS[name][0].encode()
    blocks = [content[start : start + size] for start in range(0, len(content), size)]
    assert b"".join(plain_lines(blocks)) == b"".join(plain_lines([content]))


@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"{", b'[{"@timestamp":', b"timestamp,message\n"]),
)
def test_any_content_is_read(content: bytes, start: bytes) -> None:
    list(plain_lines([start, content]))


@given(st.text(st.characters(exclude_characters="{[,\n\0\ufeff"), max_size=100))
def test_a_plain_log_is_unchanged(text: str) -> None:
    content = f"{text}\nand more\n".encode("utf-8", "replace")
    assert b"".join(plain_lines([content])) == content


# ------------------------------------------------------------------ prefixes


@pytest.mark.parametrize("name", PREFIXES)
def test_failure_is_found_behind_every_prefix(name: str) -> None:
    prefix = PREFIXES[name]
    found = diagnosed([prefix(n) + line for n, line in NUMBERED])
    assert found.title == f"The program raised {ERROR}"


@pytest.mark.parametrize("name", PREFIXES)
def test_two_interleaved_tracebacks_are_kept_apart(name: str) -> None:
    """Lines of another process between those of a traceback, with the same kind of prefix."""
    prefix = PREFIXES[name]
    other = prefix(0).replace("3", "4").replace("1", "2").replace("5", "6").replace("7", "8")
    if other == prefix(0) or "algo" in name:
        other = f"other {prefix(0)}"
    noise = [f"{other}batch {n} of 100: read 12 samples" for n in range(len(FAILURE))]
    lines = [prefix(n) + line for n, line in NUMBERED]
    mixed = [line for pair in zip(lines, noise, strict=True) for line in pair]
    assert diagnosed(mixed).title == f"The program raised {ERROR}"


@pytest.mark.parametrize(
    ("prefix", "node", "rank"),
    [
        ("[1,mpirank:11,algo-2]<stderr>:", "algo-2", 11),
        ("105: [rank105]: ", None, 105),
        (" 5: ", None, 5),
        ("[rank: 3] ", None, 3),
        ("[pod/train-worker-1/pytorch] ", "train-worker-1", None),
        ("train-worker-1 pytorch [rank9]: ", "train-worker-1", 9),
        ("(RayTrainWorker pid=1203, ip=10.0.1.5) ", "10.0.1.5", None),
        ("tuner - INFO - [rank7]: ", None, 7),
    ],
)
def test_prefix_names_node_and_rank(prefix: str, node: str | None, rank: int | None) -> None:
    found = diagnose([stream([prefix + line for line in FAILURE], "all.log", None)])
    assert found.first is not None
    assert (found.first.node, found.first.rank) == (node, rank)


TOKENS = st.lists(
    st.one_of(
        st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), max_size=12),
        st.sampled_from(["{time}", "{clock}", "{count}", "ERROR", "INFO", " ", " - ", " | ", ": "]),
    ),
    min_size=1,
    max_size=6,
)


@given(TOKENS)
@example(["INFO", " ", "0"])
def test_random_prefix_gives_the_same_cause(tokens: list[str]) -> None:
    """A prefix of any text; times and counters differ from line to line."""

    def prefix(number: int) -> str:
        values = {"{time}": iso(number), "{clock}": iso(number)[11:], "{count}": f"{number + 10}"}
        return "".join(values.get(token, token) for token in tokens)

    # What looks like a part of a traceback, a progress bar or an input is no prefix.
    if any(text in prefix(0) for text in ("%|", "it/s", "#015", "Group ", "Original ", "SMT {")):
        return
    lines = [prefix(n) + line for n, line in NUMBERED]
    found = diagnosed(lines)
    assert found.title == f"The program raised {ERROR}", lines


# ------------------------------------------------------------------ interleaved output


@pytest.mark.parametrize(
    "bar",
    [
        "steps:  26%|███| 1985/7650 [33:07<1:34:33,  1.00s/it, avr_loss=0.0928]",
        "  0% 0/3000 [00:00<?, ?it/s]",
        "\r 50%|x | 5/10 [00:01<00:01,  1.0it/s]\r100%|x| 10/10 [00:02<00:00, 1.0it/s]",
        "Epoch 3: ",
        "2026-11-21 10:00:00 ERROR main failed: ",
    ],
)
def test_traceback_directly_after_other_output_is_found(bar: str) -> None:
    lines = [FAILURE[0], bar + FAILURE[1], *FAILURE[2:]]
    assert diagnosed(lines).title == f"The program raised {ERROR}"


def test_traceback_of_rich_is_found_behind_a_prefix() -> None:
    box = [
        "╭───────────────── Traceback (most recent call last) ──────────────────╮",
        "│ /opt/ml/code/train.py:88 in main                                      │",
        "│ ❱ 88 │   raise ValueError('batch')                                    │",
        "╰──────────────────────────────────────────────────────────────────────╯",
        ERROR,
    ]
    for prefix in ("", "2026-11-21 10:00:00 | ERROR | stderr | ", "pod-3 trainer "):
        found = diagnosed([prefix + line for line in box])
        assert found.title == f"The program raised {ERROR}", prefix


def test_traceback_quoted_in_json_is_found() -> None:
    quoted = json.dumps({"message": {"callstack": "\n".join(FAILURE[1:])}, "code": 1})
    assert diagnosed(["starting", quoted]).title == f"The program raised {ERROR}"
    twice = json.dumps({"body": quoted})
    assert diagnosed(["starting", twice]).title == f"The program raised {ERROR}"


def test_time_on_a_line_of_its_own_is_that_of_the_next_line() -> None:
    """The console's text, copied."""
    found = diagnosed([text for n, line in NUMBERED for text in (f"{iso(n)}Z", line)])
    assert found.title == f"The program raised {ERROR}"
    assert found.first is not None
    assert found.first.time == pytest.approx(SECOND + 0.7)


# ------------------------------------------------------------------ not a log


@pytest.mark.parametrize("line", ["process exited with code 3", "ERROR the job stopped, giving up"])
def test_log_without_a_known_failure_is_unknown_with_the_lines_to_look_at(line: str) -> None:
    found = diagnosed(["step 10 loss 0.3 lr 1.0e-04", line])
    assert found.cause == UNKNOWN
    assert found.evidence[-1].text == line
    assert "nothing reports the end of the training" in found.details[-1]


def test_empty_log_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "algo-1.log"
    path.write_bytes(b"")
    found = diagnosed_file(path)
    assert (found.cause, found.evidence) == (UNKNOWN, ())
    assert found.details == (
        "the log is empty: check that the job wrote to it, and export it again",
    )


@pytest.mark.parametrize(
    "end",
    [
        DONE,
        "2026-11-22 10:00:01,123 sagemaker-training-toolkit INFO     Reporting training SUCCESS",
        "`Trainer.fit` stopped: `max_epochs=10` reached.",
        "{'train_runtime': 5211.2, 'train_samples_per_second': 10.1, 'train_loss': 0.95}",
        "Steps: 100%|██████████| 1752/1752 [1:26:51<00:00,  2.97s/it]",
        "Epoch 9: 100%|██████████| 500/500 [01:01<00:00,  8.15it/s, loss=0.12]",
    ],
)
def test_end_of_the_training_is_evidence_of_no_failure(end: str) -> None:
    assert diagnosed(["step 10 loss 0.3 lr 1.0e-04", end]).cause == "no-failure"
    assert diagnosed(["step 10 loss 0.3 lr 1.0e-04", end, *FAILURE[1:]]).cause == "program-error"


@pytest.mark.parametrize(
    "end",
    [
        "Loading checkpoint shards: 100%|██████████| 2/2 [00:03<00:00,  1.60s/it]",
        "Map: 100%|██████████| 1000/1000 [00:01<00:00, 812.1 examples/s]",
        "Steps:  99%|█████████▉| 1751/1752 [1:26:51<00:02,  2.97s/it]",
        "training has ended",
    ],
)
def test_other_ends_are_no_evidence(end: str) -> None:
    assert diagnosed(["step 10 loss 0.3 lr 1.0e-04", end]).cause == UNKNOWN


@pytest.mark.parametrize(
    "content",
    [
        "<!DOCTYPE html>\n<html><head><title>CloudWatch</title></head></html>\n",
        "panic: runtime error: index out of range [5] with length 3\n\ngoroutine 1 [running]:\n",
        'Exception in thread "main" java.lang.NullPointerException\n\tat App.main(App.java:14)\n',
        'import torch\nprint("Training completed. Do not forget to share your model")\n',
        "a,b,c\n1,2,3\n",
        "Größe überschritten\n",
        "\n\n\n",
    ],
)
def test_what_is_no_log_of_a_training_is_never_without_a_failure(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "any.log"
    path.write_bytes(content.encode("latin-1"))
    found = diagnosed_file(path)
    assert found.cause == UNKNOWN or found.confidence == "low"
    assert found.cause != NO_FAILURE


def test_truncated_compressed_log_is_read_up_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "algo-1.log.gz"
    content = gzip.compress("\n".join([*FAILURE, *(["step 11"] * 20000), DONE]).encode())
    path.write_bytes(content[: len(content) // 2])
    assert diagnosed_file(path).cause != NO_FAILURE


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_level_that_every_line_has_says_nothing(level: str) -> None:
    """A program that logs the output of another one; here each line but one could be harmless."""
    text = [
        "step 10 loss 0.31",
        "epoch done",
        "more",
        "OSError: [Errno 28] No space left on device",
    ]
    prefix = f"2026-11-21 10:00:00,123 - launcher - {level} - "
    assert diagnosed([prefix + line for line in text]).cause == "disk-full"
    mixed = [prefix + line for line in text]
    mixed[1] = "epoch done"
    assert diagnosed(mixed).cause == UNKNOWN


def test_truncated_traceback_of_rich_is_found_behind_a_prefix() -> None:
    box = ["│ ❱  225 │   mkdir(name, mode)   │", "╰──────────╯"]
    lines = [*box, "PermissionError: [Errno 13] Permission denied: '/data'"]
    assert diagnosed([f"train-7\t{line}" for line in lines]).cause == "permission-denied"


def test_steps_in_color_are_progress() -> None:
    line = "OSError: We couldn't connect to 'https://huggingface.co' to load this file"
    steps = [f"\x1b[34mstep {number} loss 0.3\x1b[0m" for number in range(9)]
    assert diagnosed([steps[0], line, *steps[1:]]).cause == UNKNOWN
