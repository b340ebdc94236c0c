#!/usr/bin/env bash
# One training run on several machines that share a file system, without a scheduler. Start this script on each of them.
#
#   scripts/train_nodes.sh MACHINES FIRST[:PORT] [options of iep-train]
#   scripts/train_nodes.sh 2 node01 --config clevr/ee --data data/clevr --out runs/ee
#
# MACHINES is the number of machines, and FIRST the host name of the one through which they connect (default port:
# 29400). Each machine uses all its GPUs, or one process if it has none; PROCESSES=N overrides this. When a process
# fails or is killed, all processes resume from the last checkpoint, at most RESTARTS (default: 3) times. A run that is
# started again also resumes.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '4,5p' "$0" | sed 's/^# */usage: /' >&2
    exit 2
fi
MACHINES=$1
FIRST=$2
shift 2
if [ -z "${PROCESSES:-}" ]; then
    PROCESSES=$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi
case $FIRST in *:*) ;; *) FIRST=$FIRST:29400 ;; esac

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torchrun starts a new store when it restarts the processes
exec torchrun --nnodes "$MACHINES" --nproc-per-node "$PROCESSES" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST" --rdzv-id "${RUN_ID:-iep}" -m iep.cli.train "$@" --resume
