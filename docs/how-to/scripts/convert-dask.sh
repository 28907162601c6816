#!/bin/bash
# Convert a checkpoint with workers that Slurm starts as jobs of their own: sbatch convert-dask.sh SRC DST [OPTION...]
# This job only plans and coordinates. dask-jobqueue reads what a worker's job needs from these variables, or from
# ~/.config/dask/jobqueue.yaml.
#SBATCH --job-name=lazyckpt
#SBATCH --nodes=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH --time=02:00:00
set -euo pipefail

src=${1:?the checkpoint}
dst=${2:?the destination}
shift 2

export DASK_JOBQUEUE__SLURM__CORES=${CORES:-16}
export DASK_JOBQUEUE__SLURM__PROCESSES=${PROCESSES:-4}
export DASK_JOBQUEUE__SLURM__MEMORY=${MEMORY:-32GiB}
export DASK_JOBQUEUE__SLURM__WALLTIME=${WALLTIME:-02:00:00}
export DASK_JOBQUEUE__SLURM__LOCAL_DIRECTORY=${TMPDIR:-/tmp}

lazyckpt convert "$src" "$dst" --cluster slurm --workers "${JOBS:-8}" "$@"
