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

mode=auto
case "${1:-}" in
  speedrun|demo|test) mode=$1; shift ;;
  ""|--*) ;;
  *) die "$1 is neither speedrun, demo nor test; ./run.sh [speedrun|demo|test] [--flag=value ...]" ;;
esac

# 1. An interpreter with what is needed: one that has it already, else .venv
needed="torch numpy tqdm huggingface_hub"
[ "$mode" = test ] && needed="$needed tiktoken scipy matplotlib pyarrow pytest hypothesis"
has_needed() {
  "$1" - $needed <<'PY' >/dev/null 2>&1
import importlib.util, sys
assert sys.version_info >= (3, 10) and all(importlib.util.find_spec(name) for name in sys.argv[1:])
import torch
assert tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11)
PY
}
python=
for candidate in ${PYTHON:-} .venv/bin/python python3 python; do
  if command -v "$candidate" >/dev/null && has_needed "$candidate"; then python=$candidate; break; fi
done
if [ -n "$python" ]; then
  say "using $(command -v "$python") ($("$python" -c 'import platform, torch; print("Python", platform.python_version() + ", torch", torch.__version__)'))"
else
  base=${PYTHON:-$(command -v python3 || command -v python || true)}
  [ -n "$base" ] || die "no Python found; install Python 3.10 or newer"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$base is older than Python 3.10; set PYTHON to a newer one"
  say "making .venv with the packages of requirements.txt (once; torch is large)"
  [ -x .venv/bin/python ] || "$base" -m venv .venv || die "$base cannot make a virtual environment; install its venv module"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
    die "the packages of requirements.txt cannot be installed; see pip's message above"
  python=.venv/bin/python
  has_needed "$python" || die ".venv lacks a package or torch cannot be imported; remove .venv and start again"
fi

if [ "$mode" = test ]; then
  exec "$python" -m pytest "$@"
fi

# 2. Hardware and preset
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
if [ "$mode" = auto ]; then
  if [ "$gpus" -gt 0 ]; then mode=speedrun; else mode=demo; fi
fi
ranks=${NPROC:-$(( gpus > 0 ? gpus : 1 ))}
nodes=${NNODES:-1}
say "preset $mode, $gpus CUDA GPU(s), $ranks process(es) on each of $nodes machine(s)"
repeat= records=records arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --repeat=*) repeat=${1#*=} ;;
    --repeat) repeat=${2:-}; shift ;;
    --records=*) records=${1#*=}; arguments+=("$1") ;;
    --records) records=${2:-}; arguments+=("$1") ;;
    *) arguments+=("$1") ;;
  esac
  shift || true
done
set -- ${arguments[@]+"${arguments[@]}"}
if [ -n "$repeat" ]; then
  [[ "$repeat" =~ ^[1-9][0-9]*$ ]] || die "--repeat=$repeat is no number of runs; try --repeat=5"
  case " $* " in *" --seed"*) die "--repeat draws a seed for every run; leave --seed out" ;; esac
fi
flags=(--preset="$mode" "$@")

# 3. Data: made or fetched only where the flags name the preset's own files
own_data=yes
for flag in "$@"; do
  case "$flag" in
    --train_files*|--val_files*) own_data=; say "data: as the flags say" ;;
    --help|-h) exec "$python" train_gpt.py --help ;;
  esac
done
if [ -n "$own_data" ] && [ "$mode" = demo ]; then
  if compgen -G "data/demo/demo_train_*.bin" >/dev/null && compgen -G "data/demo/demo_val_*.bin" >/dev/null; then
    say "data: data/demo is there"
  else
    stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    say "data: making data/demo from the standard library in $stdlib, bytes as tokens"
    "$python" data/tokenize_text.py "$stdlib" --glob '**/*.py' --exclude site-packages --exclude dist-packages --exclude test \
      --exclude tests --exclude idle_test --shuffle --out data/demo --name demo --tokenizer bytes --val_fraction 0.05
  fi
elif [ -n "$own_data" ]; then
  chunks=$("$python" - "${flags[@]}" <<'PY'
import sys
from train_gpt import UserError, parse_flags
try:
    hp, _ = parse_flags(sys.argv[1:], "speedrun")
    steps_a_chunk = (100_000_000 - 1) // (hp.micro_batches * hp.train_seq_len)  # a chunk is 100M tokens
    print(-(-hp.num_iterations // max(1, steps_a_chunk * hp.epochs)))
except UserError as e:
    sys.exit(f"error: {e}")
PY
  ) || exit 2
  say "data: $chunks chunk(s) of FineWeb10B for training and the validation shard, in data/fineweb10B"
  "$python" data/fineweb.py --num_chunks "$chunks"
fi

# 4. Every check of the settings and the data, before anything slow
WORLD_SIZE=$((ranks * nodes)) "$python" train_gpt.py --check "${flags[@]}"

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
