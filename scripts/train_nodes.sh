#!/usr/bin/env bash
# One training run on several machines that share a file system, without a scheduler: start this on every one of them.
#
#   scripts/train_nodes.sh MACHINES FIRST[:PORT] [iep-train's options]
#   scripts/train_nodes.sh 2 node01 --config configs/clevr/ee.yaml --data data/clevr --out runs/ee
#
# MACHINES is their number, FIRST the name of one of them where all meet (port 29400 unless given). Each uses all its
# GPUs, or one process where it has none; PROCESSES=N says otherwise. When a process fails or is killed, all go on from
# the last checkpoint, up to RESTARTS (3) times; started again by hand, too.
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

exec torchrun --nnodes "$MACHINES" --nproc-per-node "$PROCESSES" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST" --rdzv-id "${RUN_ID:-iep}" -m iep.cli.train "$@" --resume
