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
    if [ -e "$OUT/val_features.h5" ] && [ ! -L "$OUT/val_features.h5" ]; then
        echo "$OUT: has features of other images; choose another OUT" >&2 && exit 1
    fi
    ln -sf "$(realpath "$DATA/val_features.h5")" "$OUT/"
fi

for questions in "$OUT"/*_questions.h5; do
    split=$(basename "$questions" _questions.h5)
    [ "$split" = val ] || ln -sfn val_features.h5 "$OUT/${split}_features.h5"
    step iep-eval --pg "$PG" --ee "$EE" --data "$OUT" --split "$split" --out "$OUT/eval/predicted/$split"
    step iep-eval --ee "$EE" --data "$OUT" --split "$split" --out "$OUT/eval/true/$split"
done
python - "$OUT/eval" <<'END' >"$OUT/closure.txt.part"
import sys
from pathlib import Path

from iep.evaluation.json_report import read_report

print(f"{'':24}{'questions':>10}{'predicted programs':>20}{'true programs':>15}")
for path in sorted(Path(sys.argv[1], "true").iterdir()):
    true, predicted = (read_report(path.parents[1] / kind / path.name / "report.json") for kind in ("true", "predicted"))
    print(f"{path.name:24}{true.questions:10,}{predicted.accuracy.overall:20.1%}{true.accuracy.overall:15.1%}")
END
mv "$OUT/closure.txt.part" "$OUT/closure.txt"
cat "$OUT/closure.txt"
