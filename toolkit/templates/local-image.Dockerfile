# Image of `sm-train submit --local container`: Python, PyTorch (the build argument TORCH) and the
# packages that a job installs, so that a container starts without installing anything. In a checkout:
#
#   docker build -t sm-train-local -f toolkit/templates/local-image.Dockerfile estimators/data
#
# Not for use on SageMaker: it lacks the CUDA, NCCL and EFA of AWS's images.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH=torch==2.13.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements.txt /tmp/
RUN pip3 install --no-cache-dir ${TORCH} \
    && pip3 install --no-cache-dir --require-hashes -r /tmp/requirements.txt
