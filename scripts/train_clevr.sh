#!/usr/bin/env bash
# The published recipe on CLEVR v1.0 (Johnson et al. 2017, section 4.1): train the program generator on a few programs,
# the execution engine on its predicted programs, then both jointly from answers alone.
#
#   [PROGRAMS=9000|18000|700000] scripts/train_clevr.sh CLEVR_v1.0 [OUT] [KEY=VALUE]...        (OUT: data/clevr)
#
# PROGRAMS is the number of programs that the generator is trained on (default: 18000). With 700000, which is all of
# them, the engine is trained on true programs as well, and joint training is skipped. CLEVR_v1.0 is the unpacked
# download. Settings after the directories, such as batch_size=32, apply to all training steps. Started again with the
# same OUT, the script skips finished steps and resumes the others. One GPU of 16 GB is sufficient; the features of all
# 100,000 images take 40 GB of disk space in float16, which this script uses (80 GB in float32).
source "$(dirname "$0")/recipe.sh"
expect 1 2
CLEVR=${PLACES[0]}
OUT=${PLACES[1]:-data/clevr}
PROGRAMS=${PROGRAMS:-18000}
RUNS=$OUT/runs/$PROGRAMS

iep-preprocess "$CLEVR" --out "$OUT" "${PREPROCESS[@]}"
if [ "$PROGRAMS" -ge 699989 ]; then # as many as CLEVR has
    train "$RUNS/pg" --config "$CONFIGS/clevr/pg_all.yaml" --data "$OUT"
    train "$RUNS/ee" --config "$CONFIGS/clevr/ee_all.yaml" --data "$OUT"
    PG=$RUNS/pg EE=$RUNS/ee
else
    train "$RUNS/pg" --config "$CONFIGS/clevr/pg.yaml" --data "$OUT" --num-train-samples "$PROGRAMS"
    train "$RUNS/ee" --config "$CONFIGS/clevr/ee.yaml" --data "$OUT" --pg "$RUNS/pg"
    train "$RUNS/joint" --config "$CONFIGS/clevr/joint.yaml" --data "$OUT" --pg "$RUNS/pg" --ee "$RUNS/ee"
    PG=$RUNS/joint EE=$RUNS/joint
fi
for split in $(splits "$OUT" val test); do
    iep-eval --pg "$PG" --ee "$EE" --data "$OUT" --split "$split" --name "$PROGRAMS programs" \
        --out "$RUNS/eval/$split" --report "$RUNS/eval/$split" --images "$CLEVR"
done
