#!/usr/bin/env bash
# sagemaker-training 5.1.4, the toolkit in AWS's containers, parses each hyperparameter as JSON.
#
# Expected: CreateTrainingJob takes texts, so a script gets the same texts as arguments.
# Seen: what JSON can parse becomes a number, a constant or a list, and is written as Python writes
# it: 1e5 arrives as 100000.0, which `argparse` refuses for `type=int`; 0.10 as 0.1; true as True;
# null as an empty argument; NaN as nan. What JSON cannot parse, such as 0012 or 16-mixed, arrives
# unchanged. A text in double quotes arrives without them.
# So: whoever starts a job without the SageMaker SDK, which writes each value as JSON, has to do
# that too: '"1e5"' arrives as 1e5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --quiet --quiet --disable-pip-version-check \
    "sagemaker-training==5.1.4" --no-deps
"$folder/venv/bin/pip" install --quiet --quiet --quiet --disable-pip-version-check \
    "boto3==1.44.8" "botocore==1.44.8" "psutil==7.1.0" "six==1.17.0" "retrying==1.4.2" \
    2>"$folder/pip.log" || { cat "$folder/pip.log"; exit 1; }
mkdir -p "$folder/ml/input/config"
cat >"$folder/ml/input/config/hyperparameters.json" <<'JSON'
{"a": "1e5", "b": "0.10", "c": "true", "d": "null", "e": "NaN", "f": "0012", "g": "16-mixed",
 "h": "\"1e5\""}
JSON
SAGEMAKER_BASE_DIR="$folder/ml" "$folder/venv/bin/python" - >"$folder/seen" <<'PYTHON'
from sagemaker_training import environment, mapping

for name, value in environment.read_hyperparameters().items():
    print(repr(value), mapping.to_cmd_args({"name": value}))
PYTHON
diff - "$folder/seen" <<'SEEN'
100000.0 ['--name', '100000.0']
0.1 ['--name', '0.1']
True ['--name', 'True']
None ['--name', '']
nan ['--name', 'nan']
'0012' ['--name', '0012']
'16-mixed' ['--name', '16-mixed']
'1e5' ['--name', '1e5']
SEEN
