#!/usr/bin/env bash
# Systematic generalization, one table for all models, on generated data of CLEVR's difficulty:
#
# - CLEVR-CoGenT, new combinations of shape and colour: train on condition A, evaluate on A and B, fine-tune on B from
#   answers alone, evaluate on B. The backbone is trained on the images of A too, since the one that comes with the
#   package has seen all combinations.
# - CLOSURE, new combinations of phrases: the mean of its seven groups, with predicted and with true programs.
# - Sample efficiency: 1%, 10% and 100% of the training images, with predicted and with true programs.
#
#   scripts/generalize.sh DATA [KEY=VALUE]...
#
# Everything goes to the directory DATA; DATA/table.txt contains the table. Each amount of data has its own program
# generator. Two trainings run at a time, on one thread each. MODELS contains names in place of those below. IMAGES is
# the number of training images (5,000), and fine-tuning has 3% as many. VAL is the number of images of each evaluation
# (250), ITERATIONS is the length of an engine's training (2,400; a third of it on 1% of the images), and SYNTH contains
# further options of iep-synth. Settings such as batch_size=32 apply to all trainings, and settings of a network to its
# own. Started again with the same DATA, the script skips finished steps and resumes the others.
source "$(dirname "$0")/recipe.sh"
expect 1 1
OUT=${PLACES[0]}
read -ra MODELS <<<"${MODELS-lstm cnn-lstm-sa symbolic iep iep-context tbd pooled vector}"
IMAGES=${IMAGES:-5000}
VAL=${VAL:-250}
ITERATIONS=${ITERATIONS:-2400}
QUESTIONS=20 # about each image
PERCENTAGES=(100 10 1)
BACKBONE=$OUT/runs/A/backbone
read -ra SYNTH <<<"${SYNTH-}"

make() { # NAME OPTION...: images and questions in DATA/NAME/clevr, and the encoded questions in DATA/NAME/data
    step iep-synth "$OUT/$1/clevr" --preset clevr --width 336 --height 224 --val "$VAL" --test 0 \
        --questions-per-image "$QUESTIONS" --workers "$(getconf _NPROCESSORS_ONLN)" "${@:2}" "${SYNTH[@]}"
    step iep-preprocess "$OUT/$1/clevr" --only questions --out "$OUT/$1/data" --vocab clevr
}

features() { # NAME OPTION...: the features of these images
    step iep-preprocess "$OUT/$1/clevr" --only features --out "$OUT/$1/data" --backbone synth --dtype float16 "${@:2}"
}

# two_at_a_time FUNCTION NAME...: call the function with each name, two at a time on one thread each. The output of each
# call goes to a file in DATA/logs. If a call fails, the other one is stopped.
two_at_a_time() {
    local name log running=0
    mkdir -p "$OUT/logs"
    export OMP_NUM_THREADS=1
    trap 'for job in $(jobs -pr); do pkill -P "$job" || true; done' EXIT
    for name in "${@:2}"; do
        if [ $running = 2 ]; then
            wait -n
            running=1
        fi
        log=$OUT/logs/$name.log
        say "$name: $log"
        (
            trap '[ $? = 0 ] || tail -n 5 "$log" >&3' EXIT
            "$1" "$name"
        ) 3>&2 >"$log" 2>&1 &
        running=$((running + 1))
    done
    for (( ; running > 0; running--)); do wait -n; done
    trap - EXIT
    unset OMP_NUM_THREADS
}

learn() { # CONDITION NAME CONFIG OPTION...: train on condition A or B, or on a percentage of the images of clevr
    local data=$OUT/clevr/data part=()
    case $1 in
    A | B) data=$OUT/$1/data ;;
    *) part=(--num-train-samples $((IMAGES * QUESTIONS * $1 / 100))) ;;
    esac
    train "$OUT/runs/$1/$2" --config "$CONFIGS/$3.yaml" --data "$data" "${part[@]}" "${@:4}"
}

prepare() { # NAME: train the backbone on the images of A, or all program generators
    local condition iterations
    if [ "$1" = backbone ]; then
        train "$BACKBONE" --config "$CONFIGS/synth/backbone.yaml" --data "$OUT/A/clevr" \
            iterations=1500 validate_every=500
    else
        for condition in A "${PERCENTAGES[@]}"; do
            case $condition in
            A | 100) iterations=6000 ;;
            *) iterations=3000 ;;
            esac
            learn "$condition" pg synth/pg_small iterations=$iterations validate_every=1000
        done
    fi
}

# learn_model CONDITION NAME: train a baseline, or an engine on true programs. All engines see the same number of
# questions, of which residual blocks see short ones for longer: otherwise they learn nothing.
learn_model() {
    local n=$ITERATIONS short shorter engine
    if [ "$1" = 1 ]; then n=$((n / 3)); fi # few questions are memorized by then
    short="curriculum=[[0,4],[$((n / 3)),7],[$((n / 2)),12],[$((n * 2 / 3)),40]]"
    shorter="curriculum=[[0,4],[$((n / 12)),7],[$((n / 6)),12],[$((n / 4)),40]]"
    engine=(precision=auto iterations="$n" validate_every=$((n / 3)))
    case $2 in
    symbolic) ;; # learns nothing
    *lstm*) learn "$1" "$2" "mini/$2" ;;
    iep) learn "$1" "$2" synth/ee_small "${engine[@]}" "$short" engine.module_settings.context=false ;;
    iep-context) learn "$1" "$2" synth/ee_small "${engine[@]}" "$short" ;;
    tbd | pooled) learn "$1" "$2" synth/pooled_small "${engine[@]}" "$shorter" "engine.modules=$2" ;;
    vector) learn "$1" "$2" mini/vector "${engine[@]}" "$shorter" batch_size=128 ;;
    *) echo "$2: unknown model" >&2 && exit 2 ;;
    esac
}

fine_tune() { # NAME: train on B what was trained on A, from answers alone; the generator as well
    local options=(iterations=300 validate_every=100 batch_size=128 learning_rate=3e-4) a=$OUT/runs/A
    case $1 in
    symbolic) ;;
    *lstm*) learn B "$1" "mini/$1" "${options[@]}" --baseline "$a/$1" ;;
    *) learn B "$1" mini/joint "${options[@]}" precision=auto --pg "$a/pg" --ee "$a/$1" ;;
    esac
}

# answer CELL NAME CONDITION DATA SPLIT: evaluate what was trained on CONDITION into DATA/eval/NAME/CELL, with true
# programs where the name of the cell ends in `true`. A report that is newer than the networks is kept.
answer() {
    local out=$OUT/eval/$2/$1 run=$OUT/runs/$3/$2 pg=$OUT/runs/$3/pg options=(--data "$OUT/$4/data" --split "$5")
    if [ "$3" = B ]; then pg=$run; fi # fine-tuned together
    case $2 in
    symbolic)
        run=$pg
        options+=(--ee symbolic --images "$OUT/$4/clevr")
        if [ "$3" = A ]; then options+=(--backbone "$BACKBONE"); fi
        ;;
    *lstm*) options+=(--baseline "$run") ;;
    *) options+=(--ee "$run") ;;
    esac
    case $2:$1 in
    *lstm*:* | *true) ;;
    *) options+=(--pg "$pg") ;;
    esac
    if [ ! "$out/report.json" -nt "$run/best.pt" ] || [ ! "$out/report.json" -nt "$pg/best.pt" ]; then
        step iep-eval "${options[@]}" --out "$out"
    fi
}

measure() { # NAME: train a model on all data, and evaluate it
    local condition programs questions group
    for condition in A "${PERCENTAGES[@]}"; do learn_model "$condition" "$1"; done
    fine_tune "$1"
    answer A-A "$1" A A val
    answer A-B "$1" A B val
    if [ "$1" != symbolic ]; then answer B-B "$1" B B val; fi
    for programs in predicted true; do
        if [[ $1:$programs = *lstm*:true ]]; then continue; fi
        for condition in "${PERCENTAGES[@]}"; do answer "$condition-$programs" "$1" "$condition" clevr val; done
        for questions in "$OUT"/closure/data/*_questions.h5; do
            group=$(basename "$questions" _questions.h5)
            answer "closure/$group-$programs" "$1" 100 closure "$group"
        done
    done
}

make clevr --seed 1 --train "$IMAGES"
make A --seed 2 --train "$IMAGES" --cogent A
make B --seed 3 --train $((IMAGES * 3 / 100)) --cogent B
QUESTIONS=14 make closure --seed 4 --train 0 --families closure
two_at_a_time prepare backbone generators

features clevr
features A --weights "$BACKBONE"
features B --weights "$BACKBONE"
features closure --split val
for questions in "$OUT"/closure/data/*_questions.h5; do # all groups are about the same images
    group=$(basename "$questions" _questions.h5)
    ln -sfn val_features.h5 "$OUT/closure/data/${group}_features.h5"
    ln -sfn val "$OUT/closure/clevr/images/$group"
done
mapfile -t LONGEST_FIRST < <(printf '%s\n' "${MODELS[@]}" | tac)
two_at_a_time measure "${LONGEST_FIRST[@]}"

python - "$OUT" "${MODELS[@]}" <<'END' >"$OUT/table.txt.part"
import sys
from pathlib import Path

from iep.evaluation.json_report import percent, read_report
from iep.runtime.tables import align_rows

CELLS = {
    "A->A": "A-A",
    "A->B": "A-B",
    "B tuned": "B-B",
    "CLOSURE": "closure/*-predicted",
    "CLOSURE true": "closure/*-true",
    **{f"{part}%": f"{part}-predicted" for part in (1, 10, 100)},
    **{f"{part}% true": f"{part}-true" for part in (1, 10, 100)},
}


def mean(model, cell, score):
    """Return the mean over the reports of a cell in percent, `-` where there are none or they lack the score."""
    reports = [read_report(each / "report.json") for each in Path(sys.argv[1], "eval", model).glob(cell)]
    known = [scores.overall for report in reports if (scores := getattr(report, score)) is not None]
    return percent(sum(known) / len(known) if known else None)


models = sys.argv[2:]
rows = [["", *CELLS], *([model, *(mean(model, cell, "accuracy") for cell in CELLS.values())] for model in models)]
if "symbolic" in models:
    rows.append(["programs exact", *(mean("symbolic", cell, "program_exact_match") for cell in CELLS.values())])
print(align_rows(rows))
END
mv "$OUT/table.txt.part" "$OUT/table.txt"
cat "$OUT/table.txt"
