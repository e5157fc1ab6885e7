# The image of the function in watch-lambda.yaml. Build it in a checkout of sm-train, logged in to ECR:
#
#   sm-train template watch-lambda-image > watch-lambda.Dockerfile
#   docker build --platform linux/amd64 --provenance=false -f watch-lambda.Dockerfile -t IMAGE .
#   docker push IMAGE
# `docker buildx imagetools inspect public.ecr.aws/lambda/python:3.12` prints the digest to pin.
FROM public.ecr.aws/lambda/python:3.12
COPY estimators/data/requirements-watch-lambda.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt
COPY toolkit ${LAMBDA_TASK_ROOT}/sm_train/toolkit
COPY estimators ${LAMBDA_TASK_ROOT}/sm_train/estimators
COPY cost ${LAMBDA_TASK_ROOT}/sm_train/cost
COPY entrypoints ${LAMBDA_TASK_ROOT}/sm_train/entrypoints
CMD ["sm_train.toolkit.watch.lambda_handler.handler"]
