# The image of `sm-train submit --local container`: Python, PyTorch for the CPU or not, and the very
# packages that a job installs, so that starting a container installs nothing. In a checkout:
#
#   docker build -t sm-train-local -f toolkit/templates/local-image.Dockerfile estimators/data
#
# For SageMaker itself this is too slim: its images bring CUDA, NCCL and EFA.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH=torch==2.13.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements.txt /tmp/
RUN pip3 install --no-cache-dir ${TORCH} numpy pillow -r /tmp/requirements.txt
