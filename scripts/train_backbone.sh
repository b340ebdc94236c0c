#!/usr/bin/env bash
# Make the weights of the backbone `synth` again from nothing: draw CLEVR-like images, train the scene network on them,
# and write the file that ships with the package.
#
#   scripts/train_backbone.sh [OUT] [KEY=VALUE]...        (OUT: runs/backbone)
#
# The file is OUT/synth.safetensors; copied to iep/backbone/, it replaces the package's. SYNTH contains options of
# iep-synth in place of the numbers of images. KEY=VALUE are settings of iep-train. Started again with the same OUT, the
# script skips finished steps and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 0 1
OUT=${PLACES[0]:-runs/backbone}
read -ra SYNTH <<<"${SYNTH---train 30000 --val 500}"
iep-synth "$OUT/clevr" --preset clevr --width 336 --height 224 --min-objects 2 --test 0 --questions-per-image 1 \
    --workers "$(getconf _NPROCESSORS_ONLN)" "${SYNTH[@]}"
train "$OUT/run" --config "$CONFIGS/synth/backbone.yaml" --data "$OUT/clevr"
python - "$OUT" <<'END'
import sys
from pathlib import Path

from iep.models.checkpoint import read_checkpoint, write_weights

out = Path(sys.argv[1])
write_weights(out, read_checkpoint(out / "run"), half=True)
END
mv "$OUT/best.safetensors" "$OUT/synth.safetensors"
rm "$OUT/config.json"
iep-eval --backbone "$OUT/synth.safetensors" --scenes "$OUT/clevr" --split val
