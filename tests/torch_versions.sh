#!/usr/bin/env bash
# Whether the repository works with other versions of torch: the test suite, and the losses at which
# 20 steps of the demo end, on a CPU.
#
#   tests/torch_versions.sh 2.9.1 2.11.0                           # all tests, with each version
#   tests/torch_versions.sh 2.15.0 -- tests/test_loader.py -n 0    # words after -- go to pytest
#   tests/torch_versions.sh --envs=FOLDER 2.9.1                    # environments FOLDER/t<VERSION>
#
# An environment is made where there is none, by the interpreter in the variable PYTHON (python3),
# in .torch_versions/, and takes some 5 GB. Exit status: 0 if with every version all tests passed
# and the demo ended in the same losses, 1 if not, 2 for wrong usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
envs=.torch_versions
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        --envs=*) envs=${1#*=} ;;
        [0-9]*.[0-9]*) versions+=("$1") ;;
        *) echo "error: $1 is neither --envs=FOLDER nor a version, as 2.9.1" >&2; exit 2 ;;
    esac
    shift
done
if [ ${#versions[@]} -eq 0 ]; then
    echo "error: name one or more versions of torch, as 2.9.1" >&2
    exit 2
fi
mkdir -p "$envs"
export CUDA_VISIBLE_DEVICES=
failed=0
first_losses=
table=$(printf '%-9s %-45s %s' torch tests "losses of the demo's last step")
for version in "${versions[@]}"; do
    env=$envs/t$version
    if ! PYTHON=$env/bin/python ./run.sh test --version > "$env.tests" 2>&1; then
        echo "torch_versions: making $env"
        "${PYTHON:-python3}" -m venv "$env"
        # Triton's interpreter before 3.7 needs the older NumPy.
        "$env/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" \
            'numpy<2.4' $(grep -Ev '^(#|torch|triton|numpy)' requirements.txt)
    fi
    echo "torch_versions: torch $version: tests, into $env.tests"
    PYTHON=$env/bin/python ./run.sh test "${@:2}" > "$env.tests" 2>&1 || failed=1
    echo "torch_versions: torch $version: demo, into $env.demo"
    PYTHON=$env/bin/python ./run.sh demo --num_iterations=20 --seed=1 --dtype=float32 \
        --save_every=0 --name=torch_versions --records="$env.records" > "$env.demo" 2>&1 || failed=1
    losses=$(sed -n 's|^step:20/20 \([^ ]*\) .*|\1|p' "$env.demo" | paste -sd ' ')
    first_losses=${first_losses:-$losses}
    [ -n "$losses" ] && [ "$losses" = "$first_losses" ] || failed=1
    table+=$'\n'$(printf '%-9s %-45s %s' "$version" "$(tail -n 1 "$env.tests")" "$losses")
done
echo "$table"
exit $failed
