#!/usr/bin/env bash
# Starts a container engine for the tests and builds their images: that of `submit --local
# container`, and one in which AWS's container toolkit starts MPI (sm-train-mpi). Needs root on
# Debian 12; installs Debian packages only.
#
#   engine.sh up FOLDER             install the packages, start the engine, create the base system
#   engine.sh image FOLDER PYTHON   build the images with the packages of PYTHON's environment
#   engine.sh down FOLDER           stop the engine and remove FOLDER
#
# `up` needs no Python environment. The engine listens on FOLDER/docker.sock:
# export DOCKER_HOST=unix://FOLDER/docker.sock
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
command=$1 folder=$2
export DOCKER_HOST="unix://$folder/docker.sock"

up() {
    mkdir -p "$folder"
    if ! type dockerd docker-compose mmdebstrap iptables rclone fusermount3 >/dev/null 2>&1; then
        "$here/apt-install.sh" \
            cgroupfs-mount docker.io docker-compose fuse3 iptables mmdebstrap rclone
    fi
    mountpoint -q /sys/fs/cgroup || cgroupfs-mount
    # Without a bridge, routes or firewall rules, containers reach only each other, and nothing has
    # to be undone afterwards.
    dockerd --data-root "$folder/data" --exec-root "$folder/exec" -H "$DOCKER_HOST" \
        -p "$folder/pid" --bridge none --iptables=false --ip-forward=false --ip-masq=false \
        >"$folder/dockerd.log" 2>&1 </dev/null &
    # openmpi-bin and openssh-server are for sm-train-mpi alone. Installed here, they cost no
    # second download of package lists.
    mmdebstrap --quiet --variant=essential \
        --include=python3-minimal,libpython3-stdlib,libstdc++6,openmpi-bin,openssh-server \
        bookworm "$folder/image.tar"
    for _ in $(seq 60); do
        docker version >/dev/null 2>&1 && return
        sleep 0.5
    done
    tail -5 "$folder/dockerd.log" >&2
    return 1
}

# Copies the environment's packages instead of installing them again. This works because Debian's
# Python and the environment's are both 3.11.
image() {
    local python=$1 site bin=usr/local/bin
    local rename='--transform=s,^python3.11/site-packages,usr/local/lib/python3.11/dist-packages,'
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    case $site in */lib/python3.11/site-packages) ;; *)
        echo "engine.sh: $site: Debian 12 has Python 3.11; make PYTHON=python3.11" >&2
        return 1 ;;
    esac
    packages "$python" torch numpy pillow pip -r "$project/estimators/data/requirements.txt" |
        tar -rf "$folder/image.tar" -C "${site%/python3.11/*}" -T - "$rename"
    mkdir -p "$folder/$bin"
    printf '#!/bin/sh\nexec python3 -m pip "$@"\n' >"$folder/$bin/pip3"
    chmod +x "$folder/$bin/pip3"
    tar -rf "$folder/image.tar" -C "$folder" "$bin/pip3"
    docker import -c 'ENV PIP_BREAK_SYSTEM_PACKAGES=1' "$folder/image.tar" sm-train-base >/dev/null
    rm "$folder/image.tar"
    # The base image already has every package, so the build needs no network.
    docker build -q --network none --build-arg BASE=sm-train-base -t sm-train-local \
        -f "$project/toolkit/templates/local-image.Dockerfile" "$project/estimators/data"

    local mpi="$folder/mpi"
    cp -r "$here/mpi" "$mpi"
    packages "$python" boto3 -r "$mpi/requirements.txt" |
        tar -cf "$mpi/packages.tar" -C "${site%/python3.11/*}" -T - "$rename"
    docker build -q --network none -t sm-train-mpi "$mpi"
    rm -r "$mpi"
}

packages() {
    local python=$1
    shift
    "$python" "$here/installed_packages.py" "$@"
}

down() {
    if [ -f "$folder/pid" ]; then
        local pid
        pid=$(cat "$folder/pid")
        docker ps -q | xargs -r docker kill >/dev/null || true
        kill "$pid" || true
        while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    fi
    rm -rf "$folder"
}

"$command" "${@:3}"
