#!/usr/bin/env bash
# One training run on several machines under Slurm. Adapt the #SBATCH lines to your cluster, then run
#
#   sbatch scripts/train_slurm.sh --config clevr/ee --data data/clevr --out runs/ee
#
# Slurm sends a signal two minutes before the time limit: the run finishes its step, saves, and is queued again, as it
# is when a machine fails or another job preempts it. It resumes from its last checkpoint each time.
#SBATCH --job-name=iep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
PORT=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a machine need different ports
export RUN_ID=iep-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

ASKED=
trap 'ASKED=yes; kill -TERM "$SRUN"' TERM
srun scripts/train_nodes.sh "$SLURM_NNODES" "$FIRST:$PORT" "$@" &
SRUN=$!
STATUS=0
wait "$SRUN" || STATUS=$?
if [ -n "$ASKED" ]; then
    wait "$SRUN" || true # the first wait ended with the signal
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$STATUS"
