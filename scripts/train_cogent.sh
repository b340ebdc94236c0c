#!/usr/bin/env bash
# CLEVR-CoGenT, new combinations of shape and colour (Johnson et al. 2017, section 4.3): train on condition A, evaluate
# on A and B, fine-tune on a part of B from answers alone, evaluate on A and on the rest of B.
#
#   scripts/train_cogent.sh CLEVR_CoGenT_v1.0 [OUT] [KEY=VALUE]...        (OUT: data/cogent)
#
# CLEVR_CoGenT_v1.0 is the unpacked download. B has no training split: the first QUESTIONS_OF_B questions of valB
# (default: 30000, about 3,000 images) are used for fine-tuning, and the others for evaluation before and after it. The
# generator is trained on PROGRAMS (default: 18000) programs of trainA. Started again with the same OUT, the script
# skips finished steps and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 1 2
CLEVR=${PLACES[0]}
OUT=${PLACES[1]:-data/cogent}
PROGRAMS=${PROGRAMS:-18000}
QUESTIONS_OF_B=${QUESTIONS_OF_B:-30000}
RUNS=$OUT/runs/$PROGRAMS
ON_B=$RUNS/on_b/$QUESTIONS_OF_B

# on_both NAME RUN: evaluate on A and on the part of B that nothing is fine-tuned on.
on_both() {
    evaluate "$1, A" "$ON_B/eval/$1/A" --pg "$2" --ee "$2" --data "$OUT" --split valA
    evaluate "$1, B" "$ON_B/eval/$1/B" --pg "$2" --ee "$2" --data "$OUT" --split valB --skip-samples "$QUESTIONS_OF_B"
}

iep-preprocess "$CLEVR" --out "$OUT" "${PREPROCESS[@]}"
train "$RUNS/pg" --config "$CONFIGS/cogent/pg.yaml" --data "$OUT" --num-train-samples "$PROGRAMS"
train "$RUNS/ee" --config "$CONFIGS/cogent/ee.yaml" --data "$OUT" --pg "$RUNS/pg"
train "$RUNS/joint" --config "$CONFIGS/cogent/joint.yaml" --data "$OUT" --pg "$RUNS/pg" --ee "$RUNS/ee"
on_both trained "$RUNS/joint"
train "$ON_B/joint" --config "$CONFIGS/cogent/joint_on_b.yaml" --data "$OUT" --pg "$RUNS/joint" --ee "$RUNS/joint" \
    --num-train-samples "$QUESTIONS_OF_B" "skip_val_samples=$QUESTIONS_OF_B"
on_both "fine-tuned" "$ON_B/joint"
