#!/bin/sh
# Makes the virtual environment of the image: venv.sh WHEEL PREFIX CONSTRAINTS VARIANT, where VARIANT is cpu or cuda. CONSTRAINTS is
# constraints.txt for the one and constraints-cuda.txt for the other.
# TORCH_INDEX names the package index of torch, if the variant's own is not to be had.
set -eu
wheel=$1 prefix=$2 constraints=$3 variant=$4
case $variant in
  cpu) index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu} extra=worker ;;
  cuda) index=${TORCH_INDEX-} extra=cuda ;; # the usual index has CUDA builds, which bring NVIDIA's libraries as wheels
  *) echo "unknown variant $variant: cpu or cuda" >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$prefix"
pip() { "$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir -q "$@"; }
# torch first and pinned: as a dependency it would come from the usual index. An index of torch has not all versions of what it needs: the
# locked ones come with the rest.
pip install --no-compile ${index:+--index-url "$index"} "$(grep -E '^torch==' "$constraints")"
pip install --no-compile -c "$constraints" "$wheel[$extra,fast,tracing]"
"$prefix/bin/twinpool" version
# An index, or a directory of wheels that pip is told of, may have the other build under the same version.
found=$("$prefix/bin/python" -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')
[ "$found" = "$variant" ] || { echo "torch is the build for $found, not for $variant" >&2; exit 1; }
# What is in it, for whoever asks; nothing is installed into it any more.
"$prefix/bin/python" -m pip --disable-pip-version-check list --format freeze | grep -v '^pip==' | sort >"$prefix/installed.txt"
test -s "$prefix/installed.txt"
pip uninstall -y pip
# Compiled by content: otherwise the time of the build is in each file. Some packages have templates that are no Python.
find "$prefix" -name '*.pyc' -delete
"$prefix/bin/python" -B -m compileall -f -q -j 0 --invalidation-mode unchecked-hash "$prefix/lib" >/dev/null || true
