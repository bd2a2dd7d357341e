#!/usr/bin/env bash
# usage: run_gpu.sh [PART...] [-- CMAKE OPTION...]
#
# The tests that need GPUs, on a host that has one or more: builds with CUDA into build/gpu, runs the parts and prints a summary with
# the seconds of each. Exit status 1 when anything failed.
#   tests     CTest's labels gpu1 and, where there are two GPUs, gpu2: kernels, collectives, and the whole engine on the reference
#             checkpoints (float32 and bfloat16, 1 and 2 GPUs) and on random request mixes
#   ranks     who gets which GPU, and what is said where that cannot work (gpu_ranks.sh)
#   golden    the program itself on some reference checkpoints, and against the CPU (gpu_real_model.sh) in the shape of SmolLM2-135M and
#             on the model itself where it is there
#   sanitize  compute-sanitizer on attention, on the kernels of a step and on the sum over ranks: minutes
# Without PART: tests, ranks and golden. LOCKSTEP_SHARED names the folder of reference data (default: `shared` beside the checkout);
# SMOLLM2 a SmolLM2-135M-Instruct folder or file (default: where the quick start puts it).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS
summary=()
failed=0
parts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    tests | ranks | golden | sanitize) parts+=("$1") ;;
    *) echo "run_gpu.sh: unknown part $1 (known: tests, ranks, golden, sanitize)" >&2; exit 2 ;;
  esac
  shift
done
[ "${1:-}" = -- ] && shift
[ ${#parts[@]} -gt 0 ] || parts=(tests ranks golden)
export LOCKSTEP_SHARED=${LOCKSTEP_SHARED:-$(dirname "$PWD")/shared}
build=build/gpu

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" -ge 1 ] || { echo "run_gpu.sh: nvidia-smi shows no GPU on this host" >&2; exit 2; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

note() {  # note NAME STATUS SECONDS
  summary+=("$(printf '%-56s %6s s  %s' "$1" "$3" "$([ "$2" -eq 0 ] && echo ok || echo "FAILED ($2)")")")
  [ "$2" -eq 0 ] || failed=1
}
skip() { summary+=("$(printf '%-56s %6s    skipped: %s' "$1" "" "$2")"); }
timed() {  # timed NAME COMMAND...
  local name=$1 from=$EPOCHREALTIME status
  shift
  printf '\n== %s\n' "$name"
  "$@" </dev/null
  status=$?
  note "$name" $status "$(awk -v a="$from" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')"
  return $status
}

launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
build_all() {
  local log status
  log=$(mktemp)
  { cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_CUDA=ON "${launcher[@]}" "$@" &&
    cmake --build $build; } >"$log" 2>&1
  status=$?
  [ $status -eq 0 ] || tail -n 60 "$log"
  rm -f "$log"
  return $status
}
timed "build" build_all "$@" || { printf '%s\n' "${summary[@]}"; exit 1; }

# The engine's test prints what it measured: not through ctest, which hides that.
run_tests() {
  local ranks
  for ranks in 1 2; do
    [ $ranks -le "$gpus" ] || { skip "tests of $ranks GPUs" "this host has $gpus"; continue; }
    timed "tests of $ranks GPUs: parts" ctest --test-dir $build -L "gpu$ranks" -E cuda_engine_mp_test --output-on-failure \
      --no-tests=error -j "$(nproc)"
    timed "tests of $ranks GPUs: engine, reference checkpoints" tests/mpirun.sh $ranks $build/tests/runtime/cuda_engine_mp_test
  done
}

run_ranks() { timed "ranks and GPUs" bash tests/gpu_ranks.sh $build/lockstep; }

run_golden() {
  local check=$LOCKSTEP_SHARED/tools/golden_check.py ranks=1 smollm2
  [ "$gpus" -ge 2 ] && ranks=1,2
  if [ -d "$LOCKSTEP_SHARED/golden" ] && [ -f "$check" ]; then
    timed "reference checkpoints by the program, float32" python3 "$check" $build/lockstep "$LOCKSTEP_SHARED/golden" \
      --cases llama-9heads,mistral-window --ranks $ranks --chunks 7 \
      --extra "--device cuda --dtype float32 --kv-cache-memory 64M --max-num-seqs 8"
  else
    skip "reference checkpoints by the program" "no golden and tools/golden_check.py in $LOCKSTEP_SHARED"
  fi
  if [ -d "$LOCKSTEP_SHARED/configs/SmolLM2-135M" ]; then
    timed "dummy weights of SmolLM2-135M: the CPU's ids" bash tests/gpu_real_model.sh $build/lockstep \
      "$LOCKSTEP_SHARED/configs/SmolLM2-135M" --load-format dummy
  else
    skip "dummy weights of SmolLM2-135M" "no configs/SmolLM2-135M in $LOCKSTEP_SHARED"
  fi
  smollm2=${SMOLLM2:-$(ls -d "${XDG_CACHE_HOME:-$HOME/.cache}"/lockstep/SmolLM2-135M-Instruct/*.gguf 2>/dev/null | head -n 1)}
  if [ -e "$smollm2" ]; then
    timed "SmolLM2-135M-Instruct: the CPU's ids" bash tests/gpu_real_model.sh $build/lockstep "$smollm2"
  else
    skip "SmolLM2-135M-Instruct" "not there (bash launch/quickstart.sh fetches it; SMOLLM2 names it)"
  fi
}

# compute-sanitizer slows kernels down tens of times: a few cases of each kernel.
sanitized() {  # sanitized TOOL PROGRAM FILTER [LAUNCHER...]
  local tool=$1 program=$2 filter=$3
  shift 3
  timed "$tool: $program ${filter:0:24}" timeout 300 "$@" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
    $build/tests/"$program" --gtest_filter="$filter"
}
run_sanitize() {
  command -v compute-sanitizer >/dev/null || PATH=$PATH:/usr/local/cuda/bin
  command -v compute-sanitizer >/dev/null || { skip "sanitize" "no compute-sanitizer"; return; }
  local tool
  for tool in memcheck racecheck; do
    sanitized $tool attention/cuda_attention_test \
      '*PaddingRows*:*AnEmptyBatch*:*InvisibleNan*:*FusedRows*:*LogitSoftcap*:*WriteKv*'
    sanitized $tool model/cuda_model_test '*RmsNorm*:*SiluMul*:*GatherRows*:*RopeTest*/bfloat16_to_bfloat16*'
    sanitized $tool model/cuda_model_test 'RowStepTest.TakesOddHeadsWindowsAndCaps'
  done
  sanitized memcheck model/cuda_weights_test '*'
  sanitized memcheck model/cuda_sum_mp_test '*MatchesSumsOnTheHost*' tests/mpirun.sh 1
}

for part in "${parts[@]}"; do "run_$part"; done

printf '\n== summary (%d GPUs, %d s)\n' "$gpus" $((SECONDS - started))
printf '%s\n' "${summary[@]}"
exit $failed
