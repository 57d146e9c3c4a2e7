#!/usr/bin/env bash
# Runs a release from an image that buildah has, as root: try_image.sh TAG. Each container of the chart's pods has the image's root file
# system, read-only, and hosts of their own in network namespaces (tests/pods).
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:?usage: try_image.sh TAG}
container=$(buildah from --pull-never "$tag")
trap 'buildah umount "$container" >/dev/null; buildah rm "$container" >/dev/null' EXIT
TWINPOOL_IMAGE_ROOT=$(buildah mount "$container") "${VENV:-.venv}/bin/python" -m pytest -q -rs tests/pods/test_image.py "${@:2}"
