#!/usr/bin/env bash
# Make the weights of the backbone `synth` again from nothing: draw CLEVR-like images, train the scene network on them,
# and write the file that ships with the package.
#
#   scripts/train_backbone.sh [OUT] [KEY=VALUE...]   (default: runs/backbone)
#
# The file is OUT/synth.safetensors; copied to iep/backbone/, it replaces the package's. Started again with the same
# OUT, the script skips finished steps and resumes the others. KEY=VALUE are settings of iep-train.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-runs/backbone}
iep-synth "$OUT/clevr" --preset clevr --width 336 --height 224 --min-objects 2 --train 10000 --val 500 --test 0 \
    --questions-per-image 1 --workers "$(getconf _NPROCESSORS_ONLN)"
iep-train --config synth/backbone --data "$OUT/clevr" --out "$OUT/run" --resume "${@:2}"
python scripts/export_backbone.py "$OUT/run" "$OUT/synth.safetensors"
iep-eval --backbone "$OUT/synth.safetensors" --scenes "$OUT/clevr" --split val
