#!/usr/bin/env bash
# The published recipe on CLEVR v1.0 (Johnson et al. 2017, section 4.1): 18,000 programs for the program generator, its
# predicted programs for the execution engine, then both jointly from answers alone.
#
#   scripts/train_clevr.sh CLEVR_v1.0 [OUT]        (default: data/clevr)
#
# CLEVR_v1.0 is the unpacked download. Every step goes on from what stands in OUT. One GPU of 16 GB is enough; the
# features of all 100,000 images take 40 GB of disk in float16, as here (80 GB in float32).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 CLEVR_v1.0 [OUT]" >&2
    exit 2
fi
CLEVR=$1
OUT=${2:-data/clevr}

iep-preprocess "$CLEVR" --out "$OUT" --backbone resnet101 --dtype float16
iep-train --config configs/clevr/pg.yaml --data "$OUT" --out "$OUT/runs/pg" --resume
iep-train --config configs/clevr/ee.yaml --data "$OUT" --pg "$OUT/runs/pg" --out "$OUT/runs/ee" --resume
iep-train --config configs/clevr/joint.yaml --data "$OUT" --pg "$OUT/runs/pg" --ee "$OUT/runs/ee" \
    --out "$OUT/runs/joint" --resume
iep-eval --pg "$OUT/runs/joint" --ee "$OUT/runs/joint" --data "$OUT" --split val --out "$OUT/runs/joint/val"
iep-eval --pg "$OUT/runs/joint" --ee "$OUT/runs/joint" --data "$OUT" --split test --out "$OUT/runs/joint/test"
