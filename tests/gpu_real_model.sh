#!/usr/bin/env bash
# usage: gpu_real_model.sh LOCKSTEP MODEL [OPTION...]        for instance: gpu_real_model.sh build/gpu/lockstep SmolLM2-135M.gguf
#
# Whether a model (a folder or a .gguf file) answers on GPUs what it answers on the CPU: greedy ids of some prompts in float32, on
# the CPU at 1 and 2 ranks and on 1, 2, 4 and 8 GPUs, as far as this host has them. Prompts are texts where MODEL has a tokenizer,
# else ids. OPTIONs go to every `lockstep generate` (--load-format dummy, say). Prints a table; exit status 1 when an id differs or
# a run fails, 2 when the first run, with which all are compared, does not work.
set -uo pipefail
[ $# -ge 2 ] || { echo "usage: gpu_real_model.sh LOCKSTEP MODEL [OPTION...]" >&2; exit 2; }
lockstep=$(readlink -f "$1")
model=$2
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
max_tokens=48
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')

# A sentence and less, code, another script, and one of several hundred tokens.
if [ -f "$model" ] || [ -f "$model/tokenizer.json" ]; then
  long=$(for i in $(seq 40); do printf 'Line %d of the list holds the number %d. ' "$i" $((i * i)); done)
  cat >"$work/prompts" <<PROMPTS
{"prompt": "The three primary colours are"}
{"prompt": "Once"}
{"prompt": "def fibonacci(n):\n    "}
{"prompt": "Die Hauptstadt von Frankreich heißt"}
{"prompt": "Water boils at 100 degrees because"}
{"prompt": "$long"}
PROMPTS
else
  cat >"$work/prompts" <<PROMPTS
{"prompt": [1, 2, 3, 4, 5]}
{"prompt": [7]}
{"prompt": [20, 10, 20, 10, 20, 10, 20, 10]}
{"prompt": [$(seq -s ', ' 3 17 90)]}
{"prompt": [$(for i in $(seq 600); do printf '%d, ' $((i * i % 97)); done) 5]}
PROMPTS
fi

generate() {  # generate DEVICE RANKS OPTION...
  local device=$1 ranks=$2; shift 2
  LOCKSTEP=$lockstep bash "$root/launch/run.sh" -n "$ranks" generate "$model" --prompts "$work/prompts" --device "$device" \
    --dtype float32 --temperature 0 --generation-config none --ignore-eos --max-tokens $max_tokens --kv-cache-memory 512M \
    --max-num-seqs 8 --max-model-len 1024 --json --log-level error "$@" </dev/null
}
row() { printf '%-6s %5s  %8s  %s\n' "$@"; }

# Where two runs first differ, in words; nothing where they do not.
difference() {  # difference EXPECTED GOT
  [ "$(wc -l <"$1")" = "$(wc -l <"$2")" ] || { echo "$(wc -l <"$2") answers, not $(wc -l <"$1")"; return; }
  paste -d '|' "$1" "$2" | awk -F '|' '{
    expected_count = split($1, expected, ","); got_count = split($2, got, ",")
    for (i = 1; i <= expected_count || i <= got_count; ++i) {
      if (expected[i] == got[i]) continue
      printf "prompt %d, token %d: id %s, not %s\n", NR, i, got[i] == "" ? "none" : got[i], expected[i] == "" ? "none" : expected[i]
      exit
    }
  }'
}

failed=0
row device ranks seconds "ids of $(wc -l <"$work/prompts") prompts, $max_tokens each"
measure() {  # measure DEVICE RANKS OPTION...
  local from=$EPOCHREALTIME seconds verdict
  generate "$@" >"$work/out" 2>"$work/err"
  local status=$?
  seconds=$(awk -v a="$from" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  sed -n 's/.*"token_ids":\[\([0-9,]*\)\].*/\1/p' "$work/out" >"$work/ids"
  if [ $status -eq 0 ] && [ ! -f "$work/expected" ]; then
    # Answers that are all there and not all alike: else equality would say nothing.
    [ "$(wc -l <"$work/ids")" -eq "$(wc -l <"$work/prompts")" ] && [ "$(sort -u "$work/ids" | wc -l)" -gt 1 ] || status=1
    [ "$(tr ',' '\n' <"$work/ids" | wc -l)" -eq $(($(wc -l <"$work/prompts") * max_tokens)) ] || status=1
    [ $status -eq 0 ] && cp "$work/ids" "$work/expected" && verdict="the others must equal these"
  elif [ $status -eq 0 ]; then
    verdict=$(difference "$work/expected" "$work/ids")
    if [ -z "$verdict" ]; then verdict=equal; else verdict="DIFFER: $verdict"; failed=1; fi
  fi
  if [ $status -ne 0 ]; then
    failed=1
    verdict="FAILED (exit status $status)"
  fi
  row "$1" "$2" "$seconds" "$verdict"
  [ $status -eq 0 ] || tail -n 5 "$work/err" | sed 's/^/        /'
  return $status
}

measure cpu 1 "$@" || exit 2
measure cpu 2 "$@"
for ranks in 1 2 4 8; do
  if [ $ranks -le "$gpus" ]; then
    measure cuda $ranks "$@"
  elif [ $ranks -le 2 ]; then
    row cuda $ranks - "skipped: this host has $gpus GPU$([ "$gpus" -eq 1 ] || echo s)"
  fi
done
exit $failed
