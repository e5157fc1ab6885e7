"""The Hugging Face Hub: its errors as one line, and what this toolkit reads and writes there.

``HF_ENDPOINT``, ``HF_TOKEN`` and the token file of ``hf auth login`` apply as for the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.extras import require_extra

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def hub_api() -> HfApi:
    """Return the library's client, without its progress bars.

    Raises:
        UserError: the library is not installed.
    """
    require_extra("hub", "huggingface_hub", purpose="the Hugging Face Hub")
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    return HfApi()


@contextmanager
def translate_hub_errors(operation: str) -> Iterator[None]:
    """Raise errors of the Hub and of the network as a :class:`UserError`."""
    require_extra("hub", "huggingface_hub", purpose="the Hugging Face Hub")
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise UserError(
            f"{operation}: the model is gated; accept its license on its page on the Hub, then set "
            "HF_TOKEN or run `hf auth login`",
            ExitCode.PERMISSION,
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{operation}: no such repository, or it is private; check the name, then set HF_TOKEN "
            "or run `hf auth login`",
            ExitCode.PERMISSION,
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{operation}: no such revision in the repository") from None
    except EntryNotFoundError as error:
        raise UserError(f"{operation}: {_first_line(error)}") from None
    except HFValidationError as error:
        raise UserError(f"{operation}: {_first_line(error)}") from None
    except OfflineModeIsEnabled:
        raise UserError(
            f"{operation}: HF_HUB_OFFLINE is set; unset it to reach the Hub", ExitCode.UNEXPECTED
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise UserError(
                f"{operation}: the Hub denies access ({status}); the token needs permission for "
                "this repository: set HF_TOKEN or run `hf auth login`",
                ExitCode.PERMISSION,
            ) from None
        raise UserError(f"{operation}: {_first_line(error)}", ExitCode.UNEXPECTED) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise UserError(f"{operation}: {_first_line(error)}", ExitCode.UNEXPECTED) from None
    except Exception as error:
        # Connection errors of the library's HTTP client: requests, httpx or httpx2 by its version.
        if type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise UserError(
                f"{operation}: the Hub cannot be reached ({_first_line(error)})",
                ExitCode.UNEXPECTED,
            ) from None
        raise


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def require_token() -> None:
    """Refuse to continue without a token, which every write to the Hub needs.

    Raises:
        UserError: there is none.
    """
    require_extra("hub", "huggingface_hub", purpose="the Hugging Face Hub")
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError(
            "--push-to-hub: no token; set HF_TOKEN or run `hf auth login`", ExitCode.PERMISSION
        )


def create_repository(repository: str, *, private: bool) -> None:
    """Create a model repository unless it exists: before hours of work, not after.

    Raises:
        UserError: the Hub refuses.
    """
    operation = f"--push-to-hub {repository}"
    with translate_hub_errors(operation):
        hub_api().create_repo(repository, private=private or None, exist_ok=True)


def upload(repository: str, path: Path, message: str) -> str:
    """Upload a file or a folder as one commit; return the commit's URL.

    What the repository has already with the same content is not uploaded again.

    Raises:
        UserError: the Hub refuses or cannot be reached.
    """
    api = hub_api()
    with translate_hub_errors(f"--push-to-hub {repository}"):
        if path.is_dir():
            return str(
                api.upload_folder(
                    repo_id=repository, folder_path=path, commit_message=message
                ).commit_url
            )
        return str(
            api.upload_file(
                path_or_fileobj=path,
                path_in_repo=path.name,
                repo_id=repository,
                commit_message=message,
            ).commit_url
        )
