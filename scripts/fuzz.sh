#!/usr/bin/env bash
# Fuzzes each target for so many seconds, starting from the stored corpus, then stores the smallest corpus that reaches as
# much. Usage: fuzz.sh SECONDS [TARGET...]; CXX names the clang to build with. Findings lie in build/fuzz/findings.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: fuzz.sh SECONDS [TARGET...]}
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(prefix router scheduler)
build=build/fuzz
sanitize=fuzzer-no-link,address,undefined
cmake -S . -B $build -DTWINPOOL_FUZZ=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTWINPOOL_SANITIZE=$sanitize \
  -DCMAKE_CXX_COMPILER="${CXX:-clang++}" -DCMAKE_CXX_FLAGS="-fno-sanitize-recover=undefined" >/dev/null
mkdir -p $build/findings
for target in "${targets[@]}"; do
  cmake --build $build -j 2 --target "fuzz_$target" >/dev/null
  corpus=$build/corpus/$target
  stored=csrc/fuzz/corpus/$target.hex
  rm -rf "$corpus" "$corpus.least"
  mkdir -p "$corpus" "$corpus.least"
  number=0
  if [ -f "$stored" ]; then
    while read -r line; do
      number=$((number + 1))
      printf "$(sed 's/../\\x&/g' <<<"$line")" >"$corpus/$number"
    done <"$stored"
  fi
  # An input is a session of calls: longer ones are slower and find little more.
  "$build/fuzz_$target" -max_total_time="$seconds" -max_len=512 -timeout=20 -print_final_stats=1 \
    -artifact_prefix="$build/findings/$target-" "$corpus" 2>"$build/$target.log" ||
    { tail -40 "$build/$target.log"; exit 1; }
  grep -E "^Done" "$build/$target.log" | sed "s/^/$target: /"
  "$build/fuzz_$target" -merge=1 -max_len=512 "$corpus.least" "$corpus" 2>>"$build/$target.log"
  for input in "$corpus.least"/*; do
    od -An -v -tx1 "$input" | tr -d ' \n'
    echo
  done | LC_ALL=C sort >"$stored"
done
