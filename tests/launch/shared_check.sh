#!/usr/bin/env bash
# usage: shared_check.sh golden LOCKSTEP CASES RANKS | tokenizers LOCKSTEP
# Compares with reference data that lies outside the project: $LOCKSTEP_SHARED, or the folder `shared` beside the checkout.
# Exit 77 (skipped) where there is none.
set -euo pipefail
shared=${LOCKSTEP_SHARED:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/shared}
need() { [ -e "$shared/$1" ] || { echo "skipped: no $1 in $shared (set LOCKSTEP_SHARED)"; exit 77; }; }
case $1 in
  golden)
    need tools/golden_check.py; need golden
    exec python3 "$shared/tools/golden_check.py" "$2" "$shared/golden" --cases "$3" --ranks "$4" ;;
  tokenizers)
    need tools/tokenizer_check.py; need tokenizers
    exec python3 "$shared/tools/tokenizer_check.py" "$2" "$shared/tokenizers" ;;
  *) echo "shared_check.sh: unknown check $1" >&2; exit 2 ;;
esac
