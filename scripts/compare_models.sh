#!/usr/bin/env bash
# Train every model on the data of the demo with configs/mini, and evaluate all of them side by side by question type:
# the three baselines, and execution engines of residual blocks and of attention modules on true and on predicted
# programs.
#
#   scripts/compare_models.sh [OUT] [KEY=VALUE]...        (OUT: runs/models)
#
# Two trainings run at a time; they and the evaluations use one thread each. Settings such as batch_size=32 apply to all
# trainings. Started again with the same OUT, the script skips finished steps and resumes the others. OUT/models.txt
# contains the table and the duration of each training, or of its last part if it was interrupted.
source "$(dirname "$0")/recipe.sh"
expect 0 1
OUT=${PLACES[0]:-runs/models}
DATA=$OUT/data
TIMES=$OUT/times
mkdir -p "$TIMES"

train_on_data() { # NAME: train configs/mini/NAME.yaml, and write its duration in seconds into $TIMES
    local start=$SECONDS
    if [ ! -e "$TIMES/$1" ]; then
        train "$OUT/$1" --config "$CONFIGS/mini/$1.yaml" --data "$DATA"
        echo $((SECONDS - start)) >"$TIMES/$1"
    fi
}

answer() { evaluate "$1" "$OUT/eval/$1" --data "$DATA" "${@:2}"; }

step iep-synth "$OUT/clevr" --preset mini --workers "$(getconf _NPROCESSORS_ONLN)"
step iep-preprocess "$OUT/clevr" --out "$DATA" --backbone synth --dtype float16
side_by_side lstm pg
side_by_side cnn-lstm cnn-lstm-sa
side_by_side ee tbd
export OMP_NUM_THREADS=1
for model in lstm cnn-lstm cnn-lstm-sa; do
    answer $model --baseline "$OUT/$model" >/dev/null
done
answer iep --ee "$OUT/ee" >/dev/null
answer iep-predicted --pg "$OUT/pg" --ee "$OUT/ee" >/dev/null
answer tbd --ee "$OUT/tbd" >/dev/null
{
    echo "scripts/compare_models.sh" "${SETTINGS[@]}"
    echo "$(date +%F), $(getconf _NPROCESSORS_ONLN) cores of $(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -n 1)"
    echo
    answer tbd-predicted --pg "$OUT/pg" --ee "$OUT/tbd" | sed '/^Wrote /d'
    echo
    for model in lstm cnn-lstm cnn-lstm-sa pg ee tbd; do
        printf 'training %-12s %3d:%02d\n' $model $(($(cat "$TIMES/$model") / 60)) $(($(cat "$TIMES/$model") % 60))
    done
} >"$OUT/models.txt.part"
mv "$OUT/models.txt.part" "$OUT/models.txt"
cat "$OUT/models.txt"
