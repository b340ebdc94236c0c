#!/usr/bin/env bash
# Accuracy by the number of training images, questions, and programs: train the engine of attention modules on all
# questions about some of the images and on some of the questions about all images, and the program generator on some of
# the programs. DATA is what scripts/train_synth.sh --small has preprocessed. All trainings of a model have the same
# number of iterations, and each is validated with all questions of `val`.
#
#   scripts/learning_curves.sh DATA [OUT] [KEY=VALUE]...        (OUT: runs/curves)
#
# IMAGES, QUESTIONS (about each image), and PROGRAMS contain numbers in place of those below. The settings apply to all
# trainings. Started again with the same OUT, the script skips finished trainings and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 1 2
DATA=${PLACES[0]}
OUT=${PLACES[1]:-runs/curves}

choose() { # DIR IMAGES QUESTIONS: make data of the first IMAGES images with QUESTIONS questions about each, evenly spread
    python - "$DATA" "$@" <<'END'
import sys
from pathlib import Path

import h5py
import numpy as np

data, out, images, questions = Path(sys.argv[1]).resolve(), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
out.mkdir(parents=True, exist_ok=True)
for file in data.iterdir():
    if file.name != "train_questions.h5" and not (out / file.name).exists():
        (out / file.name).symlink_to(file)
with h5py.File(data / "train_questions.h5") as every, h5py.File(out / "train_questions.h5", "w") as chosen:
    _, first, sizes = np.unique(every["image_idxs"], return_index=True, return_counts=True)
    first, sizes = first[:images, None], sizes[:images, None]
    rows = np.unique(first + np.arange(questions) * sizes // questions)  # np.unique: fewer questions than asked for
    for name in every:
        chosen[name] = every[name][:][rows]
END
}

curve() { # RUN MODEL DATA [KEY=VALUE]...
    local run=$1 config=$CONFIGS/synth/$2_small.yaml data=$3
    shift 3
    train "$OUT/$run" --config "$config" --data "$data" validate_every=1000 num_val_samples=null "$@"
}

for number in ${PROGRAMS:-1000 10000 300000}; do
    curve "$number-programs" pg "$DATA" iterations=3000 num_train_samples="$number"
done
for number in ${QUESTIONS:-1 5 20}; do
    choose "$OUT/data/$number-questions" 15000 "$number"
    curve "$number-questions" pooled "$OUT/data/$number-questions" iterations=2000
done
for number in ${IMAGES:-1000 4000}; do
    choose "$OUT/data/$number-images" "$number" 20
    curve "$number-images" pooled "$OUT/data/$number-images" iterations=2000
done

for metrics in "$OUT"/*/metrics.jsonl; do
    sed -n "s|.*\"validation_accuracy\": \([0-9.]*\).*|$(basename "$(dirname "$metrics")") \1|p" "$metrics" | tail -1
done
