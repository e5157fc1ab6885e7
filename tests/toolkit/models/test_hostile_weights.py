"""Commands that read a model folder refuse damaged and contradictory weight files with one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.support.models import build, write_checkpoint


def headed(document: object, data: bytes = b"", length: int | None = None) -> bytes:
    header = document if isinstance(document, bytes) else json.dumps(document).encode()
    length = len(header) if length is None else length
    return length.to_bytes(8, "little") + header + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "huge header": headed({}, length=2**62),
    "header longer than the file": headed({}, length=300),
    "deep": headed(b'{"a":' + b"[" * 50_000),
    "no UTF-8": headed(b'{"\xff\xfe": {}}'),
    "negative offset": headed({"a": entry(-4, 0, [1])}, bytes(4)),
    "overlap": headed({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
    "hole": headed({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)),
    "shape": headed({"a": entry(0, 4, [2**40])}, bytes(4)),
    "unknown type": headed({"a": entry(0, 4, [1], "F33")}, bytes(4)),
    "duplicate": headed(
        b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 4, [1])).encode(),) * 2), bytes(4)
    ),
    "more data": headed({"a": entry(0, 4, [1])}, bytes(400)),
    "pickle": b"PK\x03\x04" + bytes(200),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sm_train.entrypoints.models.checkpoint_export import ExportOptions, export
    from sm_train.toolkit.models.sampling.sample import find_source

    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(build("tiny-sd2"), folder / "checkpoints")
    options = ExportOptions("diffusers")
    export(find_source(folder / "checkpoints"), options, folder / "model", folder, lambda _: None)
    return folder / "model"


QUICK = {"huge header", "overlap", "pickle"}


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in HOSTILE],
)
@pytest.mark.parametrize("command", ["export", pytest.param("sample", marks=pytest.mark.slow)])
def test_a_hostile_header_is_one_line(
    cli: Cli, tmp_path: Path, model: Path, command: str, kind: str
) -> None:
    shutil.copytree(model, tmp_path / "model")
    [weights] = (tmp_path / "model" / "unet").glob("*.safetensors")
    weights.write_bytes(HOSTILE[kind])
    (tmp_path / "prompts.txt").write_text("a 3\n")
    more = {
        "export": [tmp_path / "out", "--format", "single-file"],
        "sample": ["--prompts", "prompts.txt", "--steps", "1"],
    }[command]
    result = cli(command, tmp_path / "model", *more)
    assert result.returncode in (2, 3), result.stderr
    assert result.stderr.count("sm-train: ") == 1, result.stderr
    assert "unexpected" not in result.stderr
    assert not (tmp_path / "out").exists()
