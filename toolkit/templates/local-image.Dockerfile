# Image of `sm-train submit --local container`: Python, PyTorch (the build argument TORCH) and the
# packages that a job installs, so that a container starts without installing anything. In a checkout:
#
#   docker build -t sm-train-local -f toolkit/templates/local-image.Dockerfile estimators/data
#
# Not for use on SageMaker: it lacks the CUDA, NCCL and EFA of AWS's images.
# Python 3.11.16, 2026-09-24; `docker buildx imagetools inspect python:3.11-slim-bookworm` prints newer.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE}
ARG TORCH=torch==2.13.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements.txt /tmp/
RUN pip3 install --no-cache-dir ${TORCH} \
    && pip3 install --no-cache-dir --require-hashes -r /tmp/requirements.txt
