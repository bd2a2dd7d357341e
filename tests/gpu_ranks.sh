#!/usr/bin/env bash
# usage: gpu_ranks.sh LOCKSTEP
#
# Which ranks get which GPU, and what happens where that cannot work, on a host with one GPU or more: exit status, time and text of
# each case. The last one kills a rank. Exit status 1 when a case is off.
set -uo pipefail
lockstep=$(readlink -f "$1")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" -ge 1 ] || { echo "gpu_ranks.sh: nvidia-smi shows no GPU on this host" >&2; exit 2; }
failed=0

# Each rank may get an environment of its own: RANK0=..., RANK1=... are put before the command of that rank.
cat >"$work/rank" <<'RANK'
#!/usr/bin/env bash
rank=${OMPI_COMM_WORLD_RANK:-0}
echo $$ >"$WORK/pid$rank"
own=RANK$rank
[ -n "${!own+set}" ] && export CUDA_VISIBLE_DEVICES=${!own}
exec "$REAL_LOCKSTEP" "$@"
RANK
chmod +x "$work/rank"
export WORK=$work REAL_LOCKSTEP=$lockstep LOCKSTEP=$work/rank

tiny=("$root/tests/data/tiny-llama" --load-format dummy)
golden=${LOCKSTEP_SHARED:-$root/../shared}/golden/llama-gqa
[ -f "$golden/config.json" ] && tiny=("$golden")
greedy=(generate "${tiny[@]}" --dtype float32 --ids 1,2,3 --max-tokens 8 --temperature 0 --ignore-eos --json
  --kv-cache-memory 16M --max-num-seqs 4)

# check NAME STATUS SECONDS TEXT [VARIABLE=VALUE...] RANKS DEVICE: the run ends so, in that time at most, and TEXT is on stderr. A
# refusal is told once.
check() {
  local name=$1 status=$2 limit=$3 text=$4 environment=() got seconds from=$EPOCHREALTIME why=
  shift 4
  while [ $# -gt 2 ]; do environment+=("$1"); shift; done
  env "${environment[@]}" timeout -k 5 60 bash "$root/launch/run.sh" -n "$1" "${greedy[@]}" --device "$2" \
    >"$work/out" 2>"$work/err" </dev/null
  got=$?
  seconds=$(awk -v a="$from" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  [ $got -eq "$status" ] || why="exit status $got, expected $status"
  awk -v a="$seconds" -v b="$limit" 'BEGIN { exit !(a > b) }' && why="$why, took $seconds s, allowed $limit s"
  grep -qF -- "$text" "$work/err" || why="$why, no '$text' on stderr"
  [ "$status" -eq 2 ] && [ "$(grep -c 'lockstep error' "$work/err")" -ne 1 ] && why="$why, not told once"
  if [ -z "$why" ]; then
    printf 'ok    %5s s  %s\n' "$seconds" "$name"
  else
    printf 'OFF   %5s s  %s: %s\n' "$seconds" "$name" "${why#, }"
    sed 's/^/        /' "$work/err" | head -n 12
    failed=1
  fi
}
same_ids() {  # what was just printed equals the first case's
  cmp -s "$work/out" "$work/expected" && return
  echo "OFF            other ids than one GPU's: $(cat "$work/out")"
  failed=1
}

one_gpu="each rank needs a GPU of its own"
check "1 rank, 1 GPU" 0 10 "ready in" 1 cuda
cp "$work/out" "$work/expected"
check "1 rank, --device auto" 0 10 "ready in" 1 auto
same_ids
check "1 rank, --device cpu" 0 10 "ready in" 1 cpu
same_ids
check "$((gpus + 1)) ranks, $gpus GPUs" 2 10 "$one_gpu" $((gpus + 1)) cuda
check "2 ranks that see the same GPU" 2 10 "$one_gpu" RANK0=0 RANK1=0 2 cuda
check "CUDA_VISIBLE_DEVICES empty" 2 10 "no GPU is visible" RANK0= RANK1= 2 cuda
check "CUDA_VISIBLE_DEVICES=0,0" 2 10 "GPU" RANK0=0,0 RANK1=0,0 2 cuda
check "one rank without a GPU" 2 10 "rank 1" RANK0=0 RANK1= 2 cuda
check "one rank without a GPU, --device auto" 0 15 "device: cpu, because of rank 1" RANK0=0 RANK1= 2 auto
same_ids

if [ "$gpus" -ge 2 ]; then
  mapfile -t uuids < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
  check "2 ranks, 2 GPUs" 0 15 "free before it, by rank" 2 cuda
  same_ids
  check "2 ranks, each shown its own GPU" 0 15 "ready in" RANK0=0 RANK1=1 2 cuda
  same_ids
  check "2 ranks, each shown its own GPU, by UUID" 0 15 "ready in" RANK0="${uuids[1]}" RANK1="${uuids[0]}" 2 cuda
  same_ids
  check "2 ranks, GPUs in another order" 0 15 "ready in" RANK0=1,0 RANK1=1,0 2 cuda
  same_ids
  check "2 ranks that both see the second GPU alone" 2 10 "$one_gpu" RANK0=1 RANK1=1 2 cuda
  check "NCCL finds no network" 1 30 "/dev/shm has" NCCL_SOCKET_IFNAME==nosuchcard 2 cuda
  grep -F 'lockstep error' "$work/err" | sed 's/^/        /'

  # A rank that is killed takes the job with it.
  for line in $(seq 20000); do echo '{"prompt": [1, 2, 3], "max_tokens": 40}'; done >"$work/prompts"
  bash "$root/launch/run.sh" -n 2 generate "${tiny[@]}" --prompts "$work/prompts" --temperature 0 --ignore-eos --json \
    --kv-cache-memory 16M --max-num-seqs 4 --device cuda --step-log "$work/steps" >"$work/out" 2>"$work/err" </dev/null &
  job=$!
  for _ in $(seq 200); do [ "$(wc -l <"$work/out")" -ge 5 ] && break; sleep 0.1; done
  from=$EPOCHREALTIME
  kill -9 "$(cat "$work/pid1")"
  wait $job
  status=$?
  seconds=$(awk -v a="$from" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  left=$(for rank in 0 1; do ps -o stat= -p "$(cat "$work/pid$rank")"; done | grep -vc '^Z')
  if [ $status -ne 0 ] && [ "$left" -eq 0 ] && awk -v s="$seconds" 'BEGIN { exit !(s < 10) }' &&
    [ "$(wc -l <"$work/out")" -ge 5 ]; then
    printf 'ok    %5s s  a killed rank ends the job (exit status %d)\n' "$seconds" $status
  else
    printf 'OFF   %5s s  a killed rank: exit status %d, %d processes left, %d answers before\n' "$seconds" $status "$left" \
      "$(wc -l <"$work/out")"
    sed 's/^/        /' "$work/err" | tail -n 12
    failed=1
  fi
else
  echo "skipped: cases of two GPUs"
fi
exit $failed
