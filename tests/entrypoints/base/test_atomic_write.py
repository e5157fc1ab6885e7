"""A file is replaced as a whole and keeps its mode; devices and pipes are never replaced."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sm_train.entrypoints.base.atomic_write import write_atomic

from tests.support.deadline import DEADLINE


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from sm_train.entrypoints.base.atomic_write import write_atomic\n"
        f"os.umask({umask}); write_atomic(Path(sys.argv[1]), b'new')"
    )
    path = tmp_path / "new"
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=DEADLINE)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_an_existing_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_atomic(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files fails a write in its middle, as a full disk does."""
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from sm_train.entrypoints.base.atomic_write import write_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "write_atomic(Path(sys.argv[1]), bytes(100_000))"
    )
    path = tmp_path / "old"
    path.write_bytes(b"old")
    failed = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=DEADLINE
    )
    assert "OSError" in failed.stderr
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    link = tmp_path / "link"
    link.symlink_to("folder/target")
    for content in (b"first", b"second"):
        write_atomic(link, content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(path.read_bytes)
        write_atomic(path, b"content")
        assert received.result(DEADLINE) == b"content"
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_an_open_pipe_is_written_to() -> None:
    """As /dev/stdout in ``sm-train cost --html /dev/stdout | less``: its target has no path."""
    reader, writer = os.pipe()
    write_atomic(Path(f"/dev/fd/{writer}"), b"content")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"content"


def test_a_device_is_never_replaced() -> None:
    write_atomic(Path("/dev/null"), b"content")
    with pytest.raises(OSError, match="/dev/full") as caught:
        write_atomic(Path("/dev/full"), b"content")
    assert caught.value.errno == errno.ENOSPC
    for name in ("/dev/null", "/dev/full"):
        assert stat.S_ISCHR(Path(name).stat().st_mode)


def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "folder", tmp_path / "loop", tmp_path / "missing" / "file"):
        with pytest.raises(OSError, match=str(path)):
            write_atomic(path, b"content")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "loop"]
