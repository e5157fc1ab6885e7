# The image of the function in watch-lambda.yaml. Build it in a checkout of sm-train, logged in to ECR:
#
#   sm-train template watch-lambda-image > watch-lambda.Dockerfile
#   docker build --platform linux/amd64 --provenance=false -f watch-lambda.Dockerfile -t IMAGE .
#   docker push IMAGE
FROM public.ecr.aws/lambda/python:3.12
RUN pip install --no-cache-dir \
    "boto3>=1.40,<2" "google-re2>=1.1,<2" "msgspec>=0.19,<1" "packaging>=23,<27" \
    "pathspec>=0.12,<2" "pydantic>=2.7,<3"
COPY toolkit ${LAMBDA_TASK_ROOT}/sm_train/toolkit
COPY estimators ${LAMBDA_TASK_ROOT}/sm_train/estimators
COPY cost ${LAMBDA_TASK_ROOT}/sm_train/cost
COPY entrypoints ${LAMBDA_TASK_ROOT}/sm_train/entrypoints
CMD ["sm_train.toolkit.watch.lambda_handler.handler"]
