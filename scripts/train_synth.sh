#!/usr/bin/env bash
# The whole recipe on synthetic data of CLEVR's difficulty: make images and questions, compute features with the backbone
# `synth`, train the program generator and execution engines of residual blocks and of attention modules on true
# programs, and evaluate them by question type on true and on predicted programs, beside the symbolic engine.
#
#   [REAL=CLEVR_v1.0] scripts/train_synth.sh [--small] [OUT] [KEY=VALUE]...        (OUT: runs/synth)
#
# With as many images and questions as CLEVR has, this needs a GPU, and 16 cores for making the data. --small is for two
# cores: 15,500 images of the size that the backbone reads and small networks, two trainings at a time on one thread
# each. Its generator and its engine of attention modules are also stored in OUT/networks/best.safetensors, the file that
# comes with the package. REAL is a directory in CLEVR's layout whose questions are answered too, by networks that
# have not seen its images. SYNTH contains options of iep-synth in place of the numbers of images. Settings such as
# batch_size=32 apply to all training steps. Started again with the same OUT, the script skips finished steps and resumes
# the others.
SMALL=
for argument in "$@"; do
    shift
    if [ "$argument" = --small ]; then SMALL=_small; else set -- "$@" "$argument"; fi
done
source "$(dirname "$0")/recipe.sh"
expect 0 1
OUT=${PLACES[0]:-runs/synth}
DATA=$OUT/data

SIZE=${SMALL:+--train 15000 --val 500 --questions-per-image 20 --width 336 --height 224 --seed 1}
read -ra SYNTH <<<"${SYNTH-${SIZE:---train 70000 --val 15000}}"
iep-synth "$OUT/clevr" --preset clevr --test 0 --workers "$(getconf _NPROCESSORS_ONLN)" "${SYNTH[@]}"
iep-preprocess "$OUT/clevr" --out "$DATA" --backbone synth --dtype float16
if [ -n "${REAL-}" ]; then # now, so that its errors do not come after hours of training
    iep-preprocess "$REAL" --out "$OUT/real" --backbone synth --dtype float16 --vocab "$DATA/vocab.json" --encode-unk
fi

train_on_data() { train "$OUT/$1" --config "$CONFIGS/synth/$1$SMALL.yaml" --data "$DATA"; }

if [ -n "$SMALL" ]; then
    side_by_side "pg ee" pooled
else
    for name in pg ee pooled; do train_on_data $name; done
fi

python - "$OUT" <<'END'
import sys
from pathlib import Path

import iep

out = Path(sys.argv[1])
iep.load(out / "pooled", pg=out / "pg").save(out / "networks", half=True)
END

for run in "$OUT/ee" "$OUT/pooled"; do
    echo "$run: validation accuracy by the number of questions seen"
    sed -n 's/.*"step": \([0-9]*\), "validation_accuracy": \([0-9.]*\).*/\1 \2/p' "$run/metrics.jsonl" |
        awk -v size="$(sed -n 's/^batch_size: //p' "$run/config.yaml")" '{ printf "%12d %5.1f\n", $1 * size, 100 * $2 }'
done

answer() { # NAME DATA SPLIT CLEVR: evaluate all engines on true and on predicted programs, and print one table
    local engine of_engine options=(--data "$2" --split "$3") table=$OUT/eval/$1.txt
    AGAINST=()
    mkdir -p "$OUT/eval"
    for engine in symbolic ee pooled; do # each table has the columns of those before it
        of_engine=(--ee "$OUT/$engine")
        if [ $engine = symbolic ]; then of_engine=(--ee symbolic --images "$4"); fi
        evaluate "$engine" "$OUT/eval/$1/$engine" "${options[@]}" "${of_engine[@]}" >"$table"
        evaluate "$engine-predicted" "$OUT/eval/$1/$engine-predicted" "${options[@]}" --pg "$OUT/pg" \
            "${of_engine[@]}" >"$table"
    done
    echo "$2, $3:"
    sed '/^Wrote /d' "$table"
}

answer synth "$DATA" val "$OUT/clevr"
if [ -n "${REAL-}" ]; then
    for split in $(splits "$OUT/real" train val); do
        if [ -e "$REAL/scenes/CLEVR_${split}_scenes.json" ]; then
            iep-eval --backbone synth --scenes "$REAL" --split "$split"
        fi
        answer "real-$split" "$OUT/real" "$split" "$REAL"
    done
fi
