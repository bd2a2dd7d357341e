#!/usr/bin/env bash
# usage: run_gpu.sh [CMAKE OPTION...]
#
# The tests that need GPUs, on a host that has one or more: builds with CUDA into build/gpu, runs the tests of one GPU and, where
# there are two, those of two, then the golden checkpoints (LOCKSTEP_SHARED names their folder) on 1 and 2 GPUs, and prints a
# summary. Exit status 1 when anything failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS
summary=()
failed=0

note() {  # note NAME STATUS
  summary+=("$(printf '%-44s %s' "$1" "$([ "$2" -eq 0 ] && echo ok || echo "FAILED ($2)")")")
  [ "$2" -eq 0 ] || failed=1
}

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" -ge 1 ] || { echo "run_gpu.sh: nvidia-smi shows no GPU on this host" >&2; exit 2; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_CUDA=ON "$@" >build_gpu.log 2>&1 &&
  cmake --build build/gpu >>build_gpu.log 2>&1
status=$?
note "build ($((SECONDS - started)) s)" $status
if [ $status -ne 0 ]; then
  tail -n 60 build_gpu.log
  exit 1
fi
rm -f build_gpu.log

ctest --test-dir build/gpu -L gpu1 --output-on-failure --no-tests=error </dev/null
note "tests of one GPU" $?
if [ "$gpus" -ge 2 ]; then
  ctest --test-dir build/gpu -L gpu2 --output-on-failure --no-tests=error </dev/null
  note "tests of two GPUs" $?
fi

golden=${LOCKSTEP_SHARED:-../shared}/golden
check=${LOCKSTEP_SHARED:-../shared}/tools/golden_check.py
if [ -d "$golden" ] && [ -f "$check" ]; then
  ranks=1; [ "$gpus" -ge 2 ] && ranks=1,2
  cases=$(cd "$golden" && ls -d llama* qwen2* qwen3* mistral* | paste -sd,)
  python3 "$check" build/gpu/lockstep "$golden" --cases "$cases" --ranks $ranks --extra "--device cuda --dtype float32"
  note "golden checkpoints, float32, $ranks GPUs" $?
  python3 "$check" build/gpu/lockstep "$golden" --cases "$cases" --ranks $ranks --tolerance 0.15 \
    --extra "--device cuda --dtype bfloat16"
  note "golden checkpoints, bfloat16, $ranks GPUs" $?
else
  summary+=("golden checkpoints: skipped, no $golden")
fi

printf '\n== summary (%d GPUs, %d s)\n' "$gpus" $((SECONDS - started))
printf '%s\n' "${summary[@]}"
exit $failed
