#!/usr/bin/env bash
# ./run.sh [speedrun|demo|test] [--repeat=N] [flags for train_gpt.py, or for pytest]
#
# Finds or makes a Python environment, makes or downloads the data, checks everything, and trains. Without an argument it
# runs the speedrun where a CUDA GPU is present and the demo elsewhere. --repeat=N trains N times, each with a seed of its
# own, and ends with the table of those runs. Environment variables: PYTHON (the interpreter), NPROC (processes on this
# machine; default: one a GPU), and for several machines NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, as for torchrun.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { echo "run.sh: $*"; }
die() { echo "error: $*" >&2; exit 2; }

# 1. What is asked for
mode=
case "${1:-}" in
  speedrun|demo|test) mode=$1; shift ;;
  ""|--*) ;;
  *) die "$1 is neither speedrun, demo nor test; ./run.sh [speedrun|demo|test] [--flag=value ...]" ;;
esac
repeat= records=records flags=(${mode:+--preset="$mode"}) tests=()
if [ "$mode" = test ]; then
  flags=() tests=("$@")
  set --
fi
while [ $# -gt 0 ]; do
  case "$1" in
    --repeat=*) repeat=${1#*=} ;;
    --repeat) repeat=${2:-}; shift ;;
    --records=*) records=${1#*=}; flags+=("$1") ;;
    --records) records=${2:-}; flags+=("$1") ;;
    *) flags+=("$1") ;;
  esac
  shift || true
done
asked=" ${flags[*]-} "
if [ -n "$repeat" ]; then
  [[ "$repeat" =~ ^[1-9][0-9]*$ ]] || die "--repeat=$repeat is no number of runs; try --repeat=5"
  case "$asked" in *" --resume"*) die "--repeat starts runs anew; resume the unfinished one first, without --repeat" ;; esac
  case "$asked" in *" --seed"*) die "--repeat draws a seed for every run; leave --seed out" ;; esac
fi
help=
case "$asked" in *" --help "*|*" -h "*) help=yes flags=() ;; esac

# 2. An interpreter with what is needed: one that has it already, else .venv
needed="torch numpy tqdm huggingface_hub"
[ "$mode" = test ] && needed="$needed tiktoken scipy matplotlib pyarrow pytest xdist hypothesis"
probe() {  # if the interpreter $1 has what is needed, what it and the flags say; or "error: ..." where the flags are wrong
  needed="$needed" "$1" - ${flags[@]+"${flags[@]}"} <<'PY' 2>/dev/null
import importlib.util, os, platform, sys
assert sys.version_info >= (3, 10) and all(importlib.util.find_spec(name) for name in os.environ["needed"].split())
import torch
assert tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11)
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
try:
    from train_gpt import parse_flags
    hp, command = parse_flags(sys.argv[1:], "speedrun" if gpus else "demo")
except Exception as e:
    wrong = "" if type(e).__name__ == "UserError" else f"train_gpt.py cannot be imported: {type(e).__name__}: "
    sys.exit(print(f"error: {wrong}{e}"))
steps_a_chunk = (100_000_000 - 1) // (hp.micro_batches * hp.train_seq_len)  # a chunk of FineWeb is 100M tokens
chunks = -(-hp.num_iterations // max(1, steps_a_chunk * hp.epochs))
print(platform.python_version(), torch.__version__, gpus, cores, command.preset, hp.micro_batches, chunks)
PY
}
python= facts=
for candidate in ${PYTHON:-} .venv/bin/python python3 python; do
  if command -v "$candidate" >/dev/null && facts=$(probe "$candidate"); then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  base=${PYTHON:-$(command -v python3 || command -v python || true)}
  [ -n "$base" ] || die "no Python found; install Python 3.10 or newer"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$base is older than Python 3.10; set PYTHON to a newer one"
  say "making .venv with the packages of requirements.txt (once; torch is large)"
  [ -x .venv/bin/python ] || "$base" -m venv .venv || die "$base cannot make a virtual environment; install its venv module"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
    die "the packages of requirements.txt cannot be installed; see pip's message above"
  python=.venv/bin/python
  facts=$(probe "$python") || die ".venv lacks a package or torch cannot be imported; remove .venv and start again"
fi
if [[ "$facts" == error:* ]]; then die "${facts#error: }"; fi
[ -z "$help" ] || exec "$python" train_gpt.py --help
read -r python_version torch_version gpus cores preset micro_batches chunks <<<"$facts"
say "using $(command -v "$python") (Python $python_version, torch $torch_version)"
if [ "$mode" = test ]; then
  exec "$python" -m pytest ${tests[@]+"${tests[@]}"}
fi
[ -n "$mode" ] || flags=(--preset="$preset" ${flags[@]+"${flags[@]}"})

# Processes: one a GPU, or one a CPU core; as many of them as divide the micro-batches, so that the training is the same
nodes=${NNODES:-1}
units=$(( gpus > 0 ? gpus : cores ))
ranks=${NPROC:-$units}
if [ -z "${NPROC:-}" ]; then
  while [ "$ranks" -gt 1 ] && [ $(( micro_batches % (ranks * nodes) )) -ne 0 ]; do ranks=$(( ranks - 1 )); done
fi
if [ "$gpus" -eq 0 ]; then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # processes of one thread are as fast as threads of one process
fi
say "preset $preset on $gpus CUDA GPU(s) and $cores core(s): $ranks process(es) on each of $nodes machine(s)"
if [ "$gpus" -gt "$ranks" ]; then say "$(( gpus - ranks )) GPU(s) idle: $micro_batches micro-batches do not divide by more ranks (--micro_batches)"; fi

# 3. Data: made or fetched only where the flags name the preset's own files
own_data=yes
for flag in "${flags[@]}"; do
  case "$flag" in
    --train_files*|--val_files*) own_data= ;;
  esac
done
if [ -z "$own_data" ]; then
  say "data: as the flags say"
elif [ "$preset" = demo ]; then
  if compgen -G "data/demo/demo_train_*.bin" >/dev/null && compgen -G "data/demo/demo_val_*.bin" >/dev/null; then
    say "data: data/demo is there"
  else
    stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    say "data: making data/demo from the standard library in $stdlib, bytes as tokens"
    "$python" data/tokenize_text.py "$stdlib" --glob '**/*.py' --exclude site-packages --exclude dist-packages --exclude test \
      --exclude tests --exclude idle_test --shuffle --out data/demo --name demo --tokenizer bytes --val_fraction 0.05
  fi
else
  say "data: $chunks chunk(s) of FineWeb10B for training and the validation shard, in data/fineweb10B"
  "$python" data/fineweb.py --num_chunks "$chunks"
fi

# 4. Every check of the settings and the data, before anything slow
checked=("${flags[@]}")
if [ "${NODE_RANK:-0}" != 0 ]; then  # the first machine alone has the records that --resume reads
  checked=()
  for flag in "${flags[@]}"; do [[ "$flag" == --resume* ]] || checked+=("$flag"); done
fi
WORLD_SIZE=$((ranks * nodes)) "$python" train_gpt.py --check "${checked[@]}"
case "$asked" in *" --check "*) exit 0 ;; esac

# 5. Train
if [ "$nodes" -gt 1 ]; then
  [ -n "${MASTER_ADDR:-}" ] || die "NNODES=$nodes needs MASTER_ADDR (the first machine's address) and NODE_RANK (0 to $((nodes - 1)))"
  launch=(-m torch.distributed.run --nnodes="$nodes" --node_rank="${NODE_RANK:-0}" --master_addr="$MASTER_ADDR"
          --master_port="${MASTER_PORT:-29500}" --nproc_per_node="$ranks")
elif [ "$ranks" -gt 1 ] || [ "$gpus" -gt 0 ]; then
  launch=(-m torch.distributed.run --standalone --nproc_per_node="$ranks")
else
  launch=()
fi
say "starting: $python${launch[*]:+ ${launch[*]}} train_gpt.py ${flags[*]}"
if [ -z "$repeat" ]; then
  exec "$python" ${launch[@]+"${launch[@]}"} train_gpt.py "${flags[@]}"
fi
since=$(mktemp)
trap 'rm -f "$since"' EXIT
for run in $(seq "$repeat"); do
  say "run $run of $repeat"
  "$python" ${launch[@]+"${launch[@]}"} train_gpt.py "${flags[@]}" || die "run $run of $repeat failed; the logs before it are kept"
done
find "$records" -maxdepth 1 -name '*.log' -newer "$since" -print0 | sort -z | xargs -0 "$python" records/compare.py
