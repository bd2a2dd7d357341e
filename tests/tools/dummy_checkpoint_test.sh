#!/usr/bin/env bash
# usage: dummy_checkpoint_test.sh WRITE_DUMMY_CHECKPOINT LOCKSTEP WORK_FOLDER
# What is read from a written checkpoint is what dummy weights give, at one rank and at two. WORK_FOLDER is emptied first.
set -euo pipefail
write=$1 work=$3
export LOCKSTEP=$2 CUDA_VISIBLE_DEVICES=""
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
model=$source/tests/data/tiny-llama
ids() {  # ids RANKS MODEL OPTION...
  local ranks=$1 of=$2; shift 2
  bash "$source/launch/run.sh" -n "$ranks" generate "$of" --ids 1,2,3 --max-tokens 12 --temperature 0 --ignore-eos --json \
    --log-level error "$@"
}
rm -rf "$work"
mkdir -p "$work"
for dtype in float32 bfloat16; do
  "$write" "$model" "$work/$dtype" "$dtype" 3 2
  expected=$(ids 1 "$model" --load-format dummy --dtype "$dtype")
  for ranks in 1 2; do
    got=$(ids "$ranks" "$work/$dtype" --dtype "$dtype")
    [ "$ranks" -gt 1 ] && [ "$dtype" = bfloat16 ] && continue  # rounded sums differ with the number of ranks
    [ "$got" = "$expected" ] || { echo "$dtype, $ranks ranks: $got, but dummy weights give $expected" >&2; exit 1; }
  done
done
rm -rf "$work"
