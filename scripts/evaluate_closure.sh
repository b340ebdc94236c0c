#!/usr/bin/env bash
# CLOSURE (Bahdanau et al. 2019): does a model that was trained on CLEVR answer questions that combine CLEVR's phrases in
# new ways? Evaluates a generator and an engine on every file of CLOSURE, with predicted and with true programs.
#
#   scripts/evaluate_closure.sh CLOSURE CLEVR_DATA PG EE [OUT]        (OUT: data/closure)
#
# CLOSURE is the unpacked download, whose questions are about the val images of CLEVR, or a directory that iep-synth
# --families closure made, with images of its own. CLEVR_DATA is the output of iep-preprocess for the data that PG and EE
# were trained on; its vocabulary is used and, without own images, its val_features.h5 is linked. OUT/closure.txt contains
# the table.
source "$(dirname "$0")/recipe.sh"
expect 4 5
CLOSURE=${PLACES[0]}
DATA=${PLACES[1]}
PG=${PLACES[2]}
EE=${PLACES[3]}
OUT=${PLACES[4]:-data/closure}

iep-preprocess "$CLOSURE" --only questions --out "$OUT" --vocab "$DATA/vocab.json"
if [ -d "$CLOSURE/images" ]; then
    iep-preprocess "$CLOSURE" --only features --split val --out "$OUT" --dtype float16
else
    ln -sf "$(realpath "$DATA/val_features.h5")" "$OUT/"
fi

percent() { python3 -c 'import json, sys; print(f"{100 * json.load(open(sys.argv[1]))["accuracy"]:.1f}")' "$1/report.json"; }

{
    printf '%-24s%10s%20s%15s\n' 'CLOSURE' questions 'predicted programs' 'true programs'
    for questions in "$OUT"/*_questions.h5; do
        split=$(basename "$questions" _questions.h5)
        ln -sfn val_features.h5 "$OUT/${split}_features.h5"
        iep-eval --ee "$EE" --data "$OUT" --split "$split" --out "$OUT/eval/true/$split" >&2
        iep-eval --pg "$PG" --ee "$EE" --data "$OUT" --split "$split" --out "$OUT/eval/predicted/$split" >&2
        count=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["num_questions"])' "$OUT/eval/true/$split/report.json")
        printf '%-24s%10s%20s%15s\n' "$split" "$count" "$(percent "$OUT/eval/predicted/$split")" "$(percent "$OUT/eval/true/$split")"
    done
} >"$OUT/closure.txt.part"
mv "$OUT/closure.txt.part" "$OUT/closure.txt"
cat "$OUT/closure.txt"
