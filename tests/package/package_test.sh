#!/usr/bin/env bash
# usage: package_test.sh BUILD_FOLDER WORK_FOLDER
#
# Installs the build, moves what was installed elsewhere, builds the example project against it and runs it on one rank and on
# two. WORK_FOLDER is emptied first.
set -euo pipefail
build=$1 work=$2
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
model=$source/tests/data/tiny-llama
fail() { echo "package_test: $*" >&2; exit 1; }
# Quiet while it works.
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "'$*' failed"; }; }

rm -rf "$work"
mkdir -p "$work"
quietly cmake --install "$build" --prefix "$work/installed"
mv "$work/installed" "$work/prefix"  # it must not matter where the package lies
if grep -rqF --include='*.cmake' -e "$source" -e "$build" "$work/prefix"; then fail "the package names the source or build folder"; fi

# Warnings that Lockstep does not compile with must not come from its headers.
quietly cmake -S "$source/tests/package" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CXX_FLAGS="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror" -DCHECK_HEADERS="$work/prefix/include/lockstep"
quietly cmake --build "$work/build"

"$work/build/example" --dummy "$model" >"$work/one"
"$source/tests/mpirun.sh" 2 "$work/build/example" --dummy "$model" >"$work/two"
cat "$work/one"
diff "$work/one" "$work/two" || fail "two ranks answer otherwise than one"
grep -qxE 'first request: length:( [0-9]+){8}' "$work/one" || fail "the first answer is not 8 tokens long"
grep -qx 'second request: cancelled' "$work/one" || fail "the second request was not cancelled"

"$work/prefix/bin/lockstep" version >/dev/null
"$work/prefix/bin/lockstep-run" -n 2 generate "$model" --load-format dummy --dtype float32 --ids 1,2,3 --max-tokens 8 \
  --temperature 0 --ignore-eos --json >"$work/json" 2>"$work/log" || { cat "$work/log" >&2; fail "the installed command failed"; }
ids=$(sed -n 's/^first request: length: //p' "$work/one")
grep -qF "[${ids// /,}]" <(tr -d ' ' <"$work/json") || fail "the installed command answers otherwise: $(cat "$work/json")"
