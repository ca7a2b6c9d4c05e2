#!/usr/bin/env bash
# Whether the repository works with other versions of torch: the test suite, and the losses at which
# 20 steps of the demo end, on a CPU.
#
#   tests/torch_versions.sh 2.9.1 2.11.0
#
# Makes an environment for each version in .torch_versions/, where there is none, with the Python
# that the variable PYTHON names. The status is 1 where tests fail, or the losses differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || { echo "error: name one or more versions of torch, as 2.9.1" >&2; exit 2; }
mkdir -p .torch_versions
export CUDA_VISIBLE_DEVICES=
failed=0
first_losses=
for version; do
    env=.torch_versions/t$version
    if [ ! -e "$env" ]; then
        "${PYTHON:-python3}" -m venv "$env"
        # Triton's interpreter before 3.7 needs the older NumPy.
        "$env/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" \
            'numpy<2.4' $(grep -Ev '^(#|torch|triton|numpy)' requirements.txt)
    fi
    PYTHON=$PWD/$env/bin/python ./run.sh test > "$env.tests" 2>&1 || failed=1
    PYTHON=$PWD/$env/bin/python ./run.sh demo --num_iterations=20 --seed=1 --dtype=float32 \
        --save_every=0 --name=torch_versions --records="$env.records" > "$env.demo" 2>&1 || failed=1
    losses=$(sed -n 's|^step:20/20 \([^ ]*\) .*|\1|p' "$env.demo" | paste -sd ' ')
    first_losses=${first_losses:-$losses}
    [ -n "$losses" ] && [ "$losses" = "$first_losses" ] || failed=1
    echo "torch $version: $(tail -n 1 "$env.tests"); last step of the demo: $losses"
done
exit $failed
