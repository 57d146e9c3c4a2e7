#!/usr/bin/env bash
# Writes constraints-cuda.txt: what the image for GPUs installs, as constraints.txt has it, with torch's build for CUDA and what that needs.
# Nothing is installed: pip resolves by the metadata alone, of which it fetches the ends of wheels. --check says whether it is as it would be
# written. It needs the usual index (PyPI) and Python 3.11 on x86-64 Linux, as the image has.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
python=$work/venv/bin/python
# The index that this machine is told to use may well have the build for CPUs.
export PIP_CONFIG_FILE=/dev/null
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL
# An older pip resolves by whole wheels.
"$python" -m pip install -q --disable-pip-version-check 'pip>=26.3'
"$python" - >"$work/wanted.txt" <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for need in (*project["dependencies"], *(need for extra in ("cuda", "fast", "tracing") for need in project["optional-dependencies"][extra])):
    print(need)
PY
# Pins of the same set; the lock itself where there is one, else a later release of a CUDA library would come in.
cp constraints.txt "$work/pins.txt"
if [ "${1:-}" != --new ] && [ -e constraints-cuda.txt ]; then cat constraints-cuda.txt >>"$work/pins.txt"; fi
"$python" -m pip install -q --disable-pip-version-check --dry-run --ignore-installed --use-feature=fast-deps --only-binary :all: \
  -c "$work/pins.txt" -r "$work/wanted.txt" --report "$work/report.json" >"$work/log" 2>&1 || { tail -20 "$work/log" >&2; exit 1; }
"$python" - "$work/report.json" >"$work/lock.txt" <<'PY'
import json, re, sys
found = {}
for each in json.load(open(sys.argv[1]))["install"]:
    about = each["metadata"]
    found[re.sub(r"[-_.]+", "-", about["name"]).lower()] = about["version"]
print("# Every package of the image for GPUs (VARIANT=cuda). Written by scripts/lock_cuda.sh from constraints.txt; torch is the build for CUDA 13.")
print("\n".join(f"{name}=={found[name]}" for name in sorted(found)))
PY
if [ "${1:-}" = --check ]; then
  diff constraints-cuda.txt "$work/lock.txt" || { echo "run scripts/lock_cuda.sh" >&2; exit 1; }
else
  cp "$work/lock.txt" constraints-cuda.txt
fi
