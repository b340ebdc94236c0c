#!/usr/bin/env bash
# Everything that needs a GPU: the tests, the engine in every execution, experts, processes, a profile, and ten minutes
# of training at full size. Then one dated report.
#
#   scripts/gpu.sh [OUT] [PART]...        (OUT: runs/gpu; PART: all of them, in this order)
#
# The parts are tests, float32, bfloat16, experts, profile, data, train, processes and report. Each takes less than ten
# minutes. A part whose output is in OUT is skipped, training is resumed, and the other parts run even if one fails.
# QUICK=1 makes everything tiny, for a trial without a GPU.
set -euo pipefail
trap 'exit 130' INT # the commands themselves end with an error that would be that of a part
trap 'exit 143' TERM
cd "$(dirname "$0")/.."
case ${1-} in
-h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 0 ;;
esac
ALL="tests float32 bfloat16 experts profile data train processes report"
OUT=${1:-runs/gpu}
shift || true
if [[ " $ALL " == *" $OUT "* ]]; then
    echo "$OUT is the name of a part; OUT comes first" >&2
    exit 2
fi
for part in "$@"; do
    if [[ " $ALL " != *" $part "* ]]; then
        echo "$part: unknown part, expected some of $ALL" >&2
        exit 2
    fi
done
PARTS=("$@")
[ ${#PARTS[@]} -gt 0 ] || read -ra PARTS <<<"$ALL"
GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
DEVICE=$([ "$GPUS" = 0 ] && echo cpu || echo cuda)
SIZES=1,4,16,64,256,1024 PROFILED=64,1024 IMAGES=8000 PRESET=clevr SECONDS_OF_TRAINING=540 CONFIG=synth/ee
ENGINE=() EFFORT=(--repeat 10 --max-seconds 5) EXPERTS=(--experts 1,10,100,1000,10000)
TRITON="lookahead+sharing+triton lookahead+sharing+cuda_graph"
if [ -n "${QUICK-}" ]; then
    SIZES=64 PROFILED=4 IMAGES=20 PRESET=mini SECONDS_OF_TRAINING=15 CONFIG=mini/ee
    ENGINE=(--feature-shape 8 4 4 engine.stem_widths=[] engine.module_dim=4)
    EFFORT=(--repeat 1) EXPERTS=(--experts 1,10 --tokens 1,10) TRITON=
fi
mkdir -p "$OUT"

bench() { # MODULE PART COMMAND OPTION...: its tables are OUT/PART.txt
    python -m "$1" "${@:3}" --device "$DEVICE" --out "$OUT/$2" >"$OUT/$2.part"
}

engine() { # PART SUFFIX STRATEGY...: the engine in one precision
    local each strategies=vanilla$2
    for each in lookahead lookahead+sharing lookahead+sharing+defer "${@:3}"; do
        strategies+=,$each$2
    done
    bench iep.cli.bench "$1" engine --batch-sizes "$SIZES" --batching "$strategies" "${EFFORT[@]}" "${ENGINE[@]}"
}

run() {
    case $1 in
    tests) python -m pytest -m gpu -n 4 --continue-on-collection-errors >"$OUT/tests.part" || true ;; # the report shows failures
    float32) engine float32 "" ;;
    bfloat16) engine bfloat16 +bfloat16 $TRITON ;; # whose kernels compute in bfloat16
    experts) bench benchmarks experts moe "${EXPERTS[@]}" ;;
    profile)
        python scripts/profile_step.py --batch-sizes "$PROFILED" --device "$DEVICE" "${ENGINE[@]}" >"$OUT/profile.part"
        ;;
    data)
        python -m iep.cli.synth "$OUT/clevr" --preset "$PRESET" \
            --train "$IMAGES" --val "$((IMAGES / 10))" --test 0 --workers "$(getconf _NPROCESSORS_ONLN)" &&
            python -m iep.cli.preprocess "$OUT/clevr" --out "$OUT/data" --backbone synth --dtype float16 >"$OUT/data.part"
        ;;
    train)
        timeout --signal TERM $SECONDS_OF_TRAINING python -m iep.cli.train --config "$CONFIG" --data "$OUT/data" \
            --out "$OUT/run" --resume log_every=100 validate_every=500 >"$OUT/train.log" 2>&1 ||
            [ $? = 124 ] || { tail -n 1 "$OUT/train.log" >&2 && return 1; } # 124: the end of the time
        cp "$OUT/run/metrics.jsonl" "$OUT/train.part"
        ;;
    processes)
        if [ "$GPUS" -lt 2 ]; then
            echo "There are $GPUS GPUs, and two are needed." >"$OUT/processes.part"
        else
            python -m benchmarks processes --data "$OUT/data" --config "iep/configs/$CONFIG.yaml" --processes 1,2 \
                --iterations 300 --out "$OUT/processes" >"$OUT/processes.part"
        fi
        ;;
    report) report ;;
    esac
}

report() { # one file of all parts, which goes to the dated measurements if there is a GPU
    local part file=benchmarks/results/$(date +%F)-gpu.md
    {
        echo "# $(date +%F): $(python -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")')"
        for part in tests float32 bfloat16 experts profile train processes; do
            printf '\n## %s\n\n```\n' "$part"
            if [ -e "$OUT/$part.txt" ]; then
                cat "$OUT/$part.txt"
            elif [ -e "$OUT/$part.part" ]; then
                echo "failed; its output until then:" && cat "$OUT/$part.part"
            else
                echo "was not run"
            fi
            echo '```'
        done
    } >"$OUT/report.part"
    if [ "$GPUS" = 0 ]; then file=$OUT/report.md; fi
    cp "$OUT/report.part" "$file" && echo "Wrote $file"
}

failed=
for part in "${PARTS[@]}"; do
    if [ -e "$OUT/$part.txt" ] && [ "$part" != report ]; then
        echo "$part: $OUT/$part.txt is there"
        continue
    fi
    echo "$part"
    if run "$part"; then
        mv "$OUT/$part.part" "$OUT/$part.txt"
    else
        failed+=" $part"
    fi
done
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
