"""TensorBoard's event files, written synchronously: an error reaches the caller, nothing hangs."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm_train.entrypoints.tracking.scalars import IMAGE_TAG
from sm_train.entrypoints.tracking.tracker import LastSteps, Warn

_PREFIX = "events.out.tfevents"


def image_size(content: bytes) -> tuple[int, int] | None:
    """Return an image's width and height; None if it cannot be decoded."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return image.size
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


class TensorBoardFiles:
    """A :class:`~sm_train.entrypoints.tracking.tracker.Tracker` that writes a new event file.

    TensorBoard shows all files of a folder as one run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: io.FileIO | None = None

    def open(self, config: Mapping[str, Any], warn: Warn) -> LastSteps:
        """Read the steps of earlier files, and begin a new one."""
        last = read_last_steps(self._folder)
        self.create()
        return last

    def create(self) -> None:
        """Begin a new file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"{_PREFIX}.{time.time_ns() // 1000:017d}.{os.getpid()}"
        self._file = (self._folder / name).open("xb", buffering=0)
        self._write(time.time(), 0, file_version="brain.Event:2")

    def log_scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write(time, step, summary=summary)

    def log_image(self, step: int, time: float, content: bytes) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = image_size(content) or (0, 0)
        image = Summary.Image(
            width=width, height=height, colorspace=3, encoded_image_string=content
        )
        self._write(time, step, summary=Summary(value=[Summary.Value(tag=IMAGE_TAG, image=image)]))

    def close(self, reason: str | None) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, time: float, step: int, **content: Any) -> None:
        """Append one record, or nothing: readers stop at a record that is cut short.

        Raises:
            OSError: the disk is full.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None
        record = io.BytesIO()
        event = Event(wall_time=time, step=step, **content)
        RecordWriter(record).write(event.SerializeToString())
        start, written = self._file.tell(), 0
        try:
            written = self._file.write(record.getvalue())
        finally:
            if written != record.tell():
                self._file.truncate(start)
                self._file.seek(start)
        if written != record.tell():
            raise OSError(f"{self._folder}: the disk is full")


def read_last_steps(folder: Path) -> LastSteps:
    """Return the last step of each metric in the event files of ``folder``."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    last: LastSteps = {}
    for path in sorted(folder.glob(f"{_PREFIX}.*")):
        for content in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(content)
            for value in event.summary.value:
                last[value.tag] = max(event.step, last.get(value.tag, event.step))
    return last
