#!/usr/bin/env bash
# The main job on a generated data set: make images and questions, preprocess them, train the program generator and the
# execution engine, then both jointly, beside two baselines, and print accuracies by question type.
#
#   scripts/demo.sh [OUT]        (default: runs/demo)
#
# Started again with the same OUT, the script skips finished steps and resumes the others.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-runs/demo}
DATA=$OUT/data
START=$SECONDS

say() { printf '\n[%02d:%02d] %s\n' $(((SECONDS - START) / 60)) $(((SECONDS - START) % 60)) "$*"; }

step() {
    say "$@"
    "$@"
}

train() { # NAME OPTIONS...: configs/mini/NAME.yaml
    step iep-train --config "configs/mini/$1.yaml" --data "$DATA" --out "$OUT/$1" --resume "${@:2}"
}

step iep-synth "$OUT/clevr" --preset mini --workers "$(getconf _NPROCESSORS_ONLN)"
step iep-preprocess "$OUT/clevr" --out "$DATA" --backbone synth --dtype float16

# These networks are too small to gain from a second core: the engine on one, the others in turn on another.
export OMP_NUM_THREADS=1
(train pg && train lstm && train cnn-lstm) >"$OUT/others.log" 2>&1 &
OTHERS=$!
trap 'pkill -P $OTHERS || true' EXIT # if tbd fails, the training beside it is stopped, and resumes like tbd
train tbd
say "pg, lstm and cnn-lstm, beside it: $OUT/others.log"
wait $OTHERS || {
    tail -n 5 "$OUT/others.log" >&2
    exit 1
}
trap - EXIT
unset OMP_NUM_THREADS
train joint --pg "$OUT/pg" --ee "$OUT/tbd"

evaluate() { # NAME OPTIONS...
    step iep-eval --data "$DATA" --out "$OUT/eval/$1" --name "${1//_/ }" "${@:2}"
}

evaluate lstm --baseline "$OUT/lstm" >/dev/null
evaluate cnn-lstm --baseline "$OUT/cnn-lstm" >/dev/null
evaluate true_programs --pg "$OUT/pg" --ee "$OUT/tbd" --programs ground-truth >/dev/null
evaluate end_to_end --pg "$OUT/pg" --ee "$OUT/tbd" >/dev/null
evaluate joint --pg "$OUT/joint" --ee "$OUT/joint" --against lstm "$OUT/eval/lstm" \
    --against cnn-lstm "$OUT/eval/cnn-lstm" --against "true programs" "$OUT/eval/true_programs" \
    --against "end to end" "$OUT/eval/end_to_end" --report "$OUT/eval/joint" --images "$OUT/clevr"
say "Done. Checkpoints, metrics and reports: $OUT"
