"""Tests of parsing a log line's time, node and rank from its prefixes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.toolkit.analysis.diagnose.log_lines import LogLine, parse_line

from tests.support.log_lines import WRITTEN


def at(*parts: int) -> float:
    return datetime(*parts, tzinfo=UTC).timestamp()  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hello", LogLine("hello")),
        ("2026-11-21T10:00:00.250Z x", LogLine("x", at(2026, 11, 21, 10, 0, 0, 250000))),
        ("2026-11-21 10:00:00,250 x", LogLine("x", at(2026, 11, 21, 10, 0, 0, 250000))),
        ("2026/11/21 10:00:00 x", LogLine("x", at(2026, 11, 21, 10))),
        ("  | 2026-11-21T10:00:00.250Z | x", LogLine("x", at(2026, 11, 21, 10, 0, 0, 250000))),
        ("[2026-11-21 10:00:00] x", LogLine("x", at(2026, 11, 21, 10))),
        ("2026-11-21T10:00:00+02:00 x", LogLine("x", at(2026, 11, 21, 8))),
        (
            "2026-11-21T10:00:00+00:00 job-x/algo-12-1700000000 x",
            LogLine("x", at(2026, 11, 21, 10), "algo-12"),
        ),
        ("algo-2-abc12  | [rank3]:   File", LogLine("  File", None, "algo-2", 3)),
        ("[1,mpirank:3,algo-2]<stderr>:  File", LogLine("  File", None, "algo-2", 3)),
        ("[1,15]<stderr>:x", LogLine("x", None, None, 15)),
        (
            "[rank0]:[E321 02:07:08.408271257 P.cpp:6] x",
            LogLine(
                "[E321 02:07:08.408271257 P.cpp:6] x", at(2026, 3, 21, 2, 7, 8, 408271), None, 0
            ),
        ),
        (
            "E1221 02:07:08.408000 88 api.py:6] x",
            LogLine("x", at(2025, 12, 21, 2, 7, 8, 408000)),
        ),
        (
            "W1221 02:07:08.408000 88 api.py:6] x",
            LogLine("W1221 02:07:08.408000 88 api.py:6] x", at(2025, 12, 21, 2, 7, 8, 408000)),
        ),
        (
            "2026-11-21 10:00:00.250000: E xla/cuda_driver.cc:1234] x",
            LogLine("x", at(2026, 11, 21, 10, 0, 0, 250000)),
        ),
        ("[10:00:00.250]:   File", LogLine("  File")),
        ("10:00:00,250 | x", LogLine("x")),
        ("[2026-11-21, 10:00:00 UTC] {subprocess.py:93} INFO -   File", LogLine("  File")),
        (
            "[2026-11-21 10:00:00,250][__main__][ERROR] - x",
            LogLine("x", at(2026, 11, 21, 10, 0, 0, 250000)),
        ),
        ("gpu-node-3:   File", LogLine("  File", host="gpu-node-3")),
        ("trainer-1  | x", LogLine("x", host="trainer-1")),
        ("[train-worker-0] x", LogLine("x", host="train-worker-0")),
        ("step-3: loss 0.5", LogLine("step-3: loss 0.5")),
        ("stderr: x", LogLine("x")),
        (
            "Nov 21 10:00:00 ip-10-0-1-5 kernel: x",
            LogLine("kernel: x", at(2026, 11, 21, 10), host="ip-10-0-1-5"),
        ),
        ("[18026.221140] NVRM: x", LogLine("NVRM: x")),
        ("algo-3:40:90 [2] NCCL INFO x", LogLine("algo-3:40:90 [2] NCCL INFO x", None, "algo-3")),
        ("12:00 ERROR [rank 5] x", LogLine("12:00 ERROR [rank 5] x", None, None, 5)),
        (
            '{"ts": "2026-11-21T10:00:00Z", "rank": 3}',
            LogLine('{"ts": "2026-11-21T10:00:00Z", "rank": 3}', at(2026, 11, 21, 10), None, 3),
        ),
        ("Rank 6: x", LogLine("Rank 6: x", None, None, 6)),
        ("\x1b[34m\x1b[1m[rank7]: x\x1b[0m", LogLine("x", None, None, 7)),
        ("\x1b]8;;file://a\x1b\\[rank7]: x\x1b]8;;\x1b\\", LogLine("x", None, None, 7)),
        ("\x9b34m[rank7]: x", LogLine("x", None, None, 7)),
        ("  1%|a | 1/9 [00:01<00:09]\r  2%|b | 2/9 [00:01<00:09]Boom", LogLine("Boom")),
        ("#015 50%|x | 5/10 [0:1]#015done", LogLine("done")),
        ("9999-99-99 99:99:99 x", LogLine("x")),
    ],
)
def test_prefixes(line: str, expected: LogLine) -> None:
    assert parse_line(line, WRITTEN) == expected


PREFIXES = st.lists(
    st.sampled_from(
        [
            "2026-11-21T10:00:00.250Z ",
            "job/algo-2-1700000000 ",
            "[rank3]: ",
            "\x1b[31m",
            "[1,mpirank:3,algo-2]<stderr>:",
            "10.0.1.5: ",
            "[ 12.5] ",
        ]
    ),
    max_size=4,
)


@given(PREFIXES, st.text(max_size=80).filter(lambda text: "\n" not in text))
def test_any_line_is_parsed_and_parsing_is_idempotent(prefixes: list[str], text: str) -> None:
    parsed = parse_line("".join(prefixes) + text, WRITTEN)
    again = parse_line(parsed.text, WRITTEN)
    assert len(again.text) <= len(parsed.text)
    if "\r" not in text and "#015" not in text and not set(text) & set("\x1b\x9b"):
        assert again.text == parsed.text
    if "[rank3]: " in prefixes and parsed.rank is not None:
        assert parsed.rank >= 0


@given(st.from_regex(r"[a-z][a-z ]{0,60}", fullmatch=True), PREFIXES)
def test_plain_text_is_kept(text: str, prefixes: list[str]) -> None:
    parsed = parse_line("".join(prefixes) + text, WRITTEN)
    assert parsed.text == text
    ranked = any("rank" in prefix for prefix in prefixes)
    assert parsed.rank == (3 if ranked else None)
