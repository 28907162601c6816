#!/bin/bash
# Convert a checkpoint on the nodes of one Slurm job, without a scheduler: sbatch convert-srun.sh SRC DST [OPTION...]
# Every task does its share and writes whole files; the last one publishes DST. If tasks die, submit the job again.
#SBATCH --job-name=lazyckpt
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=2G
#SBATCH --time=02:00:00
set -euo pipefail

src=${1:?the checkpoint}
dst=${2:?the destination}
shift 2

# $SLURM_PROCID is set in each task, so the task's shell has to expand it
srun --kill-on-bad-exit=0 bash -c \
    'exec lazyckpt convert "$@" --shard-of-work "$SLURM_PROCID/$SLURM_NTASKS"' task "$src" "$dst" "$@"
