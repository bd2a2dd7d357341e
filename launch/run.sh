#!/usr/bin/env bash
# usage: run.sh [-n RANKS] COMMAND ARG...                 for instance: run.sh -n 2 generate model.gguf --prompt Hello
#        run.sh --host HOST:RANKS,... [--network CIDR] COMMAND ARG...
#                                      for instance: run.sh --host alpha:2,beta:2 --network 10.1.0.0/16 generate model.gguf --prompt Hello
#
# Runs `lockstep COMMAND ARG...` on RANKS processes (default 1) of this host, or on so many of each of several hosts (rank 0 on the
# first; -n with --host: fewer), with the settings of Open MPI that suit it: allowed as root, as many ranks as wanted, threads not
# pinned to one core, waiting ranks leave their core to others, hosts that are gone are noticed, and no banner of mpirun after a
# message of lockstep's own. Runs the lockstep that lies beside this script, as `cmake --install` puts it (there the script is called
# lockstep-run), or else build/release/lockstep; LOCKSTEP names another binary.
#
# Other hosts are reached by ssh, and need the binary, and MODEL, in the same place. --network says over which network MPI and mpirun
# talk. Without it they try all that they find: a bridge of containers, which has the same address on each host, makes them wait for ever.
#
# `serve ... --restarts K` starts a server's ranks again when they have failed, at most K times in a row: `lockstep supervise`, which
# stands in front of mpirun, takes the option.
#
# A server or a batch job is stopped by SIGTERM to this script, or Ctrl-C: it goes to the ranks as SIGUSR2, so that running requests
# may finish.
set -euo pipefail
me=$(basename "$0")
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
lockstep=${LOCKSTEP:-$here/lockstep}
[ -n "${LOCKSTEP:-}" ] || [ -x "$lockstep" ] || lockstep=$here/../build/release/lockstep
ranks=() hosts=()
while true; do
  case ${1:-} in
    -n|-np)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || { echo "$me: -n needs the number of ranks" >&2; exit 2; }
      ranks=(-np "$2") ;;
    --host)
      [[ ${2:-} =~ ^[A-Za-z0-9] ]] || { echo "$me: --host needs HOST:RANKS,HOST:RANKS and so on" >&2; exit 2; }
      hosts=(--host "$2") ;;
    --network)
      [[ ${2:-} =~ ^[0-9.]+/[0-9]+$ ]] || { echo "$me: --network needs an IPv4 network, such as 10.1.0.0/16" >&2; exit 2; }
      export OMPI_MCA_btl_tcp_if_include=$2 OMPI_MCA_oob_tcp_if_include=$2 ;;
    *) break ;;
  esac
  shift 2
done
[ ${#ranks[@]} -gt 0 ] || [ ${#hosts[@]} -gt 0 ] || ranks=(-np 1)
[ -x "$lockstep" ] || { echo "$me: $lockstep is not built; bash launch/quickstart.sh builds it" >&2; exit 2; }

supervise=()
if [ "${1:-}" = serve ]; then
  rest=()
  while [ $# -gt 0 ]; do
    case $1 in
      --restarts)
        [ $# -gt 1 ] || { echo "$me: --restarts needs a number" >&2; exit 2; }
        supervise=("$lockstep" supervise "--restarts=$2" --)
        shift ;;
      --restarts=*) supervise=("$lockstep" supervise "$1" --) ;;
      *) rest+=("$1") ;;
    esac
    shift
  done
  set -- "${rest[@]}"
fi

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-self,vader,tcp}  # tcp where /dev/shm is too small, and between hosts
# mpirun and its daemons hear nothing of a host that has lost power or network, but for an answer that TCP asks for: after 10 s of
# silence, then every 2 s, ten times. Open MPI's own setting takes 8 minutes.
export OMPI_MCA_oob_tcp_keepalive_time=${OMPI_MCA_oob_tcp_keepalive_time:-10}
export OMPI_MCA_oob_tcp_keepalive_intvl=${OMPI_MCA_oob_tcp_keepalive_intvl:-2}
export OMPI_MCA_oob_tcp_keepalive_probes=${OMPI_MCA_oob_tcp_keepalive_probes:-10}
quiet=-q
if [ ${#hosts[@]} -gt 0 ]; then
  quiet=  # mpirun tells which host it has lost
  # Other hosts get no variables but Open MPI's.
  for name in $(compgen -e NCCL_); do hosts+=(-x "$name"); done
  [ ${#supervise[@]} -eq 0 ] || hosts+=(-x LOCKSTEP_SUPERVISOR)  # a rank 0 that is not on its host says so
fi

# mpirun reads the standard input of whoever called, wanted or not: it gets it where a prompt comes from there.
[[ " $* " =~ [\ =]-\ |/dev/stdin ]] || exec </dev/null
# A standard input that is closed would be mpirun's for a pipe of its own, which never ends.
[ -e /dev/stdin ] || exec </dev/null

# Behind mpirun nobody sees whether stderr is a terminal.
[ ! -t 2 ] || export LOCKSTEP_STDERR_IS_TERMINAL=1

[ ${#supervise[@]} -eq 0 ] || exec "${supervise[@]}" mpirun $quiet "${hosts[@]}" "${ranks[@]}" "$lockstep" "$@"

# A job in the background may not read from the terminal.
drains=
case ${1:-} in
  serve) drains=1 ;;
  batch) [ -t 0 ] || drains=1 ;;
esac

# A job does not outlive this script, however that ends: mpirun gets SIGTERM then, and ends its ranks.
mpirun=(mpirun)
! command -v setpriv >/dev/null || mpirun=(setpriv --pdeathsig TERM mpirun)

status=0
if [ -n "$drains" ]; then
  # A process group of its own: a Ctrl-C that reached mpirun would make it end the ranks within a second.
  set -m
  "${mpirun[@]}" $quiet "${hosts[@]}" "${ranks[@]}" "$lockstep" "$@" &
  job=$!
  trap 'kill -USR2 "$job" 2>/dev/null || true' INT TERM USR1 USR2
  # A signal ends `wait` early.
  while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done
  wait "$job" || status=$?
else
  "${mpirun[@]}" $quiet "${hosts[@]}" "${ranks[@]}" "$lockstep" "$@" || status=$?
fi
if [ "$status" -gt 128 ] && [ "$status" -le 192 ]; then
  echo "$me: a rank, or mpirun, was ended by signal $((status - 128)); the job is over" >&2
fi
exit "$status"
