#!/usr/bin/env bash
# The structure of the script in AWS's images (aws/deep-learning-containers, 2026-08), without its
# compiler: a shell that runs `train` as a child.
if [[ "$1" = "train" ]]; then
    train
else
    eval "$@"
fi
