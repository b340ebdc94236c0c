#!/usr/bin/env bash
# Train every model on the data of the demo with configs/mini, and evaluate all of them side by side by question type:
# the three baselines, and execution engines of residual blocks and of attention modules on true and on predicted
# programs.
#
#   scripts/compare_models.sh [OUT]   (default: runs/models)
#
# Two trainings run at a time; they and the evaluations use one thread each. Started again with the same OUT, the script
# skips finished steps and resumes the others. OUT/models.txt contains the table and the duration of each training, or
# of its last part if it was interrupted.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-runs/models}
DATA=$OUT/data
TIMES=$OUT/times
mkdir -p "$TIMES"

train() { # NAME: train configs/mini/NAME.yaml, and write its duration in seconds into $TIMES
    [ ! -e "$TIMES/$1" ] || return 0
    local start=$SECONDS
    iep-train --config "configs/mini/$1.yaml" --data "$DATA" --out "$OUT/$1" --resume >"$OUT/$1.log" 2>&1 || {
        tail -n 5 "$OUT/$1.log" >&2
        return 1
    }
    echo $((SECONDS - start)) >"$TIMES/$1"
    echo "$1: trained in $((SECONDS - start)) s"
}

side_by_side() { # NAME NAME: train both at a time; fails if either fails
    local failed=0
    train "$1" &
    local other=$!
    train "$2" || failed=1
    wait $other || failed=1
    return $failed
}

evaluate() { # NAME OPTIONS...
    iep-eval --data "$DATA" --out "$OUT/eval/$1" --name "$1" "${@:2}" >/dev/null
}

iep-synth "$OUT/clevr" --preset mini --workers "$(getconf _NPROCESSORS_ONLN)"
iep-preprocess "$OUT/clevr" --out "$DATA" --backbone synth --dtype float16
export OMP_NUM_THREADS=1
side_by_side lstm pg
side_by_side cnn-lstm cnn-lstm-sa
side_by_side ee tbd
for model in lstm cnn-lstm cnn-lstm-sa; do
    evaluate $model --baseline "$OUT/$model"
done
evaluate iep --ee "$OUT/ee"
evaluate iep-predicted --pg "$OUT/pg" --ee "$OUT/ee"
evaluate tbd --ee "$OUT/tbd"
AGAINST=()
for name in lstm cnn-lstm cnn-lstm-sa iep iep-predicted tbd; do
    AGAINST+=(--against $name "$OUT/eval/$name")
done
{
    echo "scripts/compare_models.sh"
    echo "$(date +%F), $(getconf _NPROCESSORS_ONLN) cores of $(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -n 1)"
    echo
    iep-eval --data "$DATA" --out "$OUT/eval/tbd-predicted" --pg "$OUT/pg" --ee "$OUT/tbd" --name tbd-predicted "${AGAINST[@]}" |
        sed '/^Wrote /d'
    echo
    for model in lstm cnn-lstm cnn-lstm-sa pg ee tbd; do
        printf 'training %-12s %3d:%02d\n' $model $(($(cat "$TIMES/$model") / 60)) $(($(cat "$TIMES/$model") % 60))
    done
} >"$OUT/models.txt.part"
mv "$OUT/models.txt.part" "$OUT/models.txt"
cat "$OUT/models.txt"
