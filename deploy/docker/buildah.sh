#!/usr/bin/env bash
# Builds the image without Docker, as root: buildah.sh TAG [cpu|cuda] [MORE OPTIONS OF buildah build]. Without BASE in the environment it
# makes one by debootstrap: Debian 12 with its own Python 3.11, for machines that reach Debian's packages and no registry of images.
# TORCH_INDEX is that of the Dockerfile; options such as --volume tell pip of another index.
# `buildah mount` of a container of the image is a root file system for TWINPOOL_IMAGE_ROOT (docs/operations.md).
set -euo pipefail
cd "$(dirname "$0")/../.."
tag=${1:?usage: buildah.sh TAG [cpu|cuda] [options]}
variant=${2:-cpu}
export BUILDAH_ISOLATION=chroot

if [ -z "${BASE:-}" ]; then
  BASE=localhost/twinpool-base:bookworm
  if ! buildah inspect --type image "$BASE" >/dev/null 2>&1; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # Headers and pip are for the stages that build: python:3.11-slim has them, too.
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-dev,python3-pip,python3-venv bookworm "$work/root" \
      "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$work/log" || { tail -20 "$work/log" >&2; exit 1; }
    rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/usr/lib/python3*/EXTERNALLY-MANAGED
    made=$(buildah from scratch)
    buildah add -q "$made" "$work/root" /
    buildah commit -q --rm "$made" "$BASE"
  fi
fi
# The time of the last change, so that the same sources make the same image.
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
buildah build --layers --isolation chroot --format docker -f deploy/docker/Dockerfile -t "$tag" \
  --ignorefile deploy/docker/Dockerfile.dockerignore --build-arg "BASE=$BASE" --build-arg "VARIANT=$variant" \
  --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" ${TORCH_INDEX+--build-arg "TORCH_INDEX=$TORCH_INDEX"} "${@:3}" .
