#!/usr/bin/env bash
# ./run.sh [speedrun|speedrun_2026|demo|test] [--repeat=N] [flags: train_gpt.py --help, or pytest]
#
# Finds or makes a Python environment, makes or fetches the data, checks everything, and trains: the
# speedrun where there is a CUDA GPU, else the demo, which ends with a sample. --repeat=N trains N
# times, each with a seed of its own, and compares. Paths count from this folder. Variables: PYTHON,
# the interpreter; NPROC, processes (else one a GPU or core, as many as divide the micro-batches).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
die() { echo "error: $*" >&2; exit 2; }

case " $* " in *" -h "*|*" --help "*) sed -n '2,/^set/s/^# \{0,1\}//p' run.sh; exit ;; esac
needed="torch, numpy, tqdm, huggingface_hub"
[ "${1:-}" != test ] || needed+=", tiktoken, scipy, matplotlib, pyarrow, pytest, xdist, hypothesis"
works() {  # whether the interpreter $1 has what is needed; prints its versions, or why not
  "$1" -c "import sys, $needed
assert torch.__version__ >= (2, 13), f'torch {torch.__version__} is older than 2.13'
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
import atexit, glob, math, os, re, shlex, subprocess, sys, sysconfig
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
    parser.add_argument("--NPROC", type=int, default=os.environ.get("NPROC") or 0)
    own, flags = parser.parse_known_args(sys.argv[2:])
    if flags and not flags[0].startswith("-"):
        flags[0] = f"--preset={flags[0]}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hp, command = train_gpt.parse_flags(flags, "speedrun" if gpus else "demo")
    require(own.repeat is None or own.repeat > 0 and hp.seed < 0 and not command.resume,
            f"--repeat={own.repeat}: takes a number above 0, and neither --seed nor --resume")
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are as fast as threads
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")  # keep what a step frees
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "2000000000")
        driver = "/proc/driver/nvidia/version"
        if os.path.exists(driver) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            version = re.search(r"\d+[.]\S+", open(driver).read())[0]
            raise UserError(f"torch {torch.__version__} sees no GPU with NVIDIA driver {version}; "
                            "install a torch that fits it, or set CUDA_VISIBLE_DEVICES= for a CPU")
        require(command.preset == "demo" or command.check or "num_iterations" in command.given,
                "the speedrun takes weeks without a GPU; run demo, or insist by --num_iterations=N")

    named = command.resume or {"train_files", "val_files"} & set(command.given)
    if not named and command.preset != "demo":
        train_gpt.check_settings(hp, world_size=1)
        batches = [stage.batch for stage in train_gpt.parse_stages(hp.stages)] or [1]
        tokens = [batch * hp.micro_batches * hp.train_seq_len for batch in batches]
        used = max(1, 99_999_999 - max(tokens)) * hp.epochs  # of a chunk, at least
        chunks = math.ceil(hp.num_iterations * sum(tokens) / len(tokens) / used)
        start("data/fineweb.py", f"--num_chunks={chunks}")
    elif not named and not (glob.glob(hp.train_files) and glob.glob(hp.val_files)):
        options = ("--out data/demo --name demo --tokenizer bytes --shuffle --glob *.py --exclude "
                   "*-packages --exclude test --exclude tests --exclude idle_test")
        start("data/tokenize_text.py", sysconfig.get_path("stdlib"), *options.split())

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = own.NPROC or max(n for n in range(1, (gpus or cores) + 1) if hp.micro_batches % n == 0)
    print(f"run.sh: preset {command.preset}: {ranks} rank(s)")
    os.environ["WORLD_SIZE"] = str(ranks)
    start("train_gpt.py", "--check", *flags)
    if command.check:
        return
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    for _ in range(own.repeat or 1):
        start(*(launch if ranks > 1 else []), "train_gpt.py", *flags)
    logs = sorted(glob.glob(f"{glob.escape(hp.records)}/*_{hp.name}.log"))  # by time
    if own.repeat:
        start("records/compare.py", *logs[-own.repeat:])
    elif command.preset == "demo" and hp.save_every and hp.num_iterations and not command.resume:
        start("records/sample.py", logs[-1], "--tokens=300")

sys.exit(run(main, errors=(train_gpt.UserError,)))
PY
