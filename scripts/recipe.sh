# Functions that the recipes share, which source this file.
#
# Their arguments are directories, in order, and KEY=VALUE settings of iep-train, which every training step receives.
# PREPROCESS contains options of iep-preprocess, except for recipes that generate their data. An example of a small run on
# small data from iep-synth:
#
#   PREPROCESS='--backbone synth' scripts/train_clevr.sh data/mini data/small iterations=100 engine.module_dim=32
set -euo pipefail
shopt -s nullglob
CONFIGS=$(realpath "$(dirname "$0")/../configs")
PLACES=()
SETTINGS=()

usage() {
    sed -n 's|^#   \(.*scripts/.*\)|usage: \1|p' "$0"
}

for argument in "$@"; do
    case $argument in
    -h | --help) usage && exit 0 ;;
    -*)
        echo "$argument: settings of iep-train are given as KEY=VALUE, such as batch_size=32" >&2
        exit 2
        ;;
    *=*) SETTINGS+=("$argument") ;;
    *) PLACES+=("$argument") ;;
    esac
done
read -ra PREPROCESS <<<"${PREPROCESS---backbone resnet101 --dtype float16}"

# expect LEAST MOST: print the usage and stop, unless the number of directories is in this range.
expect() {
    if [ ${#PLACES[@]} -lt "$1" ] || [ ${#PLACES[@]} -gt "$2" ]; then
        usage >&2
        exit 2
    fi
}

# say TEXT: print it with the time since the start. step COMMAND...: say the command, and run it.
say() { printf '\n[%02d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }
step() {
    say "$@"
    "$@"
}

# train RUN --config FILE OPTION...: train into RUN, or resume the run that is there. Settings of a network, such as
# engine.module_dim=32, are for the steps that train it, and a curriculum is for questions.
train() {
    local run=$1 setting settings=() model
    model=$(sed -n 's/^model: //p' "$3")
    shift
    for setting in "${SETTINGS[@]}"; do
        case $model:$setting in
        pg:engine.* | ee:generator.* | *lstm*:engine.* | *lstm*:generator.*) ;;
        pg:backbone.* | ee:backbone.* | joint:backbone.* | *lstm*:backbone.*) ;;
        backbone:engine.* | backbone:generator.* | backbone:curriculum=*) ;;
        *) settings+=("$setting") ;;
        esac
    done
    step iep-train "$@" --out "$run" --resume "${settings[@]}"
}

# side_by_side "NAME..." NAME: train models by the recipe's function train_on_data, the first ones in turn beside the last
# one. They, and what follows, run on one thread each: small networks do not gain from a second core, and lose much if
# other work needs it. If the last one fails, those beside it are stopped; all resume when the script is started again.
side_by_side() {
    local log="$OUT/beside_$2.log" name others
    export OMP_NUM_THREADS=1
    for name in $1; do train_on_data "$name"; done >"$log" 2>&1 &
    others=$!
    trap "pkill -P $others || true" EXIT
    train_on_data "$2"
    say "$1, beside $2: $log"
    wait $others || {
        tail -n 5 "$log" >&2
        exit 1
    }
    trap - EXIT
}

# evaluate NAME DIR OPTION...: evaluate into DIR; the table has a column NAME beside those of earlier calls.
AGAINST=()
evaluate() {
    local name=$1 out=$2
    shift 2
    iep-eval "$@" --name "$name" "${AGAINST[@]}" --out "$out"
    AGAINST+=(--against "$name" "$out")
}

# splits DATA SPLIT...: print those of the splits that DATA has questions of; small data sets may not have all.
splits() {
    local data=$1 split
    shift
    for split in "$@"; do
        if [ -e "$data/${split}_questions.h5" ]; then echo "$split"; fi
    done
}
