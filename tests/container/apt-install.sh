#!/usr/bin/env bash
# Installs Debian packages as root: apt-install.sh PACKAGE...
#
# Waits up to five minutes for another apt-get, as on a machine that has just started. apt-get's
# own timeout covers dpkg's lock but not that of the package lists.
set -euo pipefail
wait_for_lock=(-o DPkg::Lock::Timeout=300)
for attempt in $(seq 60); do
    if message=$(apt-get "${wait_for_lock[@]}" update -qq 2>&1); then
        break
    elif [[ $message != *"Unable to lock"* && $message != *"Could not get lock"* ]] ||
        [ "$attempt" = 60 ]; then
        echo "$message" >&2
        exit 1
    fi
    sleep 5
done
DEBIAN_FRONTEND=noninteractive apt-get "${wait_for_lock[@]}" install -qq -y \
    --no-install-recommends "$@" >/dev/null
