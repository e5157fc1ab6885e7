# Image of `sm-train submit --local container`: Python, PyTorch and the packages that a job installs, so
# that a container starts without installing anything. A base that has PyTorch keeps its own. In a
# checkout:
#
#   docker build -t sm-train-local -f toolkit/templates/local-image.Dockerfile estimators/data
#
# Not for use on SageMaker: it lacks the CUDA, NCCL and EFA of AWS's images.
# Python 3.11.16, 2026-09-24; `docker buildx imagetools inspect python:3.11-slim-bookworm` prints newer.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE}
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements-local.txt requirements.txt /tmp/
RUN python3 -c "import torch" 2>/dev/null \
    || pip3 install --no-cache-dir --require-hashes -r /tmp/requirements-local.txt
RUN pip3 install --no-cache-dir --require-hashes -r /tmp/requirements.txt
