"""Text from outside cannot control the terminal."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from sm_train.toolkit.cli import _run as run_command
from sm_train.toolkit.cli import cli as root
from sm_train.toolkit.commands._table import COMMANDS
from sm_train.toolkit.platforms.find_run import find_run
from sm_train.toolkit.platforms.placed_run import JobLogLine, LogOptions
from sm_train.toolkit.records.local_folder import LOG_NAME
from sm_train.toolkit.runs.logs import print_line
from sm_train.toolkit.terminal.confirmation import ask
from sm_train.toolkit.terminal.console import escaped, stdout_console
from sm_train.toolkit.terminal.formatting import printable

from tests.conftest import Cli

HOSTILE = {
    "title": ("\x1b]0;title\x07name", "name"),
    "title_with_string_terminator": ("\x1b]2;title\x1b\\name", "name"),
    "clipboard": ("\x1b]52;c;ZXZpbA==\x07name", "name"),
    "link": ("\x1b]8;;https://evil.example\x1b\\name\x1b]8;;\x1b\\", "name"),
    "c1_title": ("\x9d0;title\x9cname", "name"),
    "device_control": ("\x1bP$q\x1b\\name", "name"),
    "color": ("\x1b[31mname\x1b[0m", "name"),
    "c1_color": ("\x9b31mname", "name"),
    "cursor": ("\x1b[2J\x1b[1;1Hname", "name"),
    "reset": ("\x1bcname", "name"),
    "charset": ("\x1b(0name", "name"),
    "nested": ("\x1b\x1b[31m]0;x\x07name", "]0;xname"),
    "unterminated": ("\x1b]0;name", "]0;name"),
    "carriage_return": ("name\rfake", "namefake"),
    "backspaces": ("name\x08\x08\x08\x08fake", "namefake"),
    "right_to_left": ("photo\u202egpj.exe", "photogpj.exe"),
    "isolates": ("\u2066a\u2069b\u200fc", "abc"),
    "bidirectional_marks": ("a\u200eb\u200fc\u061cd", "abcd"),
    "c1_strings": ("\x90$q\x9ca\x98x\x9cb\x9ex\x07c\x9fx\x1b\\d", "abcd"),
    "separators": ("a\u2028b\u2029c\x85d", "abcd"),
    "undecodable_bytes": ("a\udc9b31mb", "a\ufffd31mb"),
    "windows_line_end": ("a\r\nb\tc\n", "a\nb\tc\n"),
    "ordinary": ("größe 寸法 👩‍🎨 é [bold]x[/bold]", "größe 寸法 👩‍🎨 é [bold]x[/bold]"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_control_is_removed_and_text_stays(case: str) -> None:
    text, expected = HOSTILE[case]
    assert printable(text) == expected


HOSTILE_ARGUMENT = "\x1b]0;t\x07a\x9b31mb\u202ec\x9d8;;http://e\x9c\u2066[bold]d[/bold]\x08"

characters = st.text(
    st.one_of(st.sampled_from("\x1b\x9b\x9d\x9c\x07[]0;mP\\\u202e\r\n"), st.characters())
)


@pytest.mark.parametrize("text", ["[\x00/name]", "[\x9bmlink=https://evil.example]x", "[b]", "a\\"])
def test_text_from_outside_cannot_be_markup(text: str) -> None:
    file = io.StringIO()
    console = type(stdout_console())(file=file, force_terminal=True, highlight=False)
    console.print(f"[bold]{escaped(text)}[/]")
    assert file.getvalue() == f"\x1b[1m{printable(text)}\x1b[0m\n"


@given(characters)
def test_no_control_character_is_left(text: str) -> None:
    result = printable(text)
    assert not [c for c in result if unicodedata.category(c) == "Cc" and c not in "\t\n"]
    assert not [
        c for c in result if unicodedata.bidirectional(c) in {"RLO", "LRO", "RLE", "LRE", "PDF"}
    ]
    assert printable(result) == result


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_text_without_control_is_unchanged(text: str) -> None:
    assert printable(text) == text


def test_commands_print_no_control_from_logs_and_file_names(cli: Cli, tmp_path: Path) -> None:
    name = "photo\x1b]0;title\x07\u202egpj"
    log = tmp_path / "algo-1.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "own.py", line 3, in <module>\n'
        f"ValueError: {name} \x9b31m is bad\n"
    )
    for result in (
        cli("diagnose", log.name),
        cli("check", f"{name}.yaml", "--offline"),
    ):
        output = result.stdout + result.stderr
        assert "photogpj" in output
        assert not set(output) & set("\x1b\x9b\x07\u202e")


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_the_console_prints_no_control_but_its_own(case: str) -> None:
    text, _ = HOSTILE[case]
    console = stdout_console()
    console.file = io.StringIO()
    console.print(text, markup=False)
    console.print(Text(text, style="bold red"))
    assert not set(console.file.getvalue()) & set("\x1b\x9b\x9d\x07\x08\u202e\u2066")


def test_markup_is_read_after_control_is_removed() -> None:
    console = stdout_console()
    console.file = io.StringIO()
    console.print("\x1b]0;title\x07[bold]name[/]")
    assert console.file.getvalue() == "name\n"


def test_an_extra_argument_is_shown_without_control(cli: Cli) -> None:
    result = cli("schema", "a\x1b]0;title\x07b")
    assert "ab" in result.stderr
    assert not set(result.stderr) & set("\x1b\x07")


def test_a_question_has_no_control(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    ask("Start a\x1b]0;title\x07b?")
    assert capsys.readouterr().err == "Start ab? [y/N]: "


def test_log_lines_have_no_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a job and of a local run."""
    line = JobLogLine(0, "algo-1", "a\x1b[2Jb\n")
    print_line(line, raw=False, as_json=False, with_node=True)
    stage = tmp_path / "8px"
    stage.mkdir()
    (stage / LOG_NAME).write_text("c\x1b]0;title\x07d\n")
    (stage / "bundle").mkdir()
    run = find_run(str(tmp_path), {"region": None, "profile": None})
    for line in run.log_lines(run.newest_job(), LogOptions()):
        print_line(line, raw=False, as_json=False, with_node=False)
    assert capsys.readouterr().out == "algo-1 | ab\ncd\n"


@pytest.mark.parametrize("tag", ["[\x9bm/name]", "[\x1b[mlink=https://evil.example]x"])
@pytest.mark.parametrize("command", ["diagnose", "review"])
def test_a_log_line_cannot_be_markup(cli: Cli, tmp_path: Path, command: str, tag: str) -> None:
    (tmp_path / "algo-1.log").write_text(f"torch.OutOfMemoryError: CUDA out of memory. {tag}\n")
    result = cli(command, "algo-1.log")
    assert result.returncode == 0, result.stderr
    assert printable(tag) in " ".join(result.stdout.split())


def takes_text(parameter: click.Parameter) -> bool:
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    return not is_flag and "--help" not in parameter.opts


@pytest.mark.parametrize("name", COMMANDS)
def test_no_argument_reaches_the_terminal_with_control(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every option and argument of every command, one after the other, is hostile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    command = root.get_command(click.Context(root), name)
    assert command is not None
    taking = [parameter for parameter in command.params if takes_text(parameter)]
    required = [
        parameter
        for parameter in taking
        if isinstance(parameter, click.Argument) or parameter.required
    ]
    run_command([name, f"--{HOSTILE_ARGUMENT}"])
    assert "No such option" in (output := "".join(capfd.readouterr()))
    assert not set(output) & set("\x1b\x9b\x9d\x07\x08\u202e\u2066")
    for hostile in taking:
        words = [name]
        for fromkey in dict.fromkeys([*required, hostile]):
            words += [fromkey.opts[0]] if isinstance(fromkey, click.Option) else []
            words.append(HOSTILE_ARGUMENT if fromkey is hostile else "missing.yaml")
        run_command(words)
        output = "".join(capfd.readouterr())
        assert not set(output) & set("\x1b\x9b\x9d\x07\x08\u202e\u2066"), words
        assert "unexpected" not in output, words


def test_a_traceback_has_no_control(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "\x1b]0;title\x07").mkdir()
    result = cli("-v", "review", "\x1b]0;title\x07", "--html", "/proc/self/no/page\x9b31m.html")
    assert not set(result.stdout + result.stderr) & set("\x1b\x9b\x07")
