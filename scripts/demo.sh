#!/usr/bin/env bash
# The main job on a generated data set: make images and questions, preprocess them, train the program generator and the
# execution engine, then both jointly, beside two baselines, and print accuracies by question type, also those of the
# symbolic engine.
#
#   scripts/demo.sh [OUT] [KEY=VALUE]...        (OUT: runs/demo)
#
# SYNTH contains options of iep-synth, such as numbers of images. Settings such as batch_size=32 apply to all training
# steps. Started again with the same OUT, the script skips finished steps and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 0 1
OUT=${PLACES[0]:-runs/demo}
DATA=$OUT/data
read -ra SYNTH <<<"${SYNTH-}"

train_on_data() { train "$OUT/$1" --config "$CONFIGS/mini/$1.yaml" --data "$DATA" "${@:2}"; }
answer() { evaluate "${1//_/ }" "$OUT/eval/$1" --data "$DATA" "${@:2}"; }

step iep-synth "$OUT/clevr" --preset mini --workers "$(getconf _NPROCESSORS_ONLN)" "${SYNTH[@]}"
step iep-preprocess "$OUT/clevr" --out "$DATA" --backbone synth --dtype float16
side_by_side "pg lstm cnn-lstm" tbd
train_on_data joint --pg "$OUT/pg" --ee "$OUT/tbd"

say "evaluation"
answer lstm --baseline "$OUT/lstm" >/dev/null
answer cnn-lstm --baseline "$OUT/cnn-lstm" >/dev/null
answer symbolic --pg "$OUT/pg" --ee symbolic --images "$OUT/clevr" >/dev/null
answer true_programs --pg "$OUT/pg" --ee "$OUT/tbd" --programs ground-truth >/dev/null
answer end_to_end --pg "$OUT/pg" --ee "$OUT/tbd" >/dev/null
answer joint --pg "$OUT/joint" --ee "$OUT/joint" --report "$OUT/eval/joint" --images "$OUT/clevr"
say "Done. Checkpoints, metrics and reports: $OUT"
