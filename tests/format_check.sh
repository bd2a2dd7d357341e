#!/usr/bin/env bash
# Every C++ file that git tracks looks as clang-format 14 would lay it out. Mend with: clang-format-14 -i FILE
# Exit 77 (skipped) where clang-format-14 or git is not to be had: other versions lay out differently.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v clang-format-14 >/dev/null || { echo "skipped: no clang-format-14"; exit 77; }
git rev-parse --is-inside-work-tree >/dev/null 2>&1 || { echo "skipped: no git checkout"; exit 77; }
off=0
while IFS= read -r -d '' file; do
  clang-format-14 "$file" | cmp -s - "$file" || { echo "$file: not as clang-format-14 lays it out"; off=1; }
done < <(git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh')
exit $off
