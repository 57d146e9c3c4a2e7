#!/usr/bin/env bash
# Regenerates twinpool/v1 from proto/. CI runs it and fails on a difference.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export PATH="$(cd "$(dirname "$python")" && pwd):$PATH"
"$python" -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
  proto/twinpool/v1/*.proto proto/twinpool/v1/kserve/*.proto
