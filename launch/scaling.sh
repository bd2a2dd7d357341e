#!/usr/bin/env bash
# usage: scaling.sh MODEL --ranks N,N,... --out DIR [OPTION...] [-- ENGINE OPTION...]
#                                for instance: scaling.sh ./Llama --ranks 1,2,4 --out results -- --load-format dummy --device cuda
#
# How MODEL scales over ranks: runs the benchmarks and a few greedy answers on N ranks of this host, for each N, then
# `lockstep report DIR`. What is after -- goes to each of them: options of the engine, such as --dtype.
#
#   --ranks N,N,...       numbers of ranks; the smallest is the baseline
#   --out DIR             where results and the report go; made if need be
#   --emulate N,N,...     numbers of ranks of which the compute alone is measured, on one rank that does rank 0's share
#   --batch-sizes B,B,... requests at once, of bench latency (default 1,8)
#   --input-len TOKENS    of a prompt (default 128), and
#   --output-len TOKENS   of an answer (default 32)
#   --warmup N            batches that do not count (default 2), and
#   --repeats N           batches that count (default 10)
#   --num-prompts N       of bench throughput (default 64)
#   --prompts FILE        of the greedy answers, as `generate --prompts` reads them (default: four prompts of token ids)
#   --resume              keep the results that an earlier run with the same options has left in DIR, and run the rest
#   --force               DIR holds results: replace them
#
# A result appears under its name when it is whole. Exit status: 0; 2 refused before anything ran; 1 a run has failed (the others
# are kept, and the report is made of them). run.sh, beside this script, starts the ranks; LOCKSTEP names another binary.
set -euo pipefail
export LC_ALL=C
me=$(basename "$0")
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
run=$here/run.sh
[ -f "$run" ] || run=$here/lockstep-run
lockstep=${LOCKSTEP:-$here/lockstep}
[ -n "${LOCKSTEP:-}" ] || [ -x "$lockstep" ] || lockstep=$here/../build/release/lockstep
refuse() { echo "$me: $*" >&2; exit 2; }

model='' ranks='' emulate='' out='' batch_sizes=1,8 input_len=128 output_len=32 warmup=2 repeats=10 num_prompts=64 prompts='' resume='' force=''
engine=()
while [ $# -gt 0 ]; do
  case $1 in
    --help|-h) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    --resume) resume=1; shift ;;
    --force) force=1; shift ;;
    --) shift; engine=("$@"); break ;;
    --*)
      option=${1%%=*}
      if [ "$option" != "$1" ]; then value=${1#*=}; shift
      else
        [ $# -gt 1 ] || refuse "$1 needs a value; $me --help lists the options"
        value=$2; shift 2
      fi
      case $option in
        --ranks|--emulate|--out|--batch-sizes|--input-len|--output-len|--warmup|--repeats|--num-prompts|--prompts)
          [ -n "$value" ] || refuse "$option needs a value"
          name=${option#--}
          printf -v "${name//-/_}" %s "$value" ;;
        *) refuse "there is no option '$option'; options of the engine go after --, and $me --help lists the others" ;;
      esac ;;
    *)
      [ -z "$model" ] || refuse "one MODEL, not '$model' and '$1'"
      model=$1; shift ;;
  esac
done

# number OPTION VALUE LEAST [VALUE IT IS PART OF]
number() {
  [[ $2 =~ ^(0|[1-9][0-9]{0,6})$ ]] && [ "$2" -ge "$3" ] || refuse "$1 '${4-$2}': '$2' must be a whole number from $3 to 9999999"
}
# list OPTION VALUE: into the array `numbers`, ascending
list() {
  local one
  [[ $2 != *, && $2 != ,* ]] || refuse "$1 '$2': must be numbers with commas between them"
  IFS=, read -ra numbers <<<"$2"
  for one in "${numbers[@]}"; do number "$1" "$one" 1 "$2"; done
  mapfile -t numbers < <(printf '%s\n' "${numbers[@]}" | sort -n)
  one=$(printf '%s\n' "${numbers[@]}" | uniq -d | head -n 1)
  [ -z "$one" ] || refuse "$1 '$2': $one is there twice"
}
[ -n "$model" ] || refuse "no MODEL given; $me --help explains"
[ -n "$ranks" ] || refuse "no --ranks given, for instance --ranks 1,2,4"
[ -n "$out" ] || refuse "no --out given: the folder for results and report"
list --ranks "$ranks"; ranks=("${numbers[@]}")
emulated=()
[ -z "$emulate" ] || { list --emulate "$emulate"; emulated=("${numbers[@]}"); }
list --batch-sizes "$batch_sizes"; batch_sizes=("${numbers[@]}")
number --input-len "$input_len" 1
number --output-len "$output_len" 1
number --warmup "$warmup" 0
number --repeats "$repeats" 1
number --num-prompts "$num_prompts" 1
[ -z "$resume" ] || [ -z "$force" ] || refuse "--resume keeps results and --force replaces them: not both"
[ -z "$prompts" ] || [ -r "$prompts" ] || refuse "--prompts $prompts: cannot be read"
[ -x "$lockstep" ] || refuse "$lockstep is not built; bash launch/quickstart.sh builds it"
export LOCKSTEP=$lockstep

# Of the engine's options those that the plan takes, too; the others are checked by the first run.
plan_options=() device=auto threads=
for ((i = 0; i < ${#engine[@]}; ++i)); do
  word=${engine[i]} value=${engine[i + 1]:-}
  [[ $word != *=* ]] || value=${word#*=}
  case ${word%%=*} in
    --dtype|--kv-cache-dtype|--block-size) plan_options+=("${word%%=*}" "$value") ;;
    --device) device=$value ;;
    --threads) threads=$value ;;
    --json|--step-log|--emulate-tp|--rank) refuse "$word: is not for all runs alike; leave it out" ;;
  esac
done

# More ranks than query heads, or no model at all: the plan says so, with status 2.
largest=${ranks[-1]}
for n in "$largest" "${emulated[@]: -1}"; do
  "$lockstep" plan "$model" --tp "$n" "${plan_options[@]}" >/dev/null || exit 2
done
cores=$(nproc)
gpus=()
if names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) && [ -n "$names" ]; then
  mapfile -t gpus < <(tr -dc '\12\40-\176' <<<"$names")
fi
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  [ ${#visible[@]} -ge ${#gpus[@]} ] || gpus=("${gpus[@]:0:${#visible[@]}}")
fi
on_gpus=
[ "$device" = cpu ] || [ ${#gpus[@]} -eq 0 ] || "$lockstep" version | grep -q 'cuda: not' || on_gpus=1
if [ -n "$on_gpus" ] && [ "$largest" -gt ${#gpus[@]} ]; then
  refuse "--ranks $largest, but this host shows ${#gpus[@]} GPUs: each rank needs one of its own (--device cpu runs on cores)"
fi
if [ -z "$on_gpus" ] && [ "$largest" -gt "$cores" ]; then
  echo "$me: $largest ranks on $cores cores take turns: their times say nothing about more hardware" >&2
fi

# The breakdown and the sums are of ranks on CPUs alone.
has_profile=
# Not piped into grep -q, which would end the help early.
if [ -z "$on_gpus" ] && [[ $("$lockstep" bench latency --help) == *--profile* ]]; then has_profile=1; fi
# In the order in which they run: the baseline is whole before others begin.
files=() of_ranks=() commands=()
# plan_run FILE RANKS ARG...
plan_run() {
  files+=("$1") of_ranks+=("$2")
  commands+=("$(printf '%q ' "${@:3}")")
}
own_prompts=prompts.jsonl
for n in "${ranks[@]}"; do
  lengths=(--input-len "$input_len" --output-len "$output_len")
  latency=(bench latency "$model" --json "${lengths[@]}" --warmup "$warmup" --repeats "$repeats")
  for b in "${batch_sizes[@]}"; do
    plan_run "latency.n$n.b$b.json" "$n" "${latency[@]}" --batch-size "$b" "${engine[@]}"
    [ -z "$has_profile" ] || plan_run "profile.n$n.b$b.json" "$n" "${latency[@]}" --batch-size "$b" --profile "${engine[@]}"
  done
  plan_run "throughput.n$n.json" "$n" bench throughput "$model" --json --num-prompts "$num_prompts" "${lengths[@]}" "${engine[@]}"
  if [ -z "$on_gpus" ] && [ "$n" -gt 1 ]; then
    plan_run "collectives.n$n.json" "$n" bench collectives --json --device cpu
  fi
  plan_run "generate.n$n.jsonl" "$n" generate "$model" --prompts "${prompts:-$out/$own_prompts}" --json --logprobs 2 --temperature 0 \
    --generation-config none --ignore-eos --max-tokens 32 "${engine[@]}"
done

for n in "${emulated[@]}"; do
  cores_of_rank=()  # on CPUs those that it would have
  [ -n "$on_gpus$threads" ] || cores_of_rank=(--threads $((cores > n ? cores / n : 1)))
  for b in "${batch_sizes[@]}"; do
    plan_run "emulated.n$n.b$b.json" 1 "${latency[@]}" --batch-size "$b" --emulate-tp "$n" --rank 0 "${engine[@]}" "${cores_of_rank[@]}"
  done
done

# A JSON string; the bytes are printable ASCII after %q, or known.
json_string() {
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}
json_strings() {
  local one comma=
  printf '['
  for one in "$@"; do printf %s "$comma"; json_string "$one"; comma=', '; done
  printf ']'
}
printable() { tr -dc '\40-\176' <<<"$1"; }
# Equal for runs whose results may stand side by side.
settings=$(printf '%q ' "$model" "${batch_sizes[@]}" "$input_len" "$output_len" "$warmup" "$repeats" "$num_prompts" "$prompts" "${engine[@]}")
run_json() {
  local cpu memory all=() i
  cpu=$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -n 1)
  memory=$(awk '/^MemTotal:/ { printf "%.0f", $2 * 1024 }' /proc/meminfo)
  for i in "${!commands[@]}"; do all+=("lockstep-run -n ${of_ranks[i]} ${commands[i]% }"); done
  printf '{"model": %s,\n' "$(json_string "$(printf %q "$model")")"
  printf '"ranks": [%s],\n' "$(IFS=,; echo "${ranks[*]}")"
  printf '"date": "%s",\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
  printf '"engine_options": %s,\n' "$(json_strings "${quoted[@]}")"
  printf '"settings": %s,\n' "$(json_string "$settings")"
  printf '"machine": {"host": %s, "cpu": %s, "cores": %s, "memory_bytes": %s, "kernel": %s, "gpus": %s},\n' \
    "$(json_string "$(printable "$(uname -n)")")" "$(json_string "$(printable "$cpu")")" "$cores" "${memory:-0}" \
    "$(json_string "$(printable "$(uname -sr)")")" "$(json_strings "${gpus[@]}")"
  printf '"version": %s,\n' "$("$lockstep" version --json)"
  printf '"commands": %s}\n' "$(json_strings "${all[@]}")"
}
quoted=()
for word in "${engine[@]}"; do quoted+=("$(printf %q "$word")"); done

# Nothing is written before this line.
results=(run.json plan.json "$own_prompts" report.json report.csv report.html)
if [ -e "$out" ]; then
  [ -d "$out" ] || refuse "--out $out: is no folder"
  if [ -n "$(ls -A -- "$out")" ]; then
    [ -n "$resume$force" ] || refuse "--out $out: is not empty; --resume goes on from its results, --force replaces them"
    if [ -n "$resume" ]; then
      [ -f "$out/run.json" ] || refuse "--resume: $out has no run.json of an earlier run"
      grep -qxF -- "\"settings\": $(json_string "$settings")," "$out/run.json" ||
        refuse "--resume: the results in $out are of other options ($(sed -n 's/^"settings": \(.*\),$/\1/p' "$out/run.json"))"
    else
      for name in "${results[@]}"; do rm -f -- "$out/$name"; done
      find "$out" -maxdepth 1 -type f -regextype posix-extended \
        -regex '.*/(latency|emulated|profile|throughput|collectives|generate)\.n[0-9]+(\.b[0-9]+)?\.jsonl?(\.log)?' -delete
    fi
  fi
else
  mkdir -p -- "$out" || refuse "--out $out: cannot be made"
fi
[ -w "$out" ] || refuse "--out $out: cannot be written to"

unfinished=$out/.unfinished.$$
trap 'rm -f -- "$unfinished"' EXIT
# write NAME COMMAND...: the command's output, when it is whole
write() {
  local name=$1
  shift
  "$@" >"$unfinished" || return $?
  mv -f -- "$unfinished" "$out/$name"
}
write run.json run_json
write plan.json "$lockstep" plan "$model" --json "${plan_options[@]}"
# Ids that any vocabulary has.
prompt_lines() {
  local length
  for length in 4 9 17 40; do
    printf '{"prompt": [%s]}\n' "$(seq -s, "$length" $((length % 5 + 1)) $((length + (length - 1) * (length % 5 + 1))))"
  done
}
write "$own_prompts" prompt_lines

failed=() first=1
for i in "${!files[@]}"; do
  file=${files[i]} n=${of_ranks[i]}
  [ -z "$resume" ] || [ ! -s "$out/$file" ] || { first=; continue; }
  echo "$me: $n rank(s): ${commands[i]}" >&2
  eval "args=(${commands[i]})"
  status=0
  write "$file" bash "$run" -n "$n" "${args[@]}" 2>"$out/$file.log" || status=$?
  if [ "$status" -eq 0 ]; then
    rm -f -- "$out/$file.log"
    first=
    continue
  fi
  tail -n 5 -- "$out/$file.log" >&2
  # The first run refuses what is wrong with the options: nothing is there yet.
  if [ -n "$first" ] && [ "$status" -eq 2 ]; then
    rm -f -- "$unfinished" "$out/$file.log" "$out/run.json" "$out/plan.json" "$out/$own_prompts"
    rmdir -- "$out" 2>/dev/null || true
    exit 2
  fi
  first=
  echo "$me: $n rank(s): $file has failed with status $status; $out/$file.log has its messages" >&2
  [[ $file != emulated.* ]] || n="1, for an emulated N"
  failed+=("N = $n: $file")
done

"$lockstep" report "$out" || exit 1
if [ ${#failed[@]} -gt 0 ]; then
  printf "$me: failed: %s\n" "${failed[@]}" >&2
  exit 1
fi
