#!/usr/bin/env bash
# usage: fuzz.sh [SECONDS [TARGET...]]        for instance: fuzz.sh 300 gguf_fuzz
#
# Builds the fuzz targets of tests/fuzz with clang (launch/install_deps.sh --fuzz installs it) and runs each for SECONDS,
# default 12, as many at once as there are cores. What they learn is kept in build/fuzz/corpus, so that a later run goes on from
# there. An input that crashes, hangs, leaks or takes too much memory ends the run with its path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-12}
shift $(($# > 0 ? 1 : 0))
fail() { echo "tests/fuzz.sh: $*" >&2; exit 1; }
[[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "SECONDS is a number above 0, not $seconds"
command -v clang++-14 >/dev/null || fail "clang++-14 is not installed; bash launch/install_deps.sh --tests --fuzz installs it"

started=$SECONDS
build=build/fuzz log=$(mktemp)
trap 'rm -f "$log"' EXIT
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1  # as in tests/run.sh
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
{ cmake --preset fuzz "${launcher[@]}" && cmake --build --preset fuzz; } >"$log" 2>&1 </dev/null ||
  { cat "$log" >&2; fail "the build failed (see above)"; }
rm -rf $build/seeds $build/faults
$build/tests/fuzz/make_seeds $build/seeds
targets=("$@")
[ $# -gt 0 ] || targets=($(ls $build/seeds))
echo "built in $((SECONDS - started)) s"

# One target. Slow inputs count as faults: a reader's work must stay in proportion to what it reads.
run_target() {
  local target=$1 folder=build/fuzz
  [ -x "$folder/tests/fuzz/$target" ] || { echo "$target: no such target" >&2; return 1; }
  mkdir -p "$folder/corpus/$target" "$folder/faults"
  local log=$folder/$target.log
  if ! "$folder/tests/fuzz/$target" -max_total_time="$2" -timeout=10 -rss_limit_mb=2048 -max_len=16384 \
    -artifact_prefix="$folder/faults/$target-" "$folder/corpus/$target" "$folder/seeds/$target" >"$log" 2>&1 </dev/null; then
    grep -vE '^#[0-9]+\s+(NEW|REDUCE|RELOAD|pulse)' "$log" | tail -n 60 >&2
    local input
    input=$(find "$folder/faults" -name "$target-*" -print -quit)
    # As text, too: where this runs for CI, the file is gone afterwards.
    [ -z "$input" ] || [ "$(stat -c %s "$input")" -gt 8192 ] || { echo "base64 of the input:"; base64 "$input"; } >&2
    echo "$target FAILED; again: $folder/tests/fuzz/$target $input" >&2
    return 1
  fi
  echo "$target: $(sed -n 's/^Done \([0-9]*\) runs.*/\1 runs/p' "$log"), $(grep -o 'cov: [0-9]*' "$log" | tail -n 1)"
}
export -f run_target
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I TARGET bash -c "run_target TARGET $seconds" ||
  fail "a target failed (see above)"
