#!/usr/bin/env bash
# What needs a GPU, in three parts of less than ten minutes each, and one dated report.
#
#   [PYTHON=python3] scripts/gpu.sh [OUT] [PART]...        (OUT: runs/gpu; PART: 1 2 3, all by default)
#
# 1: versions, the tests that need a GPU, and the engine by calls and one node at a time at 64 questions. 2: both memory
# formats, and calls, triton and cuda_graph at 64, 256 and 1,024 questions. 3: a profile, and the losses of short
# trainings by calls and by cuda_graph. Each part writes its section of the report while it runs, so that one that is cut
# off leaves what it has; a command that fails is named there. With a GPU, the report goes to benchmarks/results/.
# QUICK=1 makes everything tiny, for a trial without a GPU.
set -uo pipefail
shopt -s nullglob
case ${1-} in
-h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 0 ;;
esac
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # so that iep need not be installed
OUT=${1:-runs/gpu}
shift
NAME=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")') || exit 1
SIZES=64,256,1024 DEVICE=cuda PRESET=clevr IMAGES=500 CONFIG=synth/ee ITERATIONS=200
KERNELS="triton cuda_graph" CAPTURED=cuda_graph ENGINE=()
if [ "$NAME" = "no GPU" ]; then DEVICE=cpu KERNELS= CAPTURED=calls; fi
if [ -n "${QUICK-}" ]; then
    SIZES=4,8 PRESET=mini IMAGES=8 CONFIG=mini/ee ITERATIONS=5
    ENGINE=(--feature-shape 8 4 4 engine.stem_widths=[] engine.module_dim=4)
fi
mkdir -p "$OUT"

section() { # TITLE COMMAND...: run the command, and append its output to the report of this part
    local status
    echo "$1"
    printf '\n## %s\n\n```\n' "$1" >>"$REPORT"
    "${@:2}" 2>&1 | sed -u 's|.*\r||' | tee -a "$REPORT" # the last state of progress bars
    status=${PIPESTATUS[0]}
    if [ "$status" != 0 ]; then echo "FAILED with exit code $status" | tee -a "$REPORT" && FAILED+="; $1"; fi
    printf '```\n' >>"$REPORT"
}

engine() { # NAME BATCH_SIZES STRATEGIES OPTION...
    "$PYTHON" -m iep.cli.bench engine --phase train --device "$DEVICE" --batch-sizes "$2" --batching "$3" \
        --repeat 10 --max-seconds 5 --out "$OUT/$1" "${@:4}" "${ENGINE[@]}"
}

strategies() { # all that part 2 compares
    local each found=lookahead+sharing,lookahead+sharing+bfloat16
    for each in $KERNELS; do found+=,lookahead+sharing+$each+bfloat16; done
    echo "$found"
}

versions() {
    "$PYTHON" -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)'
    if [ "$DEVICE" = cuda ]; then nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv; fi
    git log -1 --format='iep %h of %cs' 2>/dev/null || echo "iep ${COMMIT-of an unknown commit}"
}

losses() { # train by calls and by cuda_graph from the same weights on the same minibatches, and compare
    if [ ! -e "$OUT/data/vocab.json" ]; then
        rm -rf "$OUT/clevr"
        "$PYTHON" -m iep.cli.synth "$OUT/clevr" --preset "$PRESET" --train "$IMAGES" --val 10 --test 0 >/dev/null &&
            "$PYTHON" -m iep.cli.preprocess "$OUT/clevr" --out "$OUT/data" --backbone synth --dtype float16 >/dev/null || return
    fi
    local each
    for each in calls $CAPTURED; do
        rm -rf "$OUT/train-$each"
        "$PYTHON" -m iep.cli.train --config "$CONFIG" --data "$OUT/data" --out "$OUT/train-$each" device="$DEVICE" seed=0 \
            iterations=$ITERATIONS log_every=1 precision=bfloat16 execution="$each" curriculum=[] \
            engine.module_settings.context=false | grep -v ' iteration [0-9]* of' || return # kernels run convolutions alone
    done
    "$PYTHON" - "$OUT/train-calls/metrics.jsonl" "$OUT/train-$CAPTURED/metrics.jsonl" <<'END'
import json
import sys

runs = []
for name in sys.argv[1:]:
    with open(name) as file:
        runs.append([row for row in map(json.loads, file) if "loss" in row])
print(f"{'step':>5} {'calls':>10} {'captured':>10} {'difference':>10}")
for calls, captured in zip(*runs, strict=True):
    if calls["step"] in (1, 2, 3, 5, 10, 20, 50, 100, 150, 200):
        difference = abs(captured["loss"] / calls["loss"] - 1)
        print(f"{calls['step']:>5} {calls['loss']:>10.4f} {captured['loss']:>10.4f} {difference:>10.1e}")
print("questions/s at the end:", *(f"{run[-1]['questions_per_second']:.0f}" for run in runs))
END
}

part() {
    case $1 in
    1)
        section versions versions
        section tests "$PYTHON" -m pytest -m gpu -n 8 -q -p no:cacheprovider --continue-on-collection-errors
        section "64 questions" engine 64 "${SIZES%%,*}" vanilla,lookahead,lookahead+sharing,vanilla+bfloat16,lookahead+sharing+bfloat16
        ;;
    2)
        for format in channels-first channels-last; do
            section "$format" engine $format "$SIZES" lookahead+sharing,lookahead+sharing+bfloat16 --memory-format $format
        done
        section "ways to execute" engine ways "$SIZES" "$(strategies)"
        ;;
    3)
        section profile "$PYTHON" scripts/profile_step.py --batch-sizes "${SIZES%%,*},${SIZES##*,}" --device "$DEVICE" "${ENGINE[@]}"
        section "losses of calls and $CAPTURED" losses
        ;;
    *) echo "$1: unknown part, expected 1, 2 or 3" >&2 && exit 2 ;;
    esac
}

report() { # all parts that have run, in one file
    local each file=$OUT/report.md
    if [ "$DEVICE" = cuda ]; then file=benchmarks/results/$(date +%F)-gpu.txt; fi
    {
        echo "# $(date +%F): $NAME"
        for each in "$OUT"/part-?.md; do cat "$each"; done
    } >"$file" && echo "Wrote $file"
}

FAILED=
trap 'report; exit 130' INT
trap 'report; exit 143' TERM
[ $# -gt 0 ] || set -- 1 2 3
for part in "$@"; do
    REPORT=$OUT/part-$part.md
    case $part in [123]) : >"$REPORT" ;; esac
    part "$part"
    report
done
if [ -n "$FAILED" ]; then
    echo "failed: ${FAILED#; }" >&2
    exit 1
fi
