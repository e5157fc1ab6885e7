"""A model repository on the Hub at one commit, read by ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.models.hub.client import hub_api, translate_hub_errors


@dataclass(frozen=True)
class HubComponents:
    """The files of ``repository`` at the commit ``revision``.

    ``files`` are their sizes, ``digests`` the SHA-256 of large files by path.
    """

    repository: str
    revision: str
    files: dict[str, int]
    digests: dict[str, str]

    @property
    def location(self) -> str:
        return f"{self.repository}@{self.revision[:12]}"

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return a range of a file; see ``ComponentReader``.

        Raises:
            UserError: the Hub returns an error or cannot be reached.
        """
        from huggingface_hub import hf_hub_url, utils

        end = min(start + length, self.files[path]) - 1
        if end < start:
            return b""
        # The package does not declare its exports for type checkers.
        http: Any = utils
        operation = f"{self.location}: {path}"
        with translate_hub_errors(operation):
            url = hf_hub_url(self.repository, path, revision=self.revision)
            headers = {**http.build_hf_headers(), "Range": f"bytes={start}-{end}"}
            response = http.get_session().get(url, headers=headers)
            http.hf_raise_for_status(response)
            content: bytes = response.content
        # A server without ranges sends the whole file.
        content = content[start : end + 1] if response.status_code == 200 else content
        if len(content) != end + 1 - start:
            raise UserError(
                f"{operation}: the Hub sent {len(content):,} bytes of {end + 1 - start:,}",
                ExitCode.UNEXPECTED,
            )
        return content


def read_repository(repository: str, revision: str | None) -> HubComponents:
    """Return the files of a repository at a branch, tag or commit, resolved to its commit.

    Raises:
        UserError: there is no such repository or revision, or it is gated.
    """
    with translate_hub_errors(repository):
        info = hub_api().model_info(repository, revision=revision, files_metadata=True)
    siblings = info.siblings or []
    digests = {sibling.rfilename: sibling.lfs["sha256"] for sibling in siblings if sibling.lfs}
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in siblings}
    assert info.sha is not None
    return HubComponents(repository, info.sha, sizes, digests)
