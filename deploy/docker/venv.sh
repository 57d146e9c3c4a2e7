#!/bin/sh
# Makes the virtual environment of the image: venv.sh WHEEL PREFIX CONSTRAINTS VARIANT, where VARIANT is cpu or cuda.
# TORCH_INDEX names the package index of torch, if the variant's own is not to be had.
set -eu
wheel=$1 prefix=$2 constraints=$3 variant=$4
case $variant in
  cpu) index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu} ;;
  cuda) index=${TORCH_INDEX-} ;; # the usual index has CUDA builds, which pin CUDA's packages themselves
  *) echo "unknown variant $variant: cpu or cuda" >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$prefix"
pip() { "$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir -q "$@"; }
# torch first and pinned: as a dependency it would come from the usual index.
pip install ${index:+--index-url "$index"} "$(grep -E '^torch==' "$constraints")"
pip install -c "$constraints" "$wheel[worker,fast,tracing]"
"$prefix/bin/twinpool" version
