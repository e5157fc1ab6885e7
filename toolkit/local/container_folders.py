"""Creates a stage's folders for the SDK's local containers.

The SDK mounts every channel in full into every container, and no checkpoint folder. Each container
corrects that itself: a script that bash reads at its start (``BASH_ENV``; the SDK's entrypoint is a
bash script) links the container's own shards and checkpoint folder to the paths that a job expects.
The training code, the request and the image are unaffected.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm_train.entrypoints.common.index_location import index_path
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths, host_names
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.local.folders import (
    LocalFolders,
    local_data,
    node_files,
    shared_channels,
    unpack,
)

_DATA = PurePosixPath("/opt/ml/input/data")
_SHARDS, _LINKS, _CHECKPOINTS = "local_shards", "local_shares", "local_checkpoints"
PREPARE = str(_DATA / _LINKS / "prepare.sh")
"""Path of the script inside the containers."""

_SCRIPT = f"""\
# Read by the first bash of a container, before the SDK's own script.
unset BASH_ENV
host=$(sed -n 's/.*"current_host": *"\\([^"]*\\)".*/\\1/p' /opt/ml/input/config/resourceconfig.json)
ln -sfn "{_DATA}/{_LINKS}/$host" {_DATA}/train
rmdir /opt/ml/checkpoints 2>/dev/null || true  # an image may contain an empty one
ln -sfn "{_DATA}/{_CHECKPOINTS}/$host" /opt/ml/checkpoints
# The caller must be able to read and remove the files that root creates here.
chmod a+rwx {_DATA} /opt/ml/model /opt/ml/output /opt/ml/output/data
umask 0
"""


@dataclass(frozen=True)
class ContainerFolders:
    """The stage's folders, and ``channels``: the folders that every container mounts."""

    local: LocalFolders
    channels: dict[str, Path]

    @property
    def sdk(self) -> Path:
        """The SDK's working folder."""
        return self.local.model.parent


def lay_out_for_containers(
    config: RunConfig, stage: StageSection, bundle: Bundle, *, base: Path, nodes: int, output: Path
) -> ContainerFolders:
    """Create the folders; checkpoints of an earlier attempt stay, also of local processes.

    Raises:
        UserError: no local shards, too few, or links that containers cannot follow.
    """
    folder, files = local_data(config, base, nodes)
    channels = shared_channels(config, stage, base, output)
    root = (output / stage.name).absolute()
    sdk = root / "containers"
    trees = tuple(SageMakerPaths(sdk / host) for host in host_names(nodes))
    links, checkpoints = root / "shares", root / "node-checkpoints"
    node_checkpoints = tuple(checkpoints / host for host in host_names(nodes))
    local = LocalFolders(root, trees, node_checkpoints, bundle.entry, bundle.sha256, sdk / "model")
    for recreated in (sdk, links, checkpoints):
        shutil.rmtree(recreated, ignore_errors=True)
        recreated.mkdir(parents=True, exist_ok=True)
    unpack(bundle, local.bundle)
    (links / "prepare.sh").write_text(_SCRIPT, encoding="utf-8")
    for rank, host in enumerate(host_names(nodes)):
        _link_for_container(node_files(config, files, rank, nodes), folder, links / host)
    if config.reads_index and index_path(folder).exists():
        channels["index"] = root / "index"
        channels["index"].mkdir(exist_ok=True)
        shutil.copy(index_path(folder), channels["index"])
    channels |= {_SHARDS: folder, _LINKS: links, _CHECKPOINTS: checkpoints}
    return ContainerFolders(local, channels)


def _link_for_container(files: list[Path], folder: Path, links: Path) -> None:
    """Create links to the files that are valid where containers mount ``folder``."""
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"data.local: {file}: links to a file outside of {folder}, which containers do "
                "not mount; move the shard into the folder, or use --local process"
            )
        relative = file.relative_to(folder)
        link = links / relative
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(_DATA / _SHARDS / relative.as_posix())
