# The image of the function in watch-lambda.yaml. Build it in a checkout of sm-train, logged in to ECR:
#
#   sm-train template watch-lambda-image > watch-lambda.Dockerfile
#   docker build --platform linux/amd64 --provenance=false -f watch-lambda.Dockerfile -t IMAGE .
#   docker push IMAGE
# The base is AWS's image of 2026-10-09. For a newer one, pass the digest that
# `docker buildx imagetools inspect public.ecr.aws/lambda/python:3.12` prints:
# --build-arg BASE=public.ecr.aws/lambda/python:3.12@sha256:...
ARG BASE=public.ecr.aws/lambda/python:3.12@sha256:145350008f3f67d82c0bc6ecd34d9eb0c95aecf11f9b69db6bab7de3d5d3cc61
FROM ${BASE}
COPY estimators/data/requirements-watch-lambda.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt
COPY toolkit ${LAMBDA_TASK_ROOT}/sm_train/toolkit
COPY estimators ${LAMBDA_TASK_ROOT}/sm_train/estimators
COPY cost ${LAMBDA_TASK_ROOT}/sm_train/cost
COPY entrypoints ${LAMBDA_TASK_ROOT}/sm_train/entrypoints
CMD ["sm_train.toolkit.runs.watch.lambda_handler.handler"]
