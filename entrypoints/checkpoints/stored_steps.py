"""Which checkpoints must stay in the nodes' folders, because of what storage holds.

What a node deletes is deleted in storage as well. So the newest checkpoint that is complete there
stays on every node until a newer one is, and so does the one that is being uploaded: otherwise
slow uploads would never complete one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sm_train.entrypoints.records.upload_notes import UploadedSteps, read_uploads, stored_on_all


class StoredSteps:
    """What all nodes know to be stored; :attr:`newest` is the step of the newest such checkpoint.

    With ``uploads`` false, the folder of checkpoints is the storage: all nodes share it.
    """

    def __init__(self, checkpoints: Path, *, uploads: bool = True) -> None:
        self._checkpoints, self._uploads = checkpoints, uploads
        self.newest: int | None = None
        self._uploading: int | None = None

    @property
    def protected(self) -> frozenset[int]:
        """The steps whose checkpoints stay."""
        return frozenset({self.newest, self._uploading} - {None})  # type: ignore[arg-type]

    def restored(self, step: int) -> None:
        """Note that the job resumed from the checkpoint of ``step``, which came from storage."""
        self.newest = step

    def own_uploads(self) -> UploadedSteps | None:
        """Return what this node has uploaded, to be shared with the others by one of its ranks."""
        return read_uploads(self._checkpoints) if self._uploads else None

    def committed(self, step: int, nodes: Iterable[UploadedSteps | None]) -> None:
        """Take what every node has uploaded, when the checkpoint of ``step`` became complete."""
        if not self._uploads:
            self.newest = step
            return
        known = [node for node in nodes if node is not None]
        stored = stored_on_all(known)
        if stored is not None and stored > (self.newest or -1):
            self.newest = stored
        # All ranks compute the same from the same reports. Without any note, what is uploaded is
        # unknown, and nothing waits for it.
        complete = {step}.union(*(node.complete for node in known))
        waiting = [saved for saved in complete if saved > (self.newest or -1)]
        has_notes = any(node.has_notes for node in known)
        self._uploading = min(waiting) if waiting and has_notes else None
