#!/bin/bash
#SBATCH --job-name=bria-2-0-256px
#SBATCH --dependency=singleton
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --time=40320
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=/fsx/sm-train/bria-2-0/logs/%x-%j.log
# sm-train/run: bria-2-0
# sm-train/stage: 256px
# sm-train/bundle: 5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f
# sm-train/commit: 0000000000000000000000000000000000000000
set -euo pipefail

export SM_TRAIN_NODE='{"stage":"256px","entry":"train.py","instance_type":"ml.p4de.24xlarge","nodes":4,"processes":8,"channels":[{"name":"train","uri":"s3://my-bucket/shards/","path":null,"sharded":true},{"name":"index","uri":"s3://my-bucket/index.parquet","path":null,"sharded":false},{"name":"model","uri":"s3://my-bucket/components/","path":null,"sharded":false}],"checkpoints":"/fsx/sm-train/bria-2-0/checkpoints/256px","launcher":"torchrun","platform":"slurm","commands":{"status":"squeue --name=bria-2-0-256px","stop":"scancel --name=bria-2-0-256px --signal=TERM","cancel":"scancel --name=bria-2-0-256px --state=PENDING","resume":"sbatch bria-2-0-256px.sbatch"},"take_over":false}'
export AWS_REGION=us-east-1
export AWS_DEFAULT_REGION=us-east-1
export NCCL_DEBUG=INFO
export NCCL_DEBUG_SUBSYS=INIT,NET
export PYTHONUNBUFFERED=1
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/tmp/sm-train-nccl-
export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/sm-train-nccl-
export SM_TRAIN_BUNDLE=5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f
export SM_TRAIN_COMMIT=0000000000000000000000000000000000000000
export SM_TRAIN_REMOVALS_0=train=s3://my-bucket/index.parquet.removed
export SAGEMAKER_BASE_DIR=/tmp/sm-train-$UID-bria-2-0-256px

# Each node fetches the code unless another has; another digest ends the job.
export code=/fsx/sm-train/bria-2-0/code/5f5f5f5f5f5f5f5f
mkdir -p "$code"
fetch='
check() { echo "5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f  $1" | sha256sum --check --status -; }
if ! check "$code/sourcedir.tar.gz" 2>/dev/null; then
    own="$SAGEMAKER_BASE_DIR/sourcedir.tar.gz" shared="$code/sourcedir.tar.gz.$SLURM_JOB_ID-$SLURM_PROCID"
    mkdir -p "$SAGEMAKER_BASE_DIR"
    python3 - s3://my-bucket/bria-2-0/code/manifest-5f5f5f5f5f5f5f5f/sourcedir.tar.gz "$own" <<"END" && check "$own" || {
import os
import sys

try:
    import boto3

    bucket, _, key = sys.argv[1].removeprefix("s3://").partition("/")
    pairs = os.environ.get("SM_TRAIN_BUCKET_OWNERS", "").split(",")
    owner = dict(pair.partition("=")[::2] for pair in pairs).get(bucket)
    owner = owner or boto3.client("sts").get_caller_identity()["Account"]
    expected = {} if owner == "any" else {"ExpectedBucketOwner": owner}
    boto3.client("s3").download_file(bucket, key, sys.argv[2], ExtraArgs=expected)
except Exception as error:
    sys.exit(f"sm-train: error: {sys.argv[1]}: {error}")
END
        echo "sm-train: error: $code/sourcedir.tar.gz is not the code of this run: copy "s3://my-bucket/bria-2-0/code/manifest-5f5f5f5f5f5f5f5f/sourcedir.tar.gz" there" >&2
        exit 1
    }
    cp "$own" "$shared" && mv -f "$shared" "$code/sourcedir.tar.gz"
fi
'

# HyperPod repeats the step on replaced nodes; only its srun has this option.
resume=()
if [ -d /opt/sagemaker_cluster ]; then resume=(--auto-resume=1); fi

# Starts of this job since it last stored a checkpoint.
mkdir -p /fsx/sm-train/bria-2-0/checkpoints/256px/job-records
begin=/fsx/sm-train/bria-2-0/checkpoints/256px/job-records/.starts-$SLURM_JOB_ID
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -f "$begin"
restarts() {
    local saved
    saved=$(find /fsx/sm-train/bria-2-0/checkpoints/256px -name complete.json -newer "$begin" 2>/dev/null || true)
    if [ -n "$saved" ] || [ ! -s "$begin" ]; then echo 0; else cat "$begin"; fi
}
if [ "$(restarts)" -gt 3 ]; then
    echo "sm-train: error: 3 restarts without a checkpoint (slurm.max_restarts)"
    exit 1
fi
starts=$(($(restarts) + 1)); echo "$starts" >"$begin"
status=0
srun "${resume[@]}" --label --kill-on-bad-exit=1 --cpu-bind=none ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} --container-image='111122223333.dkr.ecr.us-east-1.amazonaws.com#train:1' --container-mounts=/fsx/sm-train:/fsx/sm-train,/tmp:/tmp bash -c "$fetch"'rm -rf "$SAGEMAKER_BASE_DIR/input/data/code" && mkdir -p "$SAGEMAKER_BASE_DIR/input/data/code" && tar -xzf "$code/sourcedir.tar.gz" -C "$SAGEMAKER_BASE_DIR/input/data/code" && cd "$SAGEMAKER_BASE_DIR/input/data/code" && exec python3 -m sm_train.entrypoints.clusters.start' || status=$?

# Continue after a failure with a new checkpoint, after a time limit, and without nodes
# that have been flagged.
again=
flagged=$(cat /fsx/sm-train/bria-2-0/checkpoints/256px/job-records/flagged-nodes 2>/dev/null || true)
if [ "$status" -ne 0 ]; then
    own=$(find /fsx/sm-train/bria-2-0/checkpoints/256px/job-records -path "*-job$SLURM_JOB_ID-*" -name node.json \
        -newer "$begin" 2>/dev/null || true)
    if grep -qE '"exit_code": 75[,}]' $own /dev/null; then again=progress; fi
    if [ "$status" -eq 143 ] || grep -qE '"exit_code": 143[,}]' $own /dev/null; then
        export SLURM_TIME_FORMAT=standard
        end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e || true)
        [ -z "$end" ] || end=$(date -d "$end" +%s 2>/dev/null || true)
        if [ -n "$end" ] && [ $((end - $(date +%s))) -le 240 ]; then
            again=time
        fi
    fi
    if [ -n "$flagged" ] && grep -qE '"exit_code": 69[,}]' $own /dev/null; then again=unfit; fi
    if grep -qE '"exit_code": 74[,}]' $own /dev/null; then again=; fi
    if [ "$(restarts)" -gt 3 ]; then again=; fi
fi
if [ -n "$again" ]; then
    echo "sm-train: queued again ($again), restart ${SLURM_RESTART_COUNT:-0}"
    # Slurm also stops this script, and excludes nodes of jobs in the queue only.
    trap '' TERM
    for attempt in 1 2 3 4 5 6 7 8 9 10; do  # slurmctld may restart
        if scontrol requeue "$SLURM_JOB_ID"; then break; fi
        if [ "$attempt" -eq 10 ]; then exit "$status"; fi
        sleep 30
    done
fi
if [ -n "$again" ] && [ -n "$flagged" ]; then
    usable=$(
        sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format="%N %t" |
        awk '$2 ~ /^(idle|alloc|mix|comp|plnd)[-~#+%]?$/ { print $1 }' |
        sort --unique || true)
    left=$(grep -v '^$' <<<"$usable" | grep -vxFc "$flagged" || true)
    job=$(scontrol show job --oneliner "$SLURM_JOB_ID" || true)
    present=$(sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p' <<<"$job")
    # Nodes that the user demands stay.
    if [ "$left" -ge 4 ] && [[ "$job" == *" ReqNodeList=(null)"* ]]; then
        excluded=$(paste --serial --delimiters=, <<<"$flagged")
        [ -z "$present" ] || [ "$present" = "(null)" ] || excluded="$present,$excluded"
        for attempt in 1 2 3 4 5; do
            if scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded"; then
                echo "sm-train: without the flagged nodes" $flagged; break
            fi
            sleep 1
        done
    fi
fi
exit "$status"
