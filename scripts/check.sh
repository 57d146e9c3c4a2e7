#!/usr/bin/env bash
# All static checks. Prints a line a check; stops at the first that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/${VENV:-.venv}/bin
export PATH="$bin:$PATH"
step() { printf '%-22s' "$1"; shift; local out; if out=$("$@" 2>&1); then echo ok; else echo FAILED; echo "$out"; exit 1; fi; }
python_dirs=(router prefill_worker decode_worker control engine transfer twinpool tests bench scripts)
cpp_files() { git ls-files --cached --others --exclude-standard 'csrc/*.cpp' 'csrc/*.h'; }
clang_format() { cpp_files | xargs clang-format --dry-run -Werror; }
clang_tidy() {
  local build=build/tidy
  cmake -S . -B $build -DCMAKE_BUILD_TYPE=Release >/dev/null
  git ls-files --cached --others --exclude-standard 'csrc/*.cpp' | grep -vE 'csrc/(bindings|transport|tests|fuzz|bench)/' \
    | xargs -P 2 -n 4 clang-tidy -p $build --quiet --warnings-as-errors='*'
}
proto_drift() {
  local before after
  before=$(cat twinpool/v1/*_pb2* twinpool/v1/kserve/*_pb2* | sha256sum)
  PYTHON=$bin/python scripts/proto.sh
  after=$(cat twinpool/v1/*_pb2* twinpool/v1/kserve/*_pb2* | sha256sum)
  [ "$before" = "$after" ] || { echo "twinpool/v1 does not match proto/: run make proto"; return 1; }
}
buf_lint() { (cd proto && buf lint); }
step "ruff" ruff check "${python_dirs[@]}"
step "ruff format" ruff format --check "${python_dirs[@]}"
step "import contract" lint-imports
# Each keeps one core busy.
pyright_log=$(mktemp)
pyright --pythonpath "$bin/python" >"$pyright_log" 2>&1 &
pyright=$!
step "mypy" mypy
printf '%-22s' "pyright"
if wait $pyright; then echo ok; else echo FAILED; cat "$pyright_log"; exit 1; fi
rm "$pyright_log"
step "buf lint" buf_lint
step "generated code" proto_drift
step "clang-format" clang_format
step "clang-tidy" clang_tidy
