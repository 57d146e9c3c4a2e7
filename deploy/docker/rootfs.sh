#!/usr/bin/env bash
# Builds what the image holds of its own without Docker: rootfs.sh DIRECTORY [cpu|cuda]. A wheel in a virtual environment, etcd and
# etcdctl of this machine, and the user. Python and the C library are those of this machine; the Dockerfile takes them from its base.
# `TWINPOOL_ROOTFS=DIRECTORY pytest tests/chart/test_processes.py` runs the chart's pods from it.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=${1:?usage: rootfs.sh DIRECTORY [cpu|cuda]}
variant=${2:-cpu}
lock=constraints$([ "$variant" = cpu ] || echo "-$variant").txt
[ ! -e "$root" ] || { echo "$root exists" >&2; exit 2; }
mkdir -p "$root"/{opt,usr/bin,etc,tmp,var/lib/etcd}
root=$(cd "$root" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/build"
pip() { "$work/build/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install -c constraints.txt scikit-build-core pybind11 ninja
# From a copy: a build in the source tree would leave its files there, and take what lies about there.
git ls-files -z --cached --others --exclude-standard | xargs -0 tar -c | tar -x -C "$work" --one-top-level=source
pip wheel --no-deps --no-build-isolation -w "$work/wheels" "$work/source"
sh deploy/docker/venv.sh "$work"/wheels/twinpool-*.whl "$root/opt/twinpool" "$lock" "$variant"

"$root/opt/twinpool/bin/python" -B -m scripts.sbom --prefix "$root/opt/twinpool" --lock "$lock" --kind container \
  -o "$root/opt/twinpool/sbom.cdx.json"

for binary in etcd etcdctl; do
  cp -L "$(command -v $binary)" "$root/usr/bin/$binary"
done
echo 'twinpool:x:10001:10001::/tmp:/usr/sbin/nologin' >"$root/etc/passwd"
echo 'twinpool:x:10001:' >"$root/etc/group"
du -sh "$root"
