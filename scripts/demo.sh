#!/usr/bin/env bash
# Run the main job on a generated data set: generate images and questions, preprocess them, train the program generator,
# the execution engine and both jointly, evaluate them beside two baselines, and print accuracies by question type.
#
#   scripts/demo.sh [OUT]        (default: runs/demo)
#
# Started again with the same OUT, the script skips finished steps and resumes the others.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-runs/demo}
DATA=$OUT/data
START=$SECONDS

step() {
    printf '\n[%02d:%02d] %s\n' $(((SECONDS - START) / 60)) $(((SECONDS - START) % 60)) "$*"
    "$@"
}

step iep-synth "$OUT/clevr" --preset mini --workers "$(getconf _NPROCESSORS_ONLN)"
step iep-preprocess "$OUT/clevr" --out "$DATA" --backbone patches --dtype float16
# Two small networks, which do not benefit from a second core, are trained side by side.
export OMP_NUM_THREADS=1
iep-train --config configs/mini/lstm.yaml --data "$DATA" --out "$OUT/lstm" --resume >"$OUT/lstm.log" 2>&1 &
LSTM=$!
step iep-train --config configs/mini/pg.yaml --data "$DATA" --out "$OUT/pg" --resume
wait $LSTM || {
    tail -n 5 "$OUT/lstm.log" >&2
    exit 1
}
unset OMP_NUM_THREADS
step iep-train --config configs/mini/ee.yaml --data "$DATA" --out "$OUT/ee" --resume
step iep-train --config configs/mini/joint.yaml --data "$DATA" --pg "$OUT/pg" --ee "$OUT/ee" --out "$OUT/joint" --resume

step iep-eval --baseline "$OUT/lstm" --data "$DATA" --out "$OUT/eval/lstm" --name lstm
step iep-eval --pg "$OUT/pg" --ee "$OUT/ee" --data "$DATA" --programs ground-truth \
    --out "$OUT/eval/true_programs" --name "true programs"
step iep-eval --pg "$OUT/pg" --ee "$OUT/ee" --data "$DATA" --programs predicted \
    --out "$OUT/eval/end_to_end" --name "end to end"
step iep-eval --pg "$OUT/joint" --ee "$OUT/joint" --data "$DATA" --programs predicted \
    --against lstm "$OUT/eval/lstm" --against "true programs" "$OUT/eval/true_programs" \
    --against "end to end" "$OUT/eval/end_to_end" --out "$OUT/eval/joint" --name joint \
    --report "$OUT/eval/joint" --images "$OUT/clevr"
printf '\nDone in %d:%02d. Checkpoints, metrics and reports: %s\n' $(((SECONDS - START) / 60)) $(((SECONDS - START) % 60)) "$OUT"
