#!/usr/bin/env bash
# The main job at CLEVR's own difficulty: make images and questions, preprocess them, train the program generator and
# the execution engine, then both jointly, beside two baselines, and print accuracies by question type, also those of the
# symbolic engine.
#
#   scripts/demo.sh [OUT] [KEY=VALUE]...        (OUT: runs/demo)
#
# SYNTH contains options of iep-synth in place of those below. Settings such as batch_size=32 apply to all training
# steps. Started again with the same OUT, the script skips finished steps and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 0 1
OUT=${PLACES[0]:-runs/demo}
DATA=$OUT/data
read -ra SYNTH <<<"${SYNTH---train 5000 --val 250 --questions-per-image 20}"

answer() { # NAME OPTION...: evaluate into OUT/eval/NAME
    evaluate "${1//_/ }" "$OUT/eval/$1" --data "$DATA" "${@:2}"
}
train_on_data() { # NAME OPTION...: a recipe for two cores, shortened
    local config=mini/$1 shorter=()
    case $1 in
    pg) config=synth/pg_small shorter=(iterations=8000 validate_every=4000) ;;
    ee)
        config=synth/pooled_small
        shorter=(iterations=2100 validate_every=1050 "curriculum=[[0,4],[200,7],[400,12],[600,40]]" learning_rate=2e-3)
        ;;
    lstm) shorter=(validate_every=1000) ;;
    # So few iterations show that joint training runs. The published recipe is clevr/joint.
    joint) shorter=(iterations=40 validate_every=40 batch_size=128 num_val_samples=1000 precision=auto) ;;
    esac
    train "$OUT/$1" --config "$CONFIGS/$config.yaml" --data "$DATA" "${shorter[@]}" "${@:2}"
}

step iep-synth "$OUT/clevr" --preset clevr --test 0 --workers "$(getconf _NPROCESSORS_ONLN)" "${SYNTH[@]}"
step iep-preprocess "$OUT/clevr" --out "$DATA" --backbone synth --dtype float16
side_by_side "pg lstm cnn-lstm" ee
train_on_data joint --pg "$OUT/pg" --ee "$OUT/ee"

say "evaluation"
answer lstm --baseline "$OUT/lstm" >/dev/null
answer cnn-lstm --baseline "$OUT/cnn-lstm" >/dev/null
answer symbolic --pg "$OUT/pg" --ee symbolic --images "$OUT/clevr" >/dev/null
answer true_programs --pg "$OUT/pg" --ee "$OUT/ee" --programs ground-truth --precision auto >/dev/null
answer end_to_end --pg "$OUT/pg" --ee "$OUT/ee" --precision auto >/dev/null
answer joint --pg "$OUT/joint" --ee "$OUT/joint" --precision auto --report "$OUT/eval/joint" --images "$OUT/clevr"
say "Done. Every answer with its image and program: $OUT/eval/joint/report.html"
cat <<END
Ask about an image that was not trained on, and draw where the modules looked:

  iep-ask --pg $OUT/joint --ee $OUT/joint --image $OUT/clevr/images/val/CLEVR_val_000000.png \\
      --question "How many red things are there?" --draw $OUT/ask.png
END
