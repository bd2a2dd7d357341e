#!/usr/bin/env bash
# usage: sanitizers.sh asan|tsan [CTEST OPTION...]        for instance: sanitizers.sh asan -R checkpoint
#
# Builds the tests with a sanitizer (asan: addresses and undefined behaviour; tsan: data races) and runs them, those of several
# ranks too. Takes far longer than tests/run.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=${1:-}
case $preset in
  asan | tsan) shift ;;
  *) echo "usage: sanitizers.sh asan|tsan [CTEST OPTION...]" >&2; exit 2 ;;
esac
export LOCKSTEP_SHARED=${LOCKSTEP_SHARED:-$(dirname "$PWD")/shared}
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake --preset "$preset" -DLOCKSTEP_BUILD_TESTS=ON "${launcher[@]}" >/dev/null
cmake --build --preset "$preset"
# Open MPI never frees some of its memory (detect_leaks). GCC 12 misaligns AVX-512 variables under detect_stack_use_after_return.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp:second_deadlock_stack=1
exec ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -LE 'gpu|bench' "$@"
