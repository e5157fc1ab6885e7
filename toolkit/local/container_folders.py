"""Lays out a stage's folders for the SDK's local containers.

The SDK gives every container every channel whole, and no folder for checkpoints. What each host
should see instead is arranged inside it: a script that bash reads first (``BASH_ENV``; the SDK's
entrypoint is a bash) links the host's own share of the shards and the shared checkpoints to where
a job finds them. The training code, the request and the image know nothing of it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm_train.entrypoints.common.index_location import index_path
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.local.folders import (
    LocalFolders,
    host_names,
    local_shards,
    share,
    shared_channels,
    unpack,
)

_DATA = PurePosixPath("/opt/ml/input/data")
_SHARDS, _SHARES = "local_shards", "local_shares"
PREPARE = str(_DATA / _SHARES / "prepare.sh")
"""The script, as the containers see it."""

_SCRIPT = f"""\
# Read by the first bash of a container, before the SDK's own script.
unset BASH_ENV
host=$(sed -n 's/.*"current_host": *"\\([^"]*\\)".*/\\1/p' /opt/ml/input/config/resourceconfig.json)
ln -sfn "{_DATA}/{_SHARES}/$host" {_DATA}/train
rmdir /opt/ml/checkpoints 2>/dev/null || true  # an image may bring an empty one
ln -sfn {_DATA}/local_checkpoints /opt/ml/checkpoints
# What root makes here must be the caller's to remove.
chmod a+rwx {_DATA} /opt/ml/model /opt/ml/output /opt/ml/output/data
umask 0
"""


@dataclass(frozen=True)
class ContainerFolders:
    """``local`` as for processes; ``channels`` are the folders that every container mounts."""

    local: LocalFolders
    channels: dict[str, Path]

    @property
    def sdk(self) -> Path:
        """The SDK's working folder."""
        return self.local.model.parent


def lay_out_for_containers(
    config: RunConfig, stage: StageSection, bundle: Bundle, *, base: Path, nodes: int, output: Path
) -> ContainerFolders:
    """Make the folders; checkpoints of an earlier attempt, of processes too, stay.

    Raises:
        UserError: no local shards, too few, or links that would lead nowhere in a container.
    """
    folder, shards = local_shards(config, base, nodes)
    channels = shared_channels(config, stage, base, output)
    root = (output / stage.name).absolute()
    sdk = root / "containers"
    trees = tuple(SageMakerPaths(sdk / host) for host in host_names(nodes))
    local = LocalFolders(root, trees, bundle.entry, sdk / "model")
    shares = root / "shares"
    for made in (sdk, shares):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True, exist_ok=True)
    local.checkpoints.mkdir(exist_ok=True)
    unpack(bundle, local.bundle)
    (shares / "prepare.sh").write_text(_SCRIPT, encoding="utf-8")
    for rank, host in enumerate(host_names(nodes)):
        _link_inside(share(shards, rank, nodes), folder, shares / host)
    if config.data.index and index_path(folder).exists():
        channels["index"] = root / "index"
        channels["index"].mkdir(exist_ok=True)
        shutil.copy(index_path(folder), channels["index"])
    channels |= {_SHARDS: folder, _SHARES: shares, "local_checkpoints": local.checkpoints}
    return ContainerFolders(local, channels)


def _link_inside(shards: list[Path], folder: Path, share_of_host: Path) -> None:
    """Links that lead to the shards where containers see ``folder``."""
    for shard in shards:
        if not shard.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"data.local: {shard}: a link to outside of {folder}, which containers do not see; "
                "put the shard there, or use --local process"
            )
        inside = shard.relative_to(folder)
        link = share_of_host / inside
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(_DATA / _SHARDS / inside.as_posix())
