#!/usr/bin/env bash
# usage: install_deps.sh [--tests] [--slurm] [--fuzz] [--pip]
#
# Installs the Debian packages that Lockstep is built from, those that are missing. With --tests also what the tests need, with
# --slurm and --fuzz what the test of the Slurm examples and the fuzz targets need besides those, with --pip what fetching the quick
# start's model needs. Does nothing, in milliseconds, when all are there. Needs root or sudo only when something is missing.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache          # the build; ccache makes building again fast
  openmpi-bin libopenmpi-dev            # processes and what they say to each other
  libabsl-dev nlohmann-json3-dev        # base library, JSON
  libspdlog-dev libfmt-dev              # messages
  libpcre2-dev libutf8proc-dev          # tokenizers: regular expressions, Unicode normal forms
  libxxhash-dev                         # keys of cached prefixes
  libboost-dev                          # HTTP: the headers of Beast
)
for option in "$@"; do
  case $option in
    --tests) packages+=(libgtest-dev python3 clang-format-14 iproute2) ;;  # iproute2: two hosts in network namespaces
    --slurm) packages+=(slurmctld slurmd slurm-client munge) ;;  # a machine with systemd will start munge
    --fuzz) packages+=(clang-14 libclang-rt-14-dev) ;;  # 15 MB beside --tests
    --pip) packages+=(python3 python3-pip ca-certificates) ;;
    *) echo "install_deps.sh: unknown option $option (known: --tests, --slurm, --fuzz, --pip)" >&2; exit 2 ;;
  esac
done

fail() { echo "install_deps.sh: $*" >&2; exit 1; }

command -v dpkg-query >/dev/null || fail "this is no Debian-like system; install the counterparts of: ${packages[*]}"
# dpkg-query fails when it knows nothing of a package: that package is missing then.
installed=$(dpkg-query -W -f='${db:Status-Abbrev}${Package}\n' "${packages[@]}" 2>/dev/null | sed -n 's/^.i //p' | sort -u) || true
mapfile -t missing < <(comm -23 <(printf '%s\n' "${packages[@]}" | sort -u) <(printf '%s\n' "$installed"))
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || fail "missing packages: ${missing[*]}; run this as root, or install sudo"
  as_root=(sudo)
fi
echo "Installing Debian packages: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Quiet while it works; the whole output when it does not.
run() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1 </dev/null || {
    cat "$log" >&2
    fail "'$*' failed (see above)"
  }
}
run apt-get -q update
run apt-get -q -y --no-install-recommends install "${missing[@]}"
