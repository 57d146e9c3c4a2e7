#!/usr/bin/env bash
# Installs the project and its pinned CPU set into $VENV; with "system" only what it needs of the system. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

# System packages: a compiler, OpenSSL's headers, and (wanted, not needed) etcd.
missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v cmake >/dev/null || missing+=(cmake)
[ -e /usr/include/openssl/evp.h ] || missing+=(libssl-dev)
[ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
[ -e /usr/include/zstd.h ] || missing+=(libzstd-dev)
command -v etcd >/dev/null || missing+=(etcd-server)
command -v etcdctl >/dev/null || missing+=(etcd-client)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Installing Debian packages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    say "Missing system packages: sudo apt-get install ${missing[*]}"
    # etcd alone is optional: the embedded store takes its place.
    [[ " ${missing[*]} " =~ ^(\ etcd-(server|client))+\ $ ]] || exit 1
  fi
fi

# Wanted, not needed: without gRPC's C headers routers cannot use `rpc.transport: native`.
if [ ! -e /usr/include/grpc/grpc.h ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libgrpc-dev >/dev/null 2>&1 || say "Without libgrpc-dev: rpc.transport is python"
fi

[ "${1:-}" != system ] || exit 0

if [ ! -x "$venv/bin/python" ]; then
  say "Creating $venv"
  "${PYTHON:-python3}" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }

# torch first and pinned: a range would let pip take a CUDA build of several gigabytes. TORCH_INDEX names the
# package index that serves the CPU build where the default one does not.
say "Installing torch (CPU)"
pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep -E '^torch==' constraints.txt)"
say "Installing Twinpool and its pinned dependencies"
# uv does in seconds what takes pip minutes, but reads none of pip's settings: what it cannot find, pip may.
index=${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
pip install -c constraints.txt uv || say "Without uv: pip takes some minutes"
install() {
  { [ -x "$venv/bin/uv" ] && ${index:+env UV_DEFAULT_INDEX="$index"} "$venv/bin/uv" pip install -q --python "$venv/bin/python" "$@"; } || pip install "$@"
}
install -c constraints.txt scikit-build-core pybind11 ninja
install -c constraints.txt --no-build-isolation -e '.[worker,models,dev]'
if ! command -v nvidia-smi >/dev/null && "$venv/bin/python" -m pip list 2>/dev/null | grep -qE '^(nvidia|cuda)-'; then
  say "A CUDA build was installed on a machine without a GPU: set TORCH_INDEX to an index with CPU builds"
  exit 1
fi
