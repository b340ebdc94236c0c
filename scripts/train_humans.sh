#!/usr/bin/env bash
# CLEVR-Humans, questions that people wrote (Johnson et al. 2017, section 4.5): a model trained on CLEVR learns new
# words. The generator is fine-tuned by REINFORCE from answers alone, as there are no programs; the engine is frozen.
#
#   scripts/train_humans.sh CLEVR-Humans CLEVR_DATA PG EE [OUT] [KEY=VALUE]...        (OUT: data/humans)
#
# CLEVR-Humans is the unpacked download, and CLEVR_DATA the output of iep-preprocess for CLEVR, whose vocabulary is
# extended and whose features are linked. PG and EE are the runs of the generator and the engine: after train_clevr.sh,
# data/clevr/runs/18000/joint for both. Before fine-tuning, words that CLEVR does not have are <UNK>; words that occur
# fewer than UNK_THRESHOLD (default: 10) times stay <UNK>. Started again with the same OUT, the script skips finished
# steps and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 4 5
HUMANS=${PLACES[0]}
DATA=${PLACES[1]}
PG=${PLACES[2]}
EE=${PLACES[3]}
OUT=${PLACES[4]:-data/humans}

iep-preprocess "$HUMANS" --only questions --out "$OUT/clevr_words" --vocab "$DATA/vocab.json" --encode-unk
iep-preprocess "$HUMANS" --only questions --out "$OUT" --vocab "$DATA/vocab.json" --expand-vocab \
    --unk-threshold "${UNK_THRESHOLD:-10}" --encode-unk
for features in "$DATA"/*_features.h5; do
    ln -sf "$(realpath "$features")" "$OUT/clevr_words/"
    ln -sf "$(realpath "$features")" "$OUT/"
done

train "$OUT/runs/joint" --config "$CONFIGS/humans/joint.yaml" --data "$OUT" --pg "$PG" --ee "$EE"
for split in $(splits "$OUT" val test); do
    iep-eval --pg "$PG" --ee "$EE" --data "$OUT/clevr_words" --split "$split" --name before \
        --out "$OUT/eval/before/$split"
    iep-eval --pg "$OUT/runs/joint" --ee "$EE" --data "$OUT" --split "$split" --name after \
        --against before "$OUT/eval/before/$split" --out "$OUT/eval/after/$split"
done
