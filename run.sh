#!/usr/bin/env bash
# ./run.sh [train] [my_record.py] [speedrun|short|demo] [--repeat=N] [--text=PATH] [settings]
#     trains, with a log in records/: the speedrun where there is a CUDA GPU, else the demo.
#     --repeat=N compares runs of N seeds, and --text trains the demo on a text of your own.
# ./run.sh --resume[=RUN]           continues the newest run, or that of a log, folder or checkpoint
# ./run.sh race my_record.py [--vs=train_gpt.py]                  is a copy better?
# ./run.sh ablate my_record.py [--vs=train_gpt.py]                what is each part of a copy worth?
# ./run.sh night ideas/ [--hours=8] [--vs=train_gpt.py]      which patches in a folder are better?
# ./run.sh bench [my_record.py ...] [--vs=train_gpt.py|LOG]      what does a step cost here?
# ./run.sh honest my_record.py      is a copy's validation loss honest?
# ./run.sh same my_record.py        does a copy train the same, bar rounding?
# ./run.sh verify records/race_X    do the logs in a race's folder give its verdict?
# ./run.sh ideas [WORD]             what has been raced so far?
# ./run.sh compare A [--vs B]       which of two folders of logs is better, and how surely?
# ./run.sh sample RUN               continues a prompt by a run's model
# ./run.sh tokenize TEXT            makes shards of a text
# ./run.sh inspect SHARD            shows what a shard holds
# ./run.sh fineweb                  fetches the speedrun's data
# ./run.sh test [quick | --all | mutants] [--script SCRIPT.py] [flags: pytest --help]
#
# ./run.sh help shows this, ./run.sh VERB --help explains a verb, ./run.sh train --help lists the
# settings. Paths count from this folder. Packages and data are fetched or made where needed.
# PYTHON names an interpreter, NPROC the number of processes (else one per GPU, or per core).
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # it was started by `sh run.sh`
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"  # of the file, if this is a link to it
# What other launchers, notebooks or an optimized Python leave in the environment is not for this
# project. Threads that are bound to cores would hide these from what counts them, and share one.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE ${!PET_@} \
  OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY PYTHONOPTIMIZE
export MPLBACKEND=agg
die() { echo "error: $*" >&2; exit 2; }
note() { echo "run.sh: $*" >&2; }
# sbatch runs a copy of this file in a folder of its own.
[ -e records/tools/fits.py ] || cd "${SLURM_SUBMIT_DIR:-.}"
[ -e records/tools/fits.py ] || die "$PWD holds a copy of run.sh without the rest: start" \
  "the one in the project's folder; sbatch is to be called there"

# Whether the interpreter $1 is new enough and has the modules $2: its versions, or why not.
fits() { "$1" -W ignore records/tools/fits.py $2 2>&1 | tail -n 1 | sed 's/^.*: line [0-9]*: //'; }

for word; do  # a shell leaves the tilde of --records=~/runs alone
  [[ $word != --*=\~/* ]] || word=${word%%=*}=${HOME-~}/${word#*=\~/}
  set -- "${@:2}" "$word"
done
needed="torch numpy tqdm huggingface_hub tiktoken"
case "${1-train}" in
  help | -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' run.sh; exit ;;
  demo | short | speedrun | -* | *.py) program=launch; set -- train "$@" ;;
  train) program=launch ;;
  race | ablate | night | verify) program=$1; needed+=" scipy matplotlib" ;;
  honest) program=honesty ;;
  same | sample | bench) program=$1 ;;
  compare) program=compare; needed="numpy scipy matplotlib" ;;
  ideas) program=ledger; needed="numpy scipy" ;;
  tokenize) program=tokenize_text; needed="numpy tqdm tiktoken" ;;
  inspect) program=inspect_shards; needed="numpy" ;;
  fineweb) program=fineweb; needed="numpy tqdm huggingface_hub" ;;
  test) needed+=" scipy matplotlib pyarrow pytest xdist hypothesis" ;;
  *) die "$1 is no verb; ./run.sh help lists them" ;;
esac
for python in "${PYTHON:-.venv/bin/python}" python3 python ""; do
  if versions=$(fits "$python" "$needed"); then break; fi
  [[ $versions != *"hides Python's"* ]] || die "$versions"
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON cannot be used: $versions; name a Python from 3.10" \
    "on that has the packages of requirements.txt, or leave PYTHON out"
  [ -z "$(command -v "$python")" ] || note "passed over $python: $versions"
done
make_venv() {  # with the packages of requirements.txt, by uv where there is one
  [ -w . ] || die "no Python here has the packages that this needs, and .venv cannot be made in" \
    "$PWD, which is read-only: copy the folder, or name a Python that has them by PYTHON"
  note "making .venv with the packages of requirements.txt (once; torch is large)"
  uv=$(command -v uv || true)
  if ! fits $python "" > /dev/null; then  # there is none, or its Python is old or gone
    for base in python3 python python3.{14,13,12,11,10} ""; do
      if fits "$base" venv > /dev/null; then break; fi
    done
    rm -rf .venv
    if [ -n "$uv" ]; then
      uv venv --python "${base:-3.13}" .venv || die "uv venv fails, as it says above"
    else
      [ -n "$base" ] || die "Python 3.10 or newer is needed: install one"
      "$base" -m venv --without-pip .venv || die "$base -m venv .venv fails, as it says above"
    fi
  fi
  install=(uv pip install --python $python --torch-backend "${UV_TORCH_BACKEND:-auto}")
  if [ -z "$uv" ]; then
    install=($python -m pip install --disable-pip-version-check)
    fits $python pip > /dev/null || $python -m ensurepip >&2 || die "pip cannot be put" \
      "into .venv: install Python's venv package (on Debian and Ubuntu, apt install python3-venv)"
  fi
  packages=(-r requirements.txt)
  # A torch that is there already stays, and a verb that needs none does not install it.
  if [[ $needed != torch* ]] || fits $python torch > /dev/null; then
    packages=($(grep -Ev '^(#|torch|triton)' requirements.txt))
  fi
  "${install[@]}" "${packages[@]}" >&2 || die "pip fails, see above; a torch put into .venv stays"
  versions=$(fits $python "$needed") || die ".venv cannot be used: $versions; remove it"
}
if [ -z "$python" ]; then
  python=.venv/bin/python
  exec 9< run.sh
  if [ -n "$(command -v flock)" ] && ! flock -n 9; then note "waits for another start" && flock 9; fi
  versions=$(fits $python "$needed") || make_venv
  exec 9<&-
fi
[ "${program:-}" != launch ] || note "using $(command -v "$python") ($versions)"
case "${1-train}" in
  test) shift
    [ "${1:-}" != mutants ] || exec "$python" tests/mutants.py "${@:2}"
    [ "${1:-}" != quick ] || set -- -m quick "${@:2}"
    for ((i = 1; i < $#; i++)); do  # pytest would take the word after --script for a test
      [ "${!i}" != --script ] || set -- "${@:1:i-1}" "--script=${@:i+1:1}" "${@:i+2}"
    done
    exec "$python" -m pytest "$@" ;;
  tokenize | inspect | fineweb) exec "$python" "data/$program.py" "${@:2}" ;;
  *) exec "$python" -W ignore "records/tools/$program.py" "${@:2}" ;;
esac
