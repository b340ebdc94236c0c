#!/usr/bin/env bash
# New kinds of questions (Johnson et al. 2017, section 4.4): train generator and engine on the question families with
# short programs, evaluate on short and long ones; then fine-tune jointly on the questions of both, without programs,
# and evaluate again.
#
#   scripts/train_short_long.sh CLEVR_v1.0 [OUT] [KEY=VALUE]...        (OUT: data/clevr)
#
# CLEVR_v1.0 is the unpacked download; what train_clevr.sh has preprocessed in OUT is used. Short families are those
# whose programs have fewer than 16 functions on average. The generator is trained on PROGRAMS (default: 25000) programs
# of short families. Started again with the same OUT, the script skips finished steps and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 1 2
CLEVR=${PLACES[0]}
OUT=${PLACES[1]:-data/clevr}
PROGRAMS=${PROGRAMS:-25000}
RUNS=$OUT/runs/short_long/$PROGRAMS

# on_both NAME PG EE: evaluate on short families and on long ones.
on_both() {
    local families
    for families in short long; do
        evaluate "$1, $families" "$RUNS/eval/$1/$families" --pg "$2" --ee "$3" --data "$OUT" --families "$families"
    done
}

iep-preprocess "$CLEVR" --out "$OUT" "${PREPROCESS[@]}"
train "$RUNS/pg" --config "$CONFIGS/short_long/pg.yaml" --data "$OUT" --num-train-samples "$PROGRAMS"
train "$RUNS/ee" --config "$CONFIGS/short_long/ee.yaml" --data "$OUT" --pg "$RUNS/pg"
on_both trained "$RUNS/pg" "$RUNS/ee"
train "$RUNS/joint" --config "$CONFIGS/short_long/joint.yaml" --data "$OUT" --pg "$RUNS/pg" --ee "$RUNS/ee"
on_both "fine-tuned" "$RUNS/joint" "$RUNS/joint"
