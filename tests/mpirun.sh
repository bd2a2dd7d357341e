#!/usr/bin/env bash
# usage: mpirun.sh RANKS PROGRAM [ARG...]
# mpirun for tests on a small shared machine: works as root, more ranks than cores, no pinning, ranks yield when they wait.
set -euo pipefail
ranks=$1; shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none
exec mpirun -np "$ranks" "$@"
