#!/usr/bin/env bash
# usage: lint.sh [FILE.cc...]        default: every C++ file that git tracks
#
# How the code should look: clang-format 14 (layout, all files) and clang-tidy (the short list in .clang-tidy) on the given sources.
# clang-tidy compiles each file again with its own front end: minutes for the whole tree. Needs a configured build/release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "lint.sh: $*" >&2; exit 2; }
command -v clang-tidy >/dev/null || fail "no clang-tidy: install the Debian packages clang-tidy and clang-format-14"
[ -f build/release/compile_commands.json ] || fail "no build/release/compile_commands.json: run cmake --preset release"

status=0
bash tests/format_check.sh || status=1
sources=("$@")
if [ ${#sources[@]} -eq 0 ]; then
  mapfile -t sources < <(git ls-files '*.cc')
fi
printf '%s\0' "${sources[@]}" | xargs -0 -P "$(nproc)" -n 1 clang-tidy --quiet --extra-arg=-Wno-unknown-warning-option -p build/release 2>/dev/null || status=1
exit $status
