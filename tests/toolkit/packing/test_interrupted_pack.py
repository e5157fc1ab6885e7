"""``sm-train pack`` that does not come to its end: nothing half-done, and it can go on."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.data.shard_verification import verify_shard
from sm_train.entrypoints.packing.plan import PackInput, ShardPlan
from sm_train.entrypoints.packing.shard_builder import GROUP_INPUTS, GROUPS_PER_THREAD, build_shard
from sm_train.entrypoints.packing.storage import LocalFolder, S3Access

from tests.conftest import Cli, Mount, clean_environment
from tests.support.image_files import album, picture, tree, write_pair

PROGRAM = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"
# What started the tests (nohup, a shell's background) may ignore these, and ignoring is inherited.
LISTENING = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + PROGRAM
)
FIRST_RECORD = "out/.packing/shard-000000.tar.parquet"
GOES_ON = "sm-train: interrupted; finished shards are kept, run the same command to resume"
PATIENCE = 60  # seconds until a wait for a condition is given up


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
        until((folder / FIRST_RECORD).exists, process)
        send(process.pid)
        _, words = process.communicate(timeout=PATIENCE)
        wait_for_group(process.pid)
    return process.returncode, words


SIGNALS = [
    pytest.param(lambda pid: os.kill(pid, signal.SIGTERM), id="terminate"),
    pytest.param(lambda pid: os.killpg(pid, signal.SIGINT), id="ctrl-c"),
    pytest.param(lambda pid: os.killpg(pid, signal.SIGHUP), id="hang-up"),
]


def whole_shards(folder: Path) -> list[str]:
    """Everything that has a final name is whole; returns the names of the shards."""
    hidden = [path for path in folder.rglob("*") if path.name.endswith(".part")]
    assert hidden == []
    for path in (folder / "shards").iterdir():
        verify_shard(path)
    return sorted(path.name for path in (folder / "shards").iterdir())


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("send", SIGNALS)
@pytest.mark.usefixtures("long_album")
def test_a_signal_ends_it_and_keeps_what_is_finished(
    tmp_path: Path, send: Callable[[int], None], workers: str
) -> None:
    code, words = interrupt_midway(tmp_path, send, "--workers", workers)
    assert (code, words.strip()) == (130, GOES_ON)
    assert "shard-000000.tar" in whole_shards(tmp_path / "out")
    assert not (tmp_path / "out/index.parquet").exists()


@pytest.mark.usefixtures("long_album")
def test_a_signal_before_the_first_shard_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out/shards").mkdir(parents=True)
    (tmp_path / "out/notes.md").write_text("mine")
    before = tree(tmp_path / "out")
    with started(tmp_path, "--shard-size", "1GB") as process:
        until((tmp_path / "out/.packing/plan.json").exists, process)
        process.terminate()
        _, words = process.communicate(timeout=PATIENCE)
        wait_for_group(process.pid)
    assert (process.returncode, words.strip()) == (130, "sm-train: interrupted")
    assert tree(tmp_path / "out") == before


@pytest.mark.usefixtures("long_album")
def test_impatience_does_not_break_off_the_cleaning_up(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2") as process:
        until((tmp_path / FIRST_RECORD).exists, process)
        while process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)
        wait_for_group(process.pid)
    assert whole_shards(tmp_path / "out")


@pytest.mark.parametrize(
    "extra", [(), pytest.param(("--near-duplicates", "3"), marks=pytest.mark.slow)]
)
def test_kill_9_at_any_moment_and_the_same_command_make_the_same_bytes(
    cli: Cli, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    """Killed again and again, each time after something more was finished."""
    for number in range(24):
        side = (700 + number, 500)
        image = picture(number % 20, size=side, kind="PNG")
        write_pair(tmp_path / "in", f"{number:02}.png", image, f"picture {number}")
    size = ("--shard-size", "100KB", "--workers", "2", *extra)
    assert cli("pack", "in", "whole", *size).returncode == 0
    kills, kept = 0, dict[Path, int]()
    while True:
        done = len(list((tmp_path / "out").rglob("*.tar*")))
        with started(tmp_path, "--workers", "2", *extra) as process:
            while process.poll() is None:
                now = len(list((tmp_path / "out").rglob("*.tar*")))
                if now > done + kills % 3:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
                time.sleep(0.001)
            process.wait(PATIENCE)
            wait_for_group(process.pid)
        if process.returncode == 0:
            break
        kills += 1
        for path, written in kept.items():
            assert path.stat().st_mtime_ns == written, "a finished shard was written again"
        kept = {
            path.parent.parent / "shards" / path.name.removesuffix(".parquet"): 0
            for path in (tmp_path / "out/.packing").glob("*.tar.parquet")
        }
        kept = {path: path.stat().st_mtime_ns for path in kept}
    assert kills > 1
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_killed_after_the_index_the_same_command_clears_up(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 12)
    size = ("--shard-size", "20KB")
    for name in ("out", "whole"):
        assert cli("pack", "in", name, *size).returncode == 0
    stopped = (
        "import os\n"
        "from sm_train.entrypoints.packing.storage import LocalFolder\n"
        "LocalFolder.set_modified_ns = lambda *_: os.kill(os.getpid(), 9)\n" + PROGRAM
    )
    shutil.rmtree(tmp_path / "out")
    with started(tmp_path, *size, program=stopped) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert (tmp_path / "out/index.parquet").exists()
    assert (tmp_path / "out/.packing/plan.json").exists()
    again = cli("pack", "in", "out", *size)
    assert (again.returncode, again.stderr.split(" samples")[0]) == (0, "already packed 12")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("long_album")
def test_an_unfinished_pack_of_other_inputs_is_not_touched(cli: Cli, tmp_path: Path) -> None:
    code, _ = interrupt_midway(tmp_path, lambda pid: os.killpg(pid, signal.SIGKILL))
    assert code == -signal.SIGKILL
    album(tmp_path / "small", 4)
    before = tree(tmp_path / "out/shards")
    run = cli("pack", "small", "out")
    assert run.returncode == 2
    assert "out: contains an unfinished pack of other inputs or options" in run.stderr
    assert tree(tmp_path / "out/shards") == before


@pytest.mark.usefixtures("long_album")
def test_two_runs_do_not_share_a_destination(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "small", 4)
    with started(tmp_path) as process:
        until((tmp_path / FIRST_RECORD).exists, process)
        second = cli("pack", "small", "out")
        process.terminate()
        process.wait(PATIENCE)
    assert (second.returncode, second.stderr) == (
        2,
        "sm-train: out: another sm-train pack is writing to it\n",
    )


def test_nohup_is_respected(long_album: Path, tmp_path: Path) -> None:
    """A hang-up that the caller ignores is not for us to notice."""
    for number in range(40, 4000):
        (long_album / f"{number:04}.png").unlink()
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {PROGRAM}"
    with started(tmp_path, program=ignoring) as process:
        until((tmp_path / "out/.packing/plan.json").exists, process)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_one_line_and_more_room_is_enough(
    cli: Cli, tmp_path: Path, mount: Mount, workers: str
) -> None:
    disk = mount("size=1m")
    (disk / "mine.txt").write_text("mine")
    for number in range(60):
        noise = os.urandom(30_000)  # behind the image's end, where no decoder looks
        write_pair(tmp_path / "in", f"{number}.jpg", picture(number) + noise, "a caption")
    size = ("--shard-size", "200KB", "--workers", workers)
    destination = disk / "new" / "deeper"
    run = cli("pack", "in", destination, *size)
    assert run.returncode == 1
    assert run.stderr.startswith(f"sm-train: {destination}/")
    assert run.stderr.endswith(f": {os.strerror(errno.ENOSPC)}; free some space\n")
    assert (disk / "mine.txt").read_text() == "mine"
    assert whole_shards(destination)
    subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
    assert cli("pack", "in", destination, *size).returncode == 0
    assert cli("pack", "in", "whole", *size).returncode == 0
    assert tree(destination) == tree(tmp_path / "whole")


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


def test_a_killed_worker_is_one_line_and_keeps_what_is_finished(
    long_album: Path, tmp_path: Path
) -> None:
    """As when the system runs out of memory."""
    with started(tmp_path, "--workers", "2") as process:
        until((tmp_path / FIRST_RECORD).exists, process)
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
        "sm-train: a worker process was killed, perhaps because it ran out of memory; try fewer "
        "--workers; finished shards are kept, run the same command to resume\n"
    )
    assert (tmp_path / "out/shards/shard-000000.tar").exists()


def test_inputs_do_not_run_ahead_of_the_writer(tmp_path: Path) -> None:
    """Their results would pile up behind a slow disk."""
    drawn: list[int] = []

    class Watched(tuple[PackInput, ...]):
        def __iter__(self) -> Iterator[PackInput]:
            for item in super().__iter__():
                drawn.append(item.number)
                yield item

    album(tmp_path / "in", 400)
    paths = sorted((tmp_path / "in").rglob("*.jpg"))
    inputs = Watched(
        PackInput(number, path.name, str(path), path.stat().st_size, "a caption")
        for number, path in enumerate(paths)
    )
    written: list[int] = []

    def tell(done: int, _bytes: int, _rejected: int) -> None:
        assert len(drawn) - len(written) <= 2 * GROUPS_PER_THREAD * GROUP_INPUTS
        written.append(done)

    plan = ShardPlan(0, "shard-000000.tar", inputs)
    build_shard(plan, LocalFolder(tmp_path / "out"), S3Access(), 2, tell, {})
    assert len(written) == len(drawn) == 400


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """1 GB in one shard, and no process may have more than 500 MB of its own."""
    first = write_pair(
        tmp_path / "in", "000.jpg", picture() + os.urandom(4_000_000), "noise behind its end"
    )
    for number in range(1, 250):
        (tmp_path / "in" / f"{number:03}.jpg").hardlink_to(first)
        (tmp_path / "in" / f"{number:03}.txt").hardlink_to(first.with_suffix(".txt"))
    program = (
        "import resource\n"
        "limit = 500 * 2**20\n"
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
    assert shard.bytes > 1_000_000_000
    verify_shard(tmp_path / "out/shards" / shard.name, shard)
