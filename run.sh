#!/usr/bin/env bash
# ./run.sh [train] [SCRIPT.py] [speedrun|short|demo] [--repeat=N] [--text=PATH] [settings]
#     trains: the speedrun where there is a CUDA GPU, else the demo, which ends with a sample.
#     SCRIPT.py is a copy of train_gpt.py, --repeat=N trains N times, each with a seed of its own,
#     and compares the runs, and --text trains the demo on a text of your own.
# ./run.sh race my_record.py [more.py ...] [--vs=train_gpt.py]    are copies better?
# ./run.sh ablate my_record.py [--vs=train_gpt.py]                what is each part of a copy worth?
# ./run.sh bench [my_record.py ...] [--vs=train_gpt.py|LOG]      what does a step cost here?
# ./run.sh honest my_record.py      is a copy's validation loss honest?
# ./run.sh ideas                    what has been raced so far?
# ./run.sh compare A [--vs B]       which of two folders of logs is better, and how surely?
# ./run.sh sample RUN               continues a prompt by a run's model
# ./run.sh hellaswag RUN            HellaSwag accuracy of a run's model
# ./run.sh tokenize TEXT            makes shards of a text
# ./run.sh inspect SHARD            shows what a shard holds
# ./run.sh fineweb                  fetches the speedrun's data
# ./run.sh test [--script SCRIPT.py] [flags: pytest --help]    or: test mutants
# ./run.sh help                     shows this
#
# ./run.sh VERB --help explains a verb, and ./run.sh train --help lists the settings. Paths count
# from this folder. A Python environment is found or made, and data are made or fetched, where a
# verb needs them. Variables: PYTHON, the interpreter; NPROC, the number of processes (else one per
# GPU or core, as many as divide the micro-batches).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
verbs="train demo speedrun race ablate bench honest ideas compare sample hellaswag tokenize inspect"
verbs+=" fineweb test help"
die() { echo "error: $*" >&2; exit 2; }
note() { echo "run.sh: $*" >&2; }

nearest() {  # the verb that shares most letters with the word $1, in their order
  local verb rest score i
  for verb in $verbs; do
    rest=$verb
    score=$((-${#verb}))
    for ((i = 0; i < ${#1}; i++)); do
      [[ $rest != *"${1:i:1}"* ]] || score=$((score + 2))
      rest=${rest#*"${1:i:1}"}
    done
    echo "$score $verb"
  done | sort -n | tail -n 1 | cut -d " " -f 2
}
works() {  # whether the interpreter $1 has the modules $2; prints versions, or why not
  local versions torch major minor patch
  versions=$("$1" -c "import sys, $2
print(sys.version.split()[0], getattr(sys.modules.get('torch'), '__version__', ''))" \
    2>&1 | tail -n 1) || { echo "$versions"; return 1; }
  read -r versions torch <<< "$versions"
  IFS=. read -r major minor patch <<< "${torch:-2.9.1}"
  if ((major * 10000 + minor * 100 + ${patch%%[!0-9]*} < 20901)); then
    echo "torch $torch is older than 2.9.1"
    return 1
  fi
  echo "Python $versions${torch:+, torch $torch}"
}

needed="torch, numpy, tqdm, huggingface_hub"
case "${1:-train}" in
  help | -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' run.sh; exit ;;
  demo | speedrun | short | -* | *.py) program=launch; set -- train "$@" ;;
  train) program=launch ;;
  race | ablate) program=$1; needed+=", scipy, matplotlib, plotly" ;;
  honest) program=honesty ;;
  bench | sample | hellaswag) program=$1 ;;
  compare) program=compare; needed="numpy, scipy" ;;
  ideas) program=ledger; needed="numpy, scipy" ;;
  tokenize) program=tokenize_text; needed="numpy, tqdm" ;;
  inspect) program=inspect_shards; needed="numpy" ;;
  fineweb) program=fineweb; needed="numpy, tqdm, huggingface_hub" ;;
  test) needed+=", tiktoken, scipy, matplotlib, plotly, pyarrow, pytest, xdist, hypothesis" ;;
  *) die "$1 is no verb; the nearest is $(nearest "$1"), and there are: $verbs" ;;
esac
for python in "${PYTHON:-.venv/bin/python}" python3 python ""; do
  if versions=$(works "$python" "$needed"); then break; fi
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON cannot be used: ${versions##*line *[0-9]: }"
  [ -z "$(command -v "$python")" ] || note "passed over $python: $versions"
done
if [ -z "$python" ]; then
  note "making .venv with the packages of requirements.txt (once; torch is large)"
  python=.venv/bin/python
  [ -x $python ] || python3 -m venv .venv || die "Python 3.10 or newer is needed, with venv and pip"
  packages=(-r requirements.txt)
  # A torch that is there already stays, and a verb that needs none does not install it.
  if [[ $needed != torch* ]] || works $python torch > /dev/null; then
    packages=($(grep -Ev '^(#|torch|triton)' requirements.txt))
  fi
  $python -m pip install --disable-pip-version-check "${packages[@]}" >&2
  versions=$(works $python "$needed") || die ".venv cannot be used: $versions; remove it"
fi
[ "${program:-}" != launch ] || echo "run.sh: using $(command -v "$python") ($versions)"
case "${1:-train}" in
  # Until pytest has read tests/conftest.py, it would take the word after --script for a test.
  test) [ "${2:-}" != --script ] || set -- test "--script=${3:-}" "${@:4}"
    [ "${2:-}" != mutants ] || exec "$python" tests/mutants.py "${@:3}"
    exec "$python" -m pytest "${@:2}" ;;
  tokenize | inspect | fineweb) exec "$python" "data/$program.py" "${@:2}" ;;
  *) exec "$python" -W ignore "records/tools/$program.py" "${@:2}" ;;
esac
