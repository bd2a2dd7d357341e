#!/usr/bin/env bash
# usage, as the last line of a batch script:    exec bash resumable.sh srun|mpirun ... lockstep batch ...
#
# Runs the command, and tells it to end before its input does when Slurm signals the batch script (README.md beside this):
#   SIGUSR1  the time limit is near (#SBATCH --signal=B:USR1@SECONDS): what runs is finished and written, then the job is requeued
#   SIGUSR2  by hand (scancel --batch --signal=USR2 JOB): the same, and the job ends
#   SIGTERM  scancel, preemption, the time limit itself: Slurm has sent it to the ranks as well, and requeues where it means to
# The exit status is the command's. `exec`, because Slurm signals the process of the batch script.
set -uo pipefail
say() { echo "resumable.sh: $*" >&2; }
[ $# -gt 0 ] || { say "no command given"; exit 2; }

job= asked= told=
# SIGUSR1, which srun and mpirun pass on to the ranks: SIGTERM makes mpirun kill them a second later. Once: the ranks take a second
# signal for haste.
tell() { [ -n "$told" ] || { told=1; kill -USR1 "$job" 2>/dev/null; }; }
stop() {
  asked=$1
  say "SIG$1: what runs is finished, then the job ends"
  [ -z "$job" ] || tell
}
trap '[ -n "$asked" ] || stop USR1' USR1  # who has asked for the end already does not want it requeued
trap 'stop USR2' USR2
trap 'asked=TERM' TERM

[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || say "job $SLURM_JOB_ID was requeued $SLURM_RESTART_COUNT times before"
"$@" &
job=$!
case $asked in USR*) tell ;; esac  # it came before there was a job

# A signal ends `wait` early.
status=0
while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done
wait "$job" || status=$?

# 1 is how lockstep ends before the end of its input. With any other status the next run would only do the same again: all is done, it
# was refused, or the signal came while it still read the weights.
if [ "$asked" = USR1 ] && [ "$status" -eq 1 ]; then
  say "requeuing job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID" || say "Slurm does not requeue this job; submitted again, it goes on where it was"
elif [ "$asked" = USR1 ] && [ "$status" -gt 1 ]; then
  say "exit status $status: the job is not requeued"
fi
exit "$status"
