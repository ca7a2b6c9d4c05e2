#!/usr/bin/env bash
# ./run.sh [speedrun|demo|test] [--repeat=N] [flags: of python train_gpt.py --help, or of pytest]
#
# Finds or makes a Python environment, makes or fetches the data, checks everything, and trains: the
# speedrun where there is a CUDA GPU, else the demo, which ends with a sample. --repeat=N trains N
# times, each with a seed of its own, and compares. Paths count from this folder. Variables: PYTHON,
# the interpreter; NPROC, processes on this machine (else one a GPU or core, as many as divide the
# micro-batches); for several machines NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT as for torchrun.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
die() { echo "error: $*" >&2; exit 2; }

case "${1:-}" in ""|-*|speedrun|demo|test) ;; *) die "$1 is neither speedrun, demo nor test" ;; esac
case " $* " in *" -h "*|*" --help "*) sed -n '2,/^set/s/^# \{0,1\}//p' run.sh; exit ;; esac
needed="torch, numpy, tqdm, huggingface_hub"
[ "${1:-}" != test ] || needed+=", tiktoken, scipy, matplotlib, pyarrow, pytest, xdist, hypothesis"
works() {  # whether the interpreter $1 has what is needed; prints its versions, or why not
  "$1" -c "import sys, $needed
assert sys.version_info >= (3, 10) and torch.__version__ >= (2, 11), 'Python or torch is too old'
print('Python', sys.version.split()[0] + ', torch', torch.__version__)" 2>&1 | tail -n 1
}
for python in "${PYTHON:-.venv/bin/python}" python3 python ""; do
  if versions=$(works "$python"); then break; fi
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON cannot be used: ${versions##*line *[0-9]: }"
done
if [ -z "$python" ]; then
  echo "run.sh: making .venv with the packages of requirements.txt (once; torch is large)"
  python=.venv/bin/python
  [ -x $python ] || python3 -m venv .venv || die "Python 3.10 or newer is needed, with venv and pip"
  $python -m pip install --disable-pip-version-check -r requirements.txt
  versions=$(works $python) || die ".venv cannot be used: $versions; remove it and start again"
fi
echo "run.sh: using $(command -v "$python") ($versions)"
[ "${1:-}" != test ] || exec "$python" -m pytest "${@:2}"

exec "$python" -W ignore - "$python" "$@" <<'PY'
import atexit, glob, os, re, shlex, subprocess, sys, sysconfig
from pathlib import Path
import torch, train_gpt
from data.common import ArgumentParser, UserError, require, run

def start(*command):
    """Run one of this folder's programs; end with its status where it fails."""
    command = [sys.argv[1], *command]
    print(f"run.sh: {shlex.join(command)}", flush=True)
    program = subprocess.Popen(command)
    atexit.register(program.wait)
    atexit.register(program.terminate)  # before that: whatever ends this ends the program
    if program.wait():
        sys.exit(program.returncode % 256)

def main():
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--repeat", type=int)
    for name, default in {"NPROC": 0, "NNODES": 1, "NODE_RANK": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=os.environ.get(name) or default)
    own, flags = parser.parse_known_args(sys.argv[2:])
    if flags and not flags[0].startswith("-"):
        flags[0] = f"--preset={flags[0]}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hp, command = train_gpt.parse_flags(flags, "speedrun" if gpus else "demo")
    fresh = command.resume is None  # else settings, and so the data, are those of the checkpoint
    require(own.repeat is None or own.repeat > 0, f"--repeat={own.repeat} is no number of runs")
    require(not own.repeat or fresh and hp.seed < 0, "--repeat: leave --seed out, and --resume")
    require(own.NNODES == 1 or os.environ.get("MASTER_ADDR"), "NNODES needs MASTER_ADDR")
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are as fast as threads
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")  # keep what a step frees
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "2000000000")
        driver = "/proc/driver/nvidia/version"
        if os.path.exists(driver) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            version = open(driver).readline().split("Module")[-1].strip()
            raise UserError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU, "
                            f"but the NVIDIA driver {version} is there; install a torch that fits "
                            "it, or set CUDA_VISIBLE_DEVICES= to train on the CPU")
        small = command.preset == "demo" or "num_iterations" in command.given
        require(small or command.check or not fresh, "the speedrun takes weeks without a GPU; "
                "./run.sh demo is for a CPU, and --num_iterations=N insists on the speedrun")

    own_data = fresh and not {"train_files", "val_files"} & set(command.given)
    if own_data and command.preset == "speedrun":
        steps = 99_999_999 // (hp.micro_batches * hp.train_seq_len) * hp.epochs  # of a chunk
        start("data/fineweb.py", f"--num_chunks={-(-hp.num_iterations // max(1, steps))}")
    elif own_data and not (glob.glob(hp.train_files) and glob.glob(hp.val_files)):
        options = ("--glob **/*.py --exclude site-packages --exclude dist-packages --exclude test "
                   "--exclude tests --exclude idle_test --shuffle --out data/demo --name demo "
                   "--tokenizer bytes --val_fraction 0.05")
        start("data/tokenize_text.py", sysconfig.get_path("stdlib"), *options.split())

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fitting = [n for n in range(1, (gpus or cores) + 1) if hp.micro_batches % (n * own.NNODES) == 0]
    ranks = own.NPROC or max(fitting, default=1)
    print(f"run.sh: preset {command.preset}: {ranks} rank(s) on each of {own.NNODES} machine(s)")
    os.environ["WORLD_SIZE"] = str(ranks * own.NNODES)
    if fresh or own.NODE_RANK == 0:  # the first machine reads the checkpoint for all
        start("train_gpt.py", "--check", *flags)
    if command.check:
        return
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun's flags as well
    given = [f"--{name.lower()}={os.environ[name]}" for name in names if os.environ.get(name)]
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    launch += given or ["--standalone"]
    if not gpus and ranks * own.NNODES == 1:
        launch = []
    for _ in range(own.repeat or 1):
        start(*launch, "train_gpt.py", *flags)
    logs = sorted(map(str, Path(hp.records).glob(f"*_{hp.name}.log")))  # by time
    if own.repeat and own.NODE_RANK == 0:
        start("records/compare.py", *logs[-own.repeat:])
    elif command.preset == "demo" and hp.save_every and hp.num_iterations and own.NODE_RANK == 0:
        trained = re.sub("/[^/]*[.]pt$", "", command.resume or logs[-1])  # there are newer ones now
        start("records/sample.py", trained, "--tokens=300")

sys.exit(run(main, errors=(train_gpt.UserError,)))
PY
