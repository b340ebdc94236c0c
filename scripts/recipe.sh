# What the recipes train_clevr.sh, train_cogent.sh, train_humans.sh and train_short_long.sh share: sourced by them, not run.
#
# Their arguments are directories, in order, and KEY=VALUE settings, which every training step gets. PREPROCESS holds
# options of iep-preprocess. For a small run on small data from iep-synth, say:
#
#   PREPROCESS='--backbone patches' scripts/train_clevr.sh data/mini data/small iterations=100 engine.module_dim=32
set -euo pipefail
shopt -s nullglob
CONFIGS=$(realpath "$(dirname "$0")/../configs")
PLACES=()
SETTINGS=()
for argument in "$@"; do
    case $argument in
    -h | --help) PLACES=() && break ;;
    *=*) SETTINGS+=("$argument") ;;
    *) PLACES+=("$argument") ;;
    esac
done
read -ra PREPROCESS <<<"${PREPROCESS---backbone resnet101 --dtype float16}"

# expect LEAST MOST: print how the script is called and stop, unless it was given so many directories.
expect() {
    if [ ${#PLACES[@]} -lt "$1" ] || [ ${#PLACES[@]} -gt "$2" ]; then
        sed -n 's|^#   \(.*scripts/.*\)|usage: \1|p' "$0" >&2
        exit 2
    fi
}

# train RUN OPTION...: train into RUN, or go on with what stands there.
train() {
    local run=$1
    shift
    iep-train "$@" --out "$run" --resume "${SETTINGS[@]}"
}
