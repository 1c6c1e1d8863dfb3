#!/bin/bash
# N peers as a Slurm array, each with one GPU and a home of its own. From the repository's root, after `make install`:
#   LINK='swarmentum://...' sbatch --array=1-8 deploy/peers/slurm.sh
# Slurm's SIGTERM (preemption, scancel, 120 s before the time limit) is a leave: the peer saves its momentum and ends with 130.
# After a preemption Slurm starts the task again. The same task has the same home, so the peer goes on under the same key.
# After the time limit, submit it again. HOMES has to be on a disk that all nodes share.
#SBATCH --job-name=swarmentum
#SBATCH --array=1-4
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=swarmentum-%a.log
set -euo pipefail
: "${LINK:?the invite link of the run}"
home="${HOMES:-$HOME/.swarmentum/slurm}/$SLURM_ARRAY_TASK_ID"
mkdir -p "$home"
(umask 077 && printf '%s\n' "$LINK" >"$home/link") # all users of a node can see a command line
export PATH="${SWARMENTUM_BIN:-$PWD/.venv/bin}:$PATH"
exec srun swarmentum join --invite-file "$home/link" --yes --json --home "$home" --threads "${SLURM_CPUS_PER_TASK:-4}"
