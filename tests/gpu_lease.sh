#!/usr/bin/env bash
# The first half hour on a GPU, in three calls of nine minutes, and a day on eight.
#
#   tests/gpu_lease.sh data TEXT      # beforehand, on any machine: token shards in data/lease
#   tests/gpu_lease.sh 1              # does it run?
#   tests/gpu_lease.sh 2              # how fast is it, and where does the time go?
#   tests/gpu_lease.sh 3              # the record's model and steps beside ours
#   tests/gpu_lease.sh all --minutes=60 --record=LOG    # all three, then whole runs, on all GPUs
#
#   --minutes=N        the time of the whole call (9); with less, each part has less in proportion
#   --only=REGEX       only the parts whose names it fits
#   --out=FOLDER       for the results, at most 8 files below 16 MiB (records/gpu_lease)
#   --data=FOLDER      of *_train_*.bin and *_val_*.bin (data/lease; of stage `all`, data/fineweb10B)
#   --record=LOG       a log of record 2025-01-26, for its source (without it, no comparison)
#   --predicted=JSON   {"part": milliseconds}, shown beside what stage 2 measures of each part
#   --cpu              a rehearsal without a GPU, with small settings
#
# Other flags go to the training scripts (of `data`, to data/tokenize_text.py). tests/gpu.md says
# what to look at. Nothing is fetched, and nothing is written but --out, data/lease and
# data/lease_work. PYTHON names the interpreter (.venv's, else python3).
#
# Each part prints a line: its name, how it ended, its seconds, and its figure or the last line of
# its error. The lines also go to summary.txt, and all output at once to output.txt, so that what
# was measured is there whenever this is killed. A part that takes too long is ended, and the next
# one runs. Exit status: 0 if all parts passed, 1 if one did not, 2 for wrong usage.
set -euo pipefail
die() { echo "error: $*" >&2; exit 2; }

stage=${1:-}
case $stage in
    data) text=${2:-}; [ -n "$text" ] && text=$(realpath -e -- "$text") || die "data takes a TEXT"
        shift ;;
    1|2|3|all) ;;
    -h|--help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    *) die "name a stage: data, 1, 2, 3 or all; the first lines of $0 say what they are" ;;
esac
shift
minutes=9 only= out= data= record= predicted= cpu= more=()
for flag; do
    case $flag in
        --minutes=*) minutes=${flag#*=} ;;
        --only=*) only=${flag#*=} ;;
        --out=*) out=$(realpath -m -- "${flag#*=}") ;;
        --data=*) data=$(realpath -m -- "${flag#*=}") ;;
        --record=*) record=$(realpath -m -- "${flag#*=}") ;;
        --predicted=*) predicted=$(realpath -m -- "${flag#*=}") ;;
        --cpu) cpu=--cpu ;;
        *) more+=("$flag") ;;
    esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
[[ $minutes =~ ^[1-9][0-9]*$ ]] || die "--minutes=$minutes is no whole number above 0"
for file in "$record" "$predicted"; do
    [ -z "$file" ] || [ -f "$file" ] || die "$file: there is no such file"
done
python=${PYTHON:-$([ -x .venv/bin/python ] && echo "$root/.venv/bin/python" || echo python3)}

# The demo trains on this repository, byte by byte; to be followed by a folder.
bytes_into=("$python" data/tokenize_text.py train_gpt.py records tests --glob '*.py'
            --glob '*.md' --name bytes --tokenizer bytes --val_fraction 0.2 --out)
if [ "$stage" = data ]; then
    data=${data:-data/lease}
    "${bytes_into[@]}" "$data/bytes"
    # A validation loss needs 2^20 tokens of whole documents, of which there may be 10 % fewer. With
    # shards of 16M tokens, one to train and one to validate are 35 MB to take along.
    exec "$python" data/tokenize_text.py "$text" --out "$data" --name text --tokenizer gpt2 \
        --val_tokens 1200000 --shard_size 16000000 "${more[@]}"
fi

end=$((SECONDS + 60 * minutes - 15))  # what is left is for the last part to end, and to pack
work=$root/data/lease_work
out=${out:-$root/records/gpu_lease}
mkdir -p "$out" "$work/tmp" "$work/forty"
# All that torch, Triton and CUDA keep from start to start lies in the work folder. Processes of one
# machine find each other without a network. If one is ended because it hangs, it prints where.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} \
    TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton TRITON_HOME=$work \
    CUDA_CACHE_PATH=$work/cuda XDG_CACHE_HOME=$work MPLCONFIGDIR=$work TMPDIR=$work/tmp \
    PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
ulimit -c 0
lease=("$python" tests/gpu_lease.py)
gpus=$("${lease[@]}" gpus) || die "$python cannot import torch"
[ "$gpus" -gt 0 ] || [ -n "$cpu" ] || die "torch sees no CUDA GPU; --cpu rehearses without one"
if [ -z "$data" ]; then
    # Whole runs need FineWeb; the rest does with what is there.
    data=$root/data/$([ -d data/lease ] && echo lease || echo fineweb10B)
    [ "$stage" != all ] || [ ! -d data/fineweb10B ] || data=$root/data/fineweb10B
fi
for side in train val; do
    compgen -G "$data/*_${side}_*.bin" > /dev/null || die "$data has no *_${side}_*.bin: first" \
        "run tests/gpu_lease.sh data TEXT, or where there is a network ./run.sh speedrun --check"
done
touch "$work/started"

failed=
signal=  # that ends a part which takes too long; ABRT has Python say where it is
child=
trap '[ -z "$child" ] || kill "$child" 2> /dev/null; exit 130' INT TERM

line() {  # TEXT: to the console and to the summary
    echo "$1" | tee -a "$out/summary.txt"
}

# part NAME SECONDS COMMAND...: runs a command, but not for longer than this and than is left.
part() {
    local name=$1 limit=$2 began=$SECONDS status=0 left=$((end - SECONDS)) size ended figure
    shift 2
    [[ $name =~ $only ]] || return 0
    [ "$minutes" -ge 9 ] || limit=$((limit * minutes / 9))
    if [ "$left" -lt 10 ]; then
        line "$(printf '%-26s %-10s %4d s  %s' "$name" "not run" 0 "no time is left")"
        return
    fi
    [ "$limit" -le "$left" ] || limit=$left
    [ ! -t 1 ] || printf '%-26s ...\r' "$name"
    printf '\n== %s, for at most %d s: %s\n' "$name" "$limit" "$*" >> "$out/output.txt"
    size=$(stat -c %s "$out/output.txt")
    timeout --signal="${signal:-ABRT}" --kill-after=8 "$limit" "$@" >> "$out/output.txt" 2>&1 &
    child=$!
    wait "$child" || status=$?
    child=
    case $status in
        0) ended=ok ;;
        124|137) ended="cut off" ;;
        *) ended="failed, $status" ;;
    esac
    [ "$status" -eq 0 ] || failed="$failed, $name"
    figure=$("${lease[@]}" figure "$out/output.txt" "$size" "$status") || true
    line "$(printf '%-26s %-10s %4d s  %s' "$name" "$ended" $((SECONDS - began)) "$figure")"
    keep
}

keep() {  # packs the logs, and keeps to the limits on what is brought back
    find "$work" -maxdepth 3 -newer "$work/started" \( -name '*.log' -o -path '*/logs/*.txt' \) \
            -printf '%P\0' |
        tar -czf "$work/logs.tar.gz" -C "$work" --null --files-from=- 2> /dev/null
    mv "$work/logs.tar.gz" "$out/"
    find "$out" -maxdepth 1 -type f -size +15M ! -name output.txt -delete
    if [ "$(stat -c %s "$out/output.txt")" -gt 15000000 ]; then
        truncate -s 15000000 "$out/output.txt"
    fi
}

# Flags of a training run of full size; the script takes the last of two equal ones. The demo and
# the attempt have other settings than the ones that a rehearsal makes small.
text=(--train_files="$data/*_train_*.bin" --val_files="$data/*_val_*.bin" --epochs=100)
folder=$([ -e "$data/bytes" ] && echo "$data/bytes" || echo "$work/bytes")
bytes=(--train_files="$folder/*_train_*.bin" --val_files="$folder/*_val_*.bin" --epochs=1000
       --val_tokens=0)
ours=(train_gpt.py --preset=speedrun "${text[@]}" --val_tokens=1048576 --seed=1 --save_every=0
      --records="$work/runs" "${more[@]}")
attempt=(records/speedrun_2026/train_gpt.py "${text[@]}" --seed=1 --save_every=0
         --records="$work/runs" --name=attempt)
beside=(tests/bench_record.py "$record" $cpu "${ours[@]:1}")

on() {  # GPUS COMMAND...: the command that starts a script on so many GPUs
    local ranks=$1
    shift
    signal=
    if [ "$ranks" -gt 1 ]; then
        signal=TERM  # on which torchrun ends its processes
        launch=("$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$@")
    else
        launch=("$python" "$@")
    fi
}

does_it_run() {
    local demo=(train_gpt.py --preset=demo "${more[@]}" "${bytes[@]}" --records="$work/runs"
                --num_iterations=50 --val_loss_every=25 --save_every=0)
    [ -e "$folder" ] || part "text for the demo" 30 "${bytes_into[@]}" "$folder"
    on 1 "${demo[@]}"
    part "demo" 120 "${launch[@]}"
    if [ "$gpus" -gt 1 ]; then
        on $((gpus < 4 ? 2 : 4)) "${demo[@]}"
        part "demo, on several GPUs" 120 "${launch[@]}"
        signal=
    fi
    part "12 steps of full size" 240 "$python" "${ours[@]}" --num_iterations=12 \
        --val_loss_every=12 --name=first
    # So few tokens that a CPU can train on them, in float32.
    local few=(--micro_batches=1 --train_seq_len=2048 --val_seq_len=2048 --val_tokens=2048
               --num_iterations=3 --val_loss_every=3)
    part "3 steps of 2K tokens" 120 "$python" "${ours[@]}" "${few[@]}" --name=few
    part "the same on the CPU" 120 env CUDA_VISIBLE_DEVICES= "$python" "${ours[@]}" "${few[@]}" \
        --name=few_cpu --dtype=float32
    local signal=INT  # pytest then prints what has failed so far
    local pytest=("$python" -m pytest -o addopts= -m gpu -q -rfEP --tb=short tests/test_gpu.py
                  --basetemp="$work/tmp/pytest" -o faulthandler_timeout=100)
    part "tests: attention" 200 "${pytest[@]}" -k flex_attention
    part "tests: FP8, a step" 120 "${pytest[@]}" -k "fp8_head or one_training_step"
    part "tests: the others" 900 "${pytest[@]}" \
        -k "not (flex_attention or fp8_head or one_training_step)"
}

how_fast() {
    part "60 steps, then killed" 240 "${lease[@]}" kill_at 60 "$python" "${ours[@]}" \
        --num_iterations=100 --val_loss_every=50 --save_every=50 --name=short
    part "benchmark" 270 "$python" tests/bench_gpu.py $cpu --use_cache "${ours[@]:1}" \
        --json="$out/bench.json" --trace="$out/trace.json.gz" \
        ${predicted:+--predicted="$predicted"}
    local checkpoints=("$work"/runs/*_short/step*.pt)
    part "resumed at step 50" 240 "$python" train_gpt.py --resume="${checkpoints[-1]}"
}

beside_the_record() {
    if [ -n "$record" ]; then
        part "models in turn" 300 "$python" "${beside[@]}" --json="$out/beside.json"
    fi
    local steps=(--num_iterations=40 --val_loss_every=20)
    part "40 steps" 150 "$python" "${ours[@]}" "${steps[@]}" --name=forty
    if [ -n "$record" ] && [ "$gpus" -gt 0 ]; then
        part "the record's script" 20 "${lease[@]}" record "$record" "$work/record.py" \
            "${ours[@]}" "${steps[@]}"
        part "40 of the record's script" 240 env -C "$work/forty" RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 \
            MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 "$python" "$work/record.py"
    fi
    if [ -z "$cpu" ]; then
        part "40 of the attempt" 240 "$python" "${attempt[@]}" --preset=speedrun "${steps[@]}" \
            --val_tokens=1048576
    else
        part "40 of the attempt's demo" 240 "$python" "${attempt[@]}" --preset=demo "${bytes[@]}" \
            "${steps[@]}"
    fi
    if [ -n "$record" ]; then
        part "models in turn, tuned" 500 env TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 \
            "$python" "${beside[@]}" --json="$out/beside_tuned.json"
    fi
}

# Whole speedruns, in turn with those of the record's script, as many as there is time for. On one
# machine, so that they compare.
whole_runs() {
    local ranks=1 n pair=0 began
    for n in 2 4 8; do
        [ "$n" -gt "$gpus" ] || ranks=$n
    done
    local run=(--train_files="$data/*_train_*.bin" --val_files="$data/*_val_*.bin"
               --val_tokens=10485760 "${more[@]}")
    if [ "${data##*/}" != fineweb10B ]; then
        line "whole runs need data/fineweb10B"
        return
    fi
    rm -rf "$work/whole"  # runs of an earlier call
    mkdir -p "$work/whole"
    signal=
    if [ -n "$record" ]; then
        part "the record's script" 20 "${lease[@]}" record "$record" "$work/record.py" \
            "${run[@]}" --num_iterations=1770 --val_loss_every=125
    fi
    for n in 1 2 3 4 5; do
        if [ $((end - SECONDS)) -lt "$pair" ] || [[ $failed = *"whole run"* ]]; then
            break
        fi
        began=$SECONDS
        on "$ranks" train_gpt.py --preset=speedrun --records="$work/whole" --save_every=0 \
            "${run[@]}"
        part "whole run $n" 5400 "${launch[@]}"
        if [ -n "$record" ] && [ "$gpus" -gt 0 ]; then
            on "$ranks" "$work/record.py"
            [ "$ranks" -gt 1 ] || launch=(RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
                                          MASTER_PORT=29517 "${launch[@]}")
            part "record's whole run $n" 5400 env -C "$work/whole" "${launch[@]}"
        fi
        pair=$((SECONDS - began))
    done
    if compgen -G "$work/whole/logs/*.txt" > /dev/null; then
        signal=
        part "verdict" 60 "$python" records/compare.py "$work"/whole/*.log --vs "$work/whole/logs"
    fi
}

line "$(date -u +%Y-%m-%dT%H:%MZ) stage $stage, $minutes min, $gpus GPU(s), data $data"
part machine 60 "${lease[@]}" machine
case $stage in
    1) does_it_run ;;
    2) how_fast ;;
    3) beside_the_record ;;
    all) does_it_run; how_fast; beside_the_record; whole_runs ;;
esac
line "results: $out$([ -z "$failed" ] || echo "; did not pass: ${failed#, }")"
[ -z "$failed" ]
