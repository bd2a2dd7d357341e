#!/usr/bin/env bash
# usage: run.sh [-n RANKS] COMMAND ARG...        for instance: run.sh -n 2 generate model.gguf --prompt Hello
#
# Runs `lockstep COMMAND ARG...` on RANKS processes (default 1) of this host, with the settings of Open MPI that suit it:
# allowed as root, as many ranks as wanted, threads not pinned to one core, waiting ranks leave their core to others, and no
# banner of mpirun after a message of lockstep's own. Runs the lockstep that lies beside this script, as `cmake --install` puts
# it (there the script is called lockstep-run), or else build/release/lockstep; LOCKSTEP names another binary.
#
# A server or a batch job is stopped by SIGTERM to this script, or Ctrl-C: it goes to the ranks as SIGUSR2, so that running requests
# may finish.
set -euo pipefail
me=$(basename "$0")
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
lockstep=${LOCKSTEP:-$here/lockstep}
[ -n "${LOCKSTEP:-}" ] || [ -x "$lockstep" ] || lockstep=$here/../build/release/lockstep
ranks=1
if [ "${1:-}" = -n ] || [ "${1:-}" = -np ]; then
  ranks=${2:-}
  [[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "$me: -n needs the number of ranks" >&2; exit 2; }
  shift 2
fi
[ -x "$lockstep" ] || { echo "$me: $lockstep is not built; bash launch/quickstart.sh builds it" >&2; exit 2; }

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-self,vader,tcp}  # tcp where /dev/shm is too small

# mpirun reads the standard input of whoever called, wanted or not: it gets it where a prompt comes from there.
[[ " $* " =~ [\ =]-\ |/dev/stdin ]] || exec </dev/null

# Behind mpirun nobody sees whether stderr is a terminal.
[ ! -t 2 ] || export LOCKSTEP_STDERR_IS_TERMINAL=1

# A job in the background may not read from the terminal.
drains=
case ${1:-} in
  serve) drains=1 ;;
  batch) [ -t 0 ] || drains=1 ;;
esac

status=0
if [ -n "$drains" ]; then
  # A process group of its own: a Ctrl-C that reached mpirun would make it end the ranks within a second.
  set -m
  mpirun -q -np "$ranks" "$lockstep" "$@" &
  job=$!
  trap 'kill -USR2 "$job" 2>/dev/null || true' INT TERM USR1 USR2
  # A signal ends `wait` early.
  while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done
  wait "$job" || status=$?
else
  mpirun -q -np "$ranks" "$lockstep" "$@" || status=$?
fi
if [ "$status" -gt 128 ]; then
  echo "$me: a rank was ended by signal $((status - 128)); the job is over" >&2
fi
exit "$status"
