#!/usr/bin/env bash
# ./run.sh [SCRIPT.py] [speedrun|demo] [--repeat=N] [flags: train_gpt.py --help]
# ./run.sh --text=FILE_OR_FOLDER [SCRIPT.py] [--repeat=N] [flags]
# ./run.sh race my_record.py [more.py ...] [--vs=train_gpt.py] [speedrun|demo] [flags]
# ./run.sh ablate my_record.py [--vs=train_gpt.py] [speedrun|demo] [flags]
# ./run.sh bench [my_record.py ...] [--vs=train_gpt.py|record.txt] [speedrun|demo] [flags]
# ./run.sh ideas
# ./run.sh test [--script SCRIPT.py] [flags: pytest --help]
#
# Finds or makes a Python environment, makes or fetches the data, checks everything, and trains: the
# speedrun where there is a CUDA GPU, else the demo, which ends with a sample. --text trains the
# demo on a text of your own. SCRIPT.py is a copy of train_gpt.py to train or to test in its place.
# --repeat=N trains N times, each with a seed of its own, and compares the runs. `race` says whether
# copies are better, `ablate` what each part of a copy is worth, `bench` what a step costs on this
# machine, and `ideas` what has been raced so far (python records/race.py --help). Paths count from
# this folder. Variables: PYTHON, the interpreter; NPROC, the number of processes (else one per GPU
# or core, as many as divide the micro-batches).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
die() { echo "error: $*" >&2; exit 2; }

case " $* " in *" -h "*|*" --help "*) sed -n '2,/^set/s/^# \{0,1\}//p' run.sh; exit ;; esac
needed="numpy, tqdm, huggingface_hub"
case "${1:-}" in race | ablate | ideas) needed+=", scipy, matplotlib, plotly" ;; esac
[ "${1:-}" != test ] || needed+=", tiktoken, scipy, matplotlib, plotly, pyarrow, pytest, xdist, hypothesis"
works() {  # whether the interpreter $1 has torch and the modules $2; prints versions, or why not
  local versions major minor patch
  versions=$("$1" -c "import sys, torch, $2; print(sys.version.split()[0], torch.__version__)" \
    2>&1 | tail -n 1) || { echo "$versions"; return 1; }
  IFS=. read -r major minor patch <<< "${versions#* }"
  if ((major * 10000 + minor * 100 + ${patch%%[!0-9]*} < 20901)); then
    echo "torch ${versions#* } is older than 2.9.1"
    return 1
  fi
  echo "Python ${versions/ /, torch }"
}
for python in "${PYTHON:-.venv/bin/python}" python3 python ""; do
  if versions=$(works "$python" "$needed"); then break; fi
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON cannot be used: ${versions##*line *[0-9]: }"
  [ -z "$(command -v "$python")" ] || echo "run.sh: passed over $python: $versions"
done
if [ -z "$python" ]; then
  echo "run.sh: making .venv with the packages of requirements.txt (once; torch is large)"
  python=.venv/bin/python
  [ -x $python ] || python3 -m venv .venv || die "Python 3.10 or newer is needed, with venv and pip"
  packages=(-r requirements.txt)
  # A torch that is there already stays.
  ! works $python sys > /dev/null || packages=($(grep -Ev '^(#|torch|triton)' requirements.txt))
  $python -m pip install --disable-pip-version-check "${packages[@]}"
  versions=$(works $python "$needed") || die ".venv cannot be used: $versions; remove it"
  echo "run.sh: to use it in a shell of your own: source .venv/bin/activate"
fi
echo "run.sh: using $(command -v "$python") ($versions)"
case "${1:-}" in
  race | ablate | ideas) exec "$python" -W ignore "records/$1.py" "${@:2}" ;;
  bench) exec "$python" -W ignore records/tools/bench.py "${@:2}" ;;
  # Until pytest has read tests/conftest.py, it would take the word after --script for a test.
  test) [ "${2:-}" != --script ] || set -- test "--script=${3:-}" "${@:4}"
    exec "$python" -m pytest "${@:2}" ;;
  *) exec "$python" -W ignore records/launch.py "$@" ;;
esac
