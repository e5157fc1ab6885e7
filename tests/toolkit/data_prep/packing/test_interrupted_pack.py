"""Interrupted ``sm-train pack``: no partial files, and the same command resumes it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sm_train.entrypoints.data_prep.packing.plan import PackInput, ShardPlan
from sm_train.entrypoints.data_prep.packing.shard_builder import (
    GROUP_INPUTS,
    GROUPS_PER_THREAD,
    InputReader,
    build_shard,
)
from sm_train.entrypoints.images.decoder_pool import InProcessDecoders
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import S3Access

from tests.conftest import Cli, Mount, clean_environment
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair
from tests.support.order.interrupted_pack_support import (
    PROGRAM,
    count_tar_files,
    started,
    wait_for_group,
    wait_until,
)

pytestmark = pytest.mark.integration

FIRST_RECORD = "out/.packing/shard-000000.tar.parquet"
RESUMABLE = "sm-train: {}; finished shards are kept, run the same command to resume"


@pytest.fixture
def long_album(tmp_path: Path) -> Path:
    """Minutes of work for one process: thousands of hard links to one large image."""
    first = write_pair(
        tmp_path / "in", "0000.png", image_bytes(size=(3000, 2000), kind="PNG"), "one"
    )
    for number in range(1, 4000):
        (tmp_path / "in" / f"{number:04}.png").hardlink_to(first)
        (tmp_path / "in" / f"{number:04}.txt").hardlink_to(first.with_suffix(".txt"))
    return tmp_path / "in"


def interrupt_midway(folder: Path, send: Callable[[int], None], *arguments: str) -> tuple[int, str]:
    """Pack, call ``send`` after the first shard; return the exit code and standard error."""
    with started(folder, *arguments) as process:
        wait_until((folder / FIRST_RECORD).exists, process)
        send(process.pid)
        _, stderr = process.communicate(timeout=DEADLINE)
        wait_for_group(process.pid)
    return process.returncode, stderr


SIGNALS = [
    pytest.param(lambda pid: os.kill(pid, signal.SIGTERM), 143, id="terminate"),
    pytest.param(lambda pid: os.killpg(pid, signal.SIGINT), 130, id="ctrl-c"),
    pytest.param(lambda pid: os.killpg(pid, signal.SIGHUP), 130, id="hang-up"),
]
"""How a signal is sent, and the exit code."""


def verified_shards(folder: Path) -> list[str]:
    """Verify that all shards are complete and no partial file is left; return their names."""
    partial = [path for path in folder.rglob("*") if path.name.endswith(".part")]
    assert partial == []
    for path in (folder / "shards").iterdir():
        verify_shard(path)
    return sorted(path.name for path in (folder / "shards").iterdir())


@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("send", "expected"), SIGNALS)
@pytest.mark.usefixtures("long_album")
def test_a_signal_stops_the_pack_and_keeps_finished_shards(
    tmp_path: Path, send: Callable[[int], None], expected: int, workers: str
) -> None:
    code, stderr = interrupt_midway(tmp_path, send, "--workers", workers)
    how = "terminated" if expected == 143 else "interrupted"
    assert (code, stderr.strip()) == (expected, RESUMABLE.format(how))
    assert "shard-000000.tar" in verified_shards(tmp_path / "out")
    assert not (tmp_path / "out/index.parquet").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("long_album")
def test_a_signal_before_the_first_shard_leaves_the_destination_unchanged(tmp_path: Path) -> None:
    (tmp_path / "out/shards").mkdir(parents=True)
    (tmp_path / "out/notes.md").write_text("mine")
    before = read_tree(tmp_path / "out")
    with started(tmp_path, "--shard-size", "1GB") as process:
        wait_until((tmp_path / "out/.packing/plan.json").exists, process)
        process.terminate()
        _, stderr = process.communicate(timeout=DEADLINE)
        wait_for_group(process.pid)
    assert (process.returncode, stderr.strip()) == (143, "sm-train: terminated")
    assert read_tree(tmp_path / "out") == before


@pytest.mark.usefixtures("long_album")
def test_repeated_signals_do_not_interrupt_the_clean_up(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2") as process:
        wait_until((tmp_path / FIRST_RECORD).exists, process)
        while process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)
        wait_for_group(process.pid)
    assert verified_shards(tmp_path / "out")


@pytest.mark.parametrize(
    "extra", [(), pytest.param(("--near-duplicates", "3"), marks=pytest.mark.slow)]
)
def test_a_pack_that_is_killed_and_resumed_has_the_same_bytes(
    cli: Cli, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    """Killed repeatedly, each time after more files were finished."""
    for number in range(24):
        side = (700 + number, 500)
        image = image_bytes(number % 20, size=side, kind="PNG")
        write_pair(tmp_path / "in", f"{number:02}.png", image, f"picture {number}")
    size = ("--shard-size", "100KB", "--workers", "2", *extra)
    assert cli("pack", "in", "complete", *size).returncode == 0
    kills, finished = 0, dict[Path, int]()
    while True:
        done = count_tar_files(tmp_path / "out")
        with started(tmp_path, "--workers", "2", *extra) as process:
            while process.poll() is None:
                now = count_tar_files(tmp_path / "out")
                if now > done + kills % 3:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
                time.sleep(0.001)
            process.wait(DEADLINE)
            wait_for_group(process.pid)
        if process.returncode == 0:
            break
        kills += 1
        for path, modified in finished.items():
            assert path.stat().st_mtime_ns == modified, "a finished shard was written again"
        finished = {
            path.parent.parent / "shards" / path.name.removesuffix(".parquet"): 0
            for path in (tmp_path / "out/.packing").glob("*.tar.parquet")
        }
        finished = {path: path.stat().st_mtime_ns for path in finished}
    assert kills > 1
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "complete")


def test_a_pack_that_is_killed_after_the_index_is_cleaned_up(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 12)
    size = ("--shard-size", "20KB")
    for name in ("out", "complete"):
        assert cli("pack", "in", name, *size).returncode == 0
    program = (
        "import os\n"
        "from sm_train.entrypoints.storage.storage import LocalFolder\n"
        "LocalFolder.set_modified_ns = lambda *_: os.kill(os.getpid(), 9)\n" + PROGRAM
    )
    shutil.rmtree(tmp_path / "out")
    with started(tmp_path, *size, program=program) as process:
        assert process.wait(DEADLINE) == -signal.SIGKILL
    assert (tmp_path / "out/index.parquet").exists()
    assert (tmp_path / "out/.packing/plan.json").exists()
    again = cli("pack", "in", "out", *size)
    assert (again.returncode, again.stderr.split(" samples")[0]) == (0, "already packed 12")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "complete")


@pytest.mark.usefixtures("long_album")
def test_an_unfinished_pack_of_other_inputs_is_not_changed(cli: Cli, tmp_path: Path) -> None:
    code, _ = interrupt_midway(tmp_path, lambda pid: os.killpg(pid, signal.SIGKILL))
    assert code == -signal.SIGKILL
    write_album(tmp_path / "small", 4)
    before = read_tree(tmp_path / "out/shards")
    run = cli("pack", "small", "out")
    assert run.returncode == 2
    assert "out: contains an unfinished pack of other inputs or options" in run.stderr
    assert read_tree(tmp_path / "out/shards") == before


@pytest.mark.usefixtures("long_album")
def test_concurrent_packs_do_not_share_a_destination(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "small", 4)
    with started(tmp_path) as process:
        wait_until((tmp_path / FIRST_RECORD).exists, process)
        second = cli("pack", "small", "out")
        process.terminate()
        process.wait(DEADLINE)
    assert second.returncode == 2
    holder = f"process {process.pid} on {socket.gethostname()}"
    expected = f"sm-train: out: another sm-train command is writing to it: {holder}\n"
    assert second.stderr == expected


def test_an_ignored_hang_up_stays_ignored(long_album: Path, tmp_path: Path) -> None:
    """As under nohup: a caller that ignores SIGHUP wants the pack to continue."""
    for number in range(40, 4000):
        (long_album / f"{number:04}.png").unlink()
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {PROGRAM}"
    with started(tmp_path, program=program) as process:
        wait_until((tmp_path / "out/.packing/plan.json").exists, process)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(DEADLINE) == 0


@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.slow)])
def test_a_pack_on_a_full_disk_resumes_with_more_space(
    cli: Cli, tmp_path: Path, mount: Mount, workers: str
) -> None:
    disk = mount("size=1m")
    (disk / "mine.txt").write_text("mine")
    for number in range(60):
        noise = os.urandom(30_000)  # after the end of the image, where decoders do not read
        write_pair(tmp_path / "in", f"{number}.jpg", image_bytes(number) + noise, "a caption")
    size = ("--shard-size", "200KB", "--workers", workers)
    destination = disk / "new" / "deeper"
    run = cli("pack", "in", destination, *size)
    assert run.returncode == 1
    assert run.stderr.startswith(f"sm-train: {destination}/")
    assert run.stderr.endswith(f": {os.strerror(errno.ENOSPC)}; free some space\n")
    assert (disk / "mine.txt").read_text() == "mine"
    assert verified_shards(destination)
    subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
    assert cli("pack", "in", destination, *size).returncode == 0
    assert cli("pack", "in", "complete", *size).returncode == 0
    assert read_tree(destination) == read_tree(tmp_path / "complete")


def test_a_read_only_destination_is_a_permission_error(
    cli: Cli, tmp_path: Path, mount: Mount
) -> None:
    """A read-only file system also stops root."""
    write_album(tmp_path / "in", 2)
    disk = mount("size=1m,ro")
    for destination in (disk, disk / "new"):
        run = cli("pack", "in", destination)
        assert run.returncode == 4
        assert run.stderr.startswith(f"sm-train: {disk}")
        assert run.stderr.count("\n") == 1


def test_a_destination_below_a_file_is_an_error(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 2)
    (tmp_path / "file").write_text("mine")
    for destination in ("file", "file/below"):
        run = cli("pack", "in", destination)
        assert run.returncode == 2
        assert run.stderr.startswith(f"sm-train: {destination}: ")
        assert run.stderr.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_killed_worker_is_an_error_and_keeps_finished_shards(
    long_album: Path, tmp_path: Path
) -> None:
    """As by the kernel's out-of-memory killer."""
    with started(tmp_path, "--workers", "2") as process:
        wait_until((tmp_path / FIRST_RECORD).exists, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("this kernel does not list a process's children")
        workers = [
            int(child)
            for child in children.read_text().split()
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        os.kill(workers[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=DEADLINE)
        wait_for_group(process.pid)
    assert process.returncode == 1
    assert stderr == (
        "sm-train: SIGKILL ended a worker process; if memory ran out, try fewer --workers; "
        "finished shards are kept, run the same command to resume\n"
    )
    assert (tmp_path / "out/shards/shard-000000.tar").exists()


def test_readers_do_not_run_ahead_of_the_writer(tmp_path: Path) -> None:
    """Their results would accumulate in memory behind a slow disk."""
    started_inputs: list[int] = []

    class RecordingInputs(tuple[PackInput, ...]):
        def __iter__(self) -> Iterator[PackInput]:
            for item in super().__iter__():
                started_inputs.append(item.number)
                yield item

    write_album(tmp_path / "in", 400)
    paths = sorted((tmp_path / "in").rglob("*.jpg"))
    inputs = RecordingInputs(
        PackInput(number, path.name, str(path), path.stat().st_size, "a caption")
        for number, path in enumerate(paths)
    )
    finished_inputs: list[int] = []

    def on_progress(done: int, _bytes: int, _rejected: int) -> None:
        assert len(started_inputs) - len(finished_inputs) <= 2 * GROUPS_PER_THREAD * GROUP_INPUTS
        finished_inputs.append(done)

    plan = ShardPlan(0, "shard-000000.tar", inputs)
    reader = InputReader(S3Access(), InProcessDecoders())
    build_shard(plan, LocalFolder(tmp_path / "out"), reader, 2, on_progress, {})
    assert len(finished_inputs) == len(started_inputs) == 400


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """1 GB in one shard, while each process may allocate at most 500 MB."""
    first = write_pair(
        tmp_path / "in", "000.jpg", image_bytes() + os.urandom(4_000_000), "noise after its end"
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
