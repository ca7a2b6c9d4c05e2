#!/usr/bin/env bash
# Everything that a person with GPUs should run, in one go, packed into one file to send back.
#
#   tests/gpu_day.sh [--dry-run] [--only=STAGE,...] [--record=FILE]
#
# The stages, in this order: check, tests, bench, short, full, compare. tests/README.md says what
# each does, how long it takes and what to look at. --only makes some of them. --record names the
# published record's own train_gpt.py, which `compare` races against on the same machine.
#
# --dry-run shows the plan and runs the part of it that needs no GPU, with small settings: it tries
# this script, and its figures mean nothing.
#
# A stage that fails is noted, and the next one runs. The last line names the packed file. Exit
# status: 0 if all stages passed, 1 if one failed, 2 for wrong usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry_run=
record=
only=check,tests,bench,short,full,compare
for argument; do
    case $argument in
        --dry-run) dry_run=1 ;;
        --only=*) only=${argument#*=} ;;
        --record=*) record=$(realpath "${argument#*=}") ;;
        *) echo "error: $argument is not a flag of tests/gpu_day.sh: see its first lines" >&2
           exit 2 ;;
    esac
done
for stage in ${only//,/ }; do
    case $stage in
        check|tests|bench|short|full|compare) ;;
        *) echo "error: --only=$stage: the stages are check, tests, bench, short, full, compare" >&2
           exit 2 ;;
    esac
done

# run.sh names the interpreter that it has found or made in its first line.
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=$(./run.sh test --version | sed -n 's|^run.sh: using \(.*\) (Python.*|\1|p')
fi
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ] && [ -z "$dry_run" ]; then
    echo "error: torch sees no CUDA GPU; --dry-run shows the plan without one" >&2
    exit 2
fi

name=gpu_day_$(date -u +%Y-%m-%dT%H-%M-%SZ)
out=records/$name
mkdir -p "$out"
failed=

# plan STAGE MINUTES WHAT: a line of the plan
plan() {
    printf '%-8s %4s GPU minutes   %s\n' "$1" "$2" "$3"
}

# run STAGE COMMAND...: runs a stage if it was asked for; its output goes to the console and to a
# file, its status and its seconds to stages.txt.
run() {
    local stage=$1 began=$SECONDS status=0
    shift
    case ,$only, in *,$stage,*) ;; *) return 0 ;; esac
    echo "gpu_day: $stage: $*"
    "$@" > >(tee "$out/$stage.txt") 2>&1 || status=$?
    echo "$stage: status $status after $((SECONDS - began)) s: $*" >> "$out/stages.txt"
    if [ "$status" -ne 0 ]; then
        failed="$failed $stage"
    fi
}

versions() {
    date -u
    git rev-parse HEAD 2> /dev/null || true
    git status --short 2> /dev/null || true
    sha256sum train_gpt.py
    uname -a
    "$python" -m torch.utils.collect_env
    nvidia-smi 2> /dev/null || echo "no nvidia-smi"
    nvidia-smi topo -m 2> /dev/null || true
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit,memory.total \
        --format=csv 2> /dev/null || true
}

launch() {  # SCRIPT FLAGS...: on all GPUs that can share 8 micro-batches, or in this process
    local ranks=1 n
    for n in 2 4 8; do
        if [ "$n" -le "$gpus" ]; then
            ranks=$n
        fi
    done
    if [ "$ranks" -gt 1 ]; then
        "$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$@"
    else
        "$python" "$@"
    fi
}

# Five runs of each side in turn, so that a machine that changes its speed changes both.
race() {
    if [ -z "$record" ]; then
        echo "skipped: name the published record's script by --record=FILE"
        return 0
    fi
    local i
    for i in 1 2 3 4 5; do
        launch train_gpt.py --preset=speedrun --name=ours --save_every=0 --records="$out/ours"
        launch "$record"
    done
    mkdir -p "$out/record"
    find logs -name '*.txt' -newer "$out/versions.txt" -exec cp {} "$out/record/" \;
    "$python" records/compare.py "$out/ours" --vs "$out/record"
}

echo "The plan, on $gpus GPU(s). Times are for H100s; on another GPU scale them by its speed."
plan check 1 "versions, driver, links; the settings and the data of the speedrun"
plan tests 15 "the tests that need a GPU"
plan bench 5 "rates, a step by part, memory"
plan short 5 "100 steps of the speedrun"
plan full 30 "one speedrun: the loss should end near 3.28"
plan compare 300 "five speedruns against five of the published record's script (--record=FILE)"
echo

versions > "$out/versions.txt" 2>&1
small=()
if [ -n "$dry_run" ]; then
    # The smallest settings with all parts; the data are made here.
    small=(--windows=LSSL --value_embeds=0..0 --attention=xx.x --model_dim=32 --num_heads=2
           --head_dim=16 --train_seq_len=256 --val_seq_len=512 --window_start=128
           --window_end=512 --micro_batches=2)
    mkdir -p "$out/data"
    "$python" data/tokenize_text.py tests/text.txt --out "$out/data" --name text \
        --tokenizer bytes --val_fraction 0.2 > "$out/data.txt"
    data=(--preset=demo --train_files="$out/data/text_train_*.bin" --epochs=1000
          --val_files="$out/data/text_val_*.bin" --val_tokens=1000 --records="$out/runs")
    run check "$python" train_gpt.py --check "${data[@]}" "${small[@]}"
    run tests "$python" -m pytest -n 0 -q tests/test_gpu.py
    run bench "$python" tests/bench_gpu.py --cpu --repeat=1 --json="$out/bench.json" \
        --preset=demo "${small[@]}" --num_iterations=20
    run short launch train_gpt.py "${data[@]}" "${small[@]}" --num_iterations=2 --name=short
    run full launch train_gpt.py "${data[@]}" "${small[@]}" --num_iterations=4 --name=full
    run compare "$python" records/compare.py "$out/runs"
else
    run check ./run.sh speedrun --check
    run tests "$python" -m pytest -m gpu -n 0 -rP tests/test_gpu.py
    run bench "$python" tests/bench_gpu.py --json="$out/bench.json"
    run short launch train_gpt.py --preset=speedrun --num_iterations=100 --val_loss_every=50 \
        --save_every=0 --name=short --records="$out/runs"
    run full launch train_gpt.py --preset=speedrun --name=full --records="$out/runs"
    run compare race
fi

touch "$out/stages.txt"
echo
cat "$out/stages.txt"
# Checkpoints and token shards stay here; logs, versions and figures are packed.
tar -czf "$name.tar.gz" --exclude='*.pt' --exclude='*.bin' -C records "$name"
if [ -n "$failed" ]; then
    echo "error: these stages failed:$failed; their output is in $out" >&2
fi
echo "gpu_day: send back $name.tar.gz"
[ -z "$failed" ]
