"""What ``sm-train pack`` leaves behind when it does not come to its end: nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sm_train.entrypoints.shard_index import ShardIndex
from sm_train.entrypoints.shards import verify_shard
from sm_train.toolkit.packing import AHEAD, examined
from sm_train.toolkit.packing_inputs import Input, find_inputs

from tests.conftest import Cli, clean_environment
from tests.toolkit.pictures import album, picture, tree, write_pair

PROGRAM = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"
# What started the tests (nohup, a shell's background) may ignore these, and ignoring is inherited.
LISTENING = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + PROGRAM
)
FIRST_SHARD = "out/.packing/shards/shard-000000.tar"
PATIENCE = 60  # seconds until a wait for a condition is given up

Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small file system with the given options; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount_one(options: str) -> Path:
        place = tmp_path / f"mount-{len(mounted)}"
        place.mkdir()
        run = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {run.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount_one
    for place in mounted:
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def long_album(tmp_path: Path) -> Path:
    """Minutes of work for one process: thousands of names of one large image."""
    first = write_pair(tmp_path / "in", "0000.png", picture(size=(3000, 2000), kind="PNG"), "one")
    for number in range(1, 4000):
        (tmp_path / "in" / f"{number:04}.png").hardlink_to(first)
        (tmp_path / "in" / f"{number:04}.txt").hardlink_to(first.with_suffix(".txt"))
    return tmp_path / "in"


@contextmanager
def started(
    folder: Path, *arguments: str, program: str = LISTENING
) -> Iterator[subprocess.Popen[str]]:
    """``sm-train pack`` in a process group of its own, as a terminal would start it."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, "pack", "in", "out", "--shard-size", "100KB", *arguments],
        cwd=folder,
        env=clean_environment(folder),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if not group_is_gone(process.pid):  # the test failed
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for ``condition`` while ``process`` runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for_group(leader: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not group_is_gone(leader):
        assert time.monotonic() < deadline, "a process outlived the command"
        time.sleep(0.01)


def interrupt_midway(folder: Path, send: Callable[[int], None], *arguments: str) -> tuple[int, str]:
    """Start packing, ``send`` something to it after its first shard; exit code and words."""
    with started(folder, *arguments) as process:
        until((folder / FIRST_SHARD).exists, process)
        send(process.pid)
        _, words = process.communicate(timeout=PATIENCE)
        wait_for_group(process.pid)
    return process.returncode, words


SIGNALS = [
    pytest.param(lambda pid: os.kill(pid, signal.SIGTERM), id="terminate"),
    pytest.param(lambda pid: os.killpg(pid, signal.SIGINT), id="ctrl-c"),
    pytest.param(lambda pid: os.killpg(pid, signal.SIGHUP), id="hang-up"),
]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("send", SIGNALS)
@pytest.mark.usefixtures("long_album")
def test_a_signal_ends_it_and_leaves_nothing(
    tmp_path: Path, send: Callable[[int], None], workers: str
) -> None:
    code, words = interrupt_midway(tmp_path, send, "--workers", workers)
    assert (code, words.strip()) == (130, "sm-train: interrupted")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("long_album")
def test_a_signal_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out/shards").mkdir(parents=True)
    (tmp_path / "out/notes.md").write_text("mine")
    before = tree(tmp_path / "out")
    code, _ = interrupt_midway(tmp_path, lambda pid: os.kill(pid, signal.SIGTERM))
    assert code == 130
    assert tree(tmp_path / "out") == before


@pytest.mark.usefixtures("long_album")
def test_impatience_does_not_break_off_the_cleaning_up(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2") as process:
        until((tmp_path / FIRST_SHARD).exists, process)
        while process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)
        wait_for_group(process.pid)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("long_album")
def test_kill_9_shows_no_shard_and_the_next_run_clears_up(cli: Cli, tmp_path: Path) -> None:
    code, _ = interrupt_midway(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL), "--workers", "2")
    assert code == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".packing"]
    album(tmp_path / "small", 4)
    assert cli("pack", "small", "out").returncode == 0
    assert sorted(tree(tmp_path / "out")) == [
        "index.parquet", "shards", "shards/shard-000000.tar",
    ]  # fmt: skip


@pytest.mark.usefixtures("long_album")
def test_two_runs_do_not_share_a_destination(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "small", 4)
    with started(tmp_path) as process:
        until((tmp_path / FIRST_SHARD).exists, process)
        second = cli("pack", "small", "out")
        process.terminate()
        process.wait(PATIENCE)
    assert (second.returncode, second.stderr) == (
        2, "sm-train: out: another sm-train pack is writing to it\n",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_nohup_is_respected(long_album: Path, tmp_path: Path) -> None:
    """A hang-up that the caller ignores is not for us to notice."""
    for number in range(40, 4000):
        (long_album / f"{number:04}.png").unlink()
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {PROGRAM}"
    with started(tmp_path, program=ignoring) as process:
        until((tmp_path / "out/.packing/shards").exists, process)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    cli: Cli, tmp_path: Path, mount: Mount, workers: str
) -> None:
    disk = mount("size=1m")
    (disk / "mine.txt").write_text("mine")
    for number in range(60):
        noise = os.urandom(30_000)  # behind the image's end, where no decoder looks
        write_pair(tmp_path / "in", f"{number}.jpg", picture(number) + noise, "a caption")
    size = ("--shard-size", "200KB", "--workers", workers)
    for destination in (disk, disk / "new" / "deeper"):
        run = cli("pack", "in", destination, *size)
        assert run.returncode == 1
        assert run.stderr == (
            f"sm-train: {destination}: {os.strerror(errno.ENOSPC)}; free some space\n"
        )
        assert tree(disk) == {"mine.txt": b"mine"}


def test_a_disk_that_is_full_at_the_very_end_is_no_different(
    cli: Cli, tmp_path: Path, mount: Mount
) -> None:
    """Room for the shards, none for the index: sizes from too small to enough."""
    album(tmp_path / "in", 40)
    assert cli("pack", "in", "whole", "--shard-size", "20KB").returncode == 0
    pages = sum(-(-len(content) // 4096) for content in tree(tmp_path / "whole").values())
    codes = []
    for blocks in range(pages - 3, pages + 6, 2):
        disk = mount(f"size={blocks * 4096}")
        run = cli("pack", "in", disk, "--shard-size", "20KB")
        codes.append(run.returncode)
        assert tree(disk) == ({} if run.returncode else tree(tmp_path / "whole"))
    assert codes[0] == 1
    assert codes[-1] == 0


def test_a_destination_that_cannot_be_written_is_a_matter_of_permission(
    cli: Cli, tmp_path: Path, mount: Mount
) -> None:
    """A read-only file system, which stops even root."""
    album(tmp_path / "in", 2)
    disk = mount("size=1m,ro")
    for destination in (disk, disk / "new"):
        run = cli("pack", "in", destination)
        assert run.returncode == 4
        assert run.stderr.startswith(f"sm-train: {disk}")
        assert run.stderr.count("\n") == 1


def test_a_destination_below_a_file_is_one_line(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 2)
    (tmp_path / "file").write_text("mine")
    for destination in ("file", "file/below"):
        run = cli("pack", "in", destination)
        assert run.returncode == 2
        assert run.stderr.startswith(f"sm-train: {destination}: ")
        assert run.stderr.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_killed_worker_is_one_line_and_leaves_nothing(long_album: Path, tmp_path: Path) -> None:
    """As when the system runs out of memory."""
    with started(tmp_path, "--workers", "2") as process:
        until((tmp_path / FIRST_SHARD).exists, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("this kernel does not list a process's children")
        workers = [
            int(child)
            for child in children.read_text().split()
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        os.kill(workers[0], signal.SIGKILL)
        _, words = process.communicate(timeout=PATIENCE)
        wait_for_group(process.pid)
    assert process.returncode == 1
    assert words == (
        "sm-train: a process that checks images was killed, perhaps for its memory; "
        "try fewer --workers\n"
    )
    assert not (tmp_path / "out").exists()


def test_inputs_do_not_run_ahead_of_the_writer(tmp_path: Path) -> None:
    """Their results would pile up behind a slow disk."""
    drawn: list[Input] = []

    class Watched(tuple[Input, ...]):
        def __iter__(self) -> Iterator[Input]:
            for item in super().__iter__():
                drawn.append(item)
                yield item

    album(tmp_path / "in", 60)
    found = find_inputs(tmp_path / "in", None, image_column="image", caption_column="caption")
    with closing(examined(Watched(found.images), 2)) as outcomes:
        for taken, _ in enumerate(outcomes):
            assert len(drawn) - taken <= 2 * AHEAD
    assert len(drawn) == 60


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """400 MB in one shard, and no process may have more than 250 MB of its own."""
    first = write_pair(
        tmp_path / "in", "000.jpg", picture() + os.urandom(4_000_000), "noise behind its end"
    )
    for number in range(1, 100):
        (tmp_path / "in" / f"{number:03}.jpg").hardlink_to(first)
        (tmp_path / "in" / f"{number:03}.txt").hardlink_to(first.with_suffix(".txt"))
    program = (
        "import resource\n"
        "limit = 250 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n" + PROGRAM
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "pack", "in", "out", "--workers", "2"],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shard = ShardIndex(tmp_path / "out/index.parquet").shard(0)
    assert shard.bytes > 400_000_000
    verify_shard(tmp_path / "out/shards" / shard.name, shard)
