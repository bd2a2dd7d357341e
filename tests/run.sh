#!/usr/bin/env bash
# usage: run.sh [CTEST OPTION...]        for instance: run.sh -R launch
#
# Every test of this machine: installs what is missing, builds the release preset with its tests, and runs them. Safe to run
# again: seconds when nothing changed, plus the tests themselves. LOCKSTEP_SHARED names a folder of reference data (golden
# checkpoints, real tokenizers); the tests that need it are skipped, and say so, where it is absent. The CUDA part is compiled where
# there is a toolkit (LOCKSTEP_CUDA=OFF in the environment leaves it out); its tests need GPUs and are run by tests/run_gpu.sh. With
# CI in the environment, warnings are errors, and a run of all tests ends with some seconds of fuzzing (tests/fuzz.sh). The tests of
# launch/slurm run where Slurm is installed; LOCKSTEP_REQUIRE_SLURM=1 installs it, and makes it an error where it does not start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS

step() { printf '\n== %s\n' "$*"; }
fail() { echo "tests/run.sh: $*" >&2; exit 1; }
quietly() {
  local what=$1 log; shift
  log=$(mktemp)
  "$@" >"$log" 2>&1 </dev/null || { cat "$log" >&2; rm -f "$log"; fail "$what failed (see above)"; }
  rm -f "$log"
}

export LOCKSTEP_SHARED=${LOCKSTEP_SHARED:-$(dirname "$PWD")/shared}

fuzz=()
[ -n "${CI:-}" ] && [ $# -eq 0 ] && fuzz=(--fuzz)
steps=$((3 + ${#fuzz[@]}))

step "1/$steps Packages"
bash launch/install_deps.sh --tests "${fuzz[@]}" ${LOCKSTEP_REQUIRE_SLURM:+--slurm}
echo "all there"

step "2/$steps Build (a few minutes the first time)"
# Another checkout of the same sources, as CI makes them, finds what this one has compiled.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
# Warnings are errors where CI says so only: a newer compiler of a user's may know warnings that ours does not.
werror=OFF
[ -n "${CI:-}" ] && werror=ON
quietly "configuring" cmake --preset release -DLOCKSTEP_BUILD_TESTS=ON -DLOCKSTEP_WERROR=$werror \
  -DLOCKSTEP_CUDA="${LOCKSTEP_CUDA:-AUTO}" "${launcher[@]}"
quietly "building" cmake --build --preset release
echo "$PWD/build/release"

step "3/$steps Tests (reference data: $([ -d "$LOCKSTEP_SHARED" ] && echo "$LOCKSTEP_SHARED" || echo "none at $LOCKSTEP_SHARED"))"
status=0
ctest --test-dir build/release -j "$(nproc)" --output-on-failure --no-tests=error -LE 'gpu|bench' "$@" </dev/null || status=$?
if [ ${#fuzz[@]} -gt 0 ]; then
  step "4/$steps Fuzzing"
  bash tests/fuzz.sh || status=$?
fi
echo "Total time of tests/run.sh: $((SECONDS - started)) s"
exit "$status"
