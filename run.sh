#!/usr/bin/env bash
# ./run.sh [SCRIPT.py] [speedrun|demo] [--repeat=N] [flags: train_gpt.py --help]
# ./run.sh race my_record.py [--vs=train_gpt.py] [--repeat=5] [speedrun|demo] [flags]
# ./run.sh test [--script SCRIPT.py] [flags: pytest --help]
#
# Finds or makes a Python environment, makes or fetches the data, checks everything, and trains: the
# speedrun where there is a CUDA GPU, else the demo, which ends with a sample. SCRIPT.py is a copy
# of train_gpt.py to train or to test in its place. --repeat=N trains N times, each with a seed of
# its own, and compares the runs. Paths count from this folder. Variables: PYTHON, the interpreter;
# NPROC, the number of processes (else one per GPU or core, as many as divide the micro-batches).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
die() { echo "error: $*" >&2; exit 2; }

case " $* " in *" -h "*|*" --help "*) sed -n '2,/^set/s/^# \{0,1\}//p' run.sh; exit ;; esac
needed="torch, numpy, tqdm, huggingface_hub"
[ "${1:-}" != race ] || needed+=", scipy, matplotlib"
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
[ "${1:-}" != race ] || exec "$python" -W ignore records/race.py "${@:2}"
if [ "${1:-}" = test ]; then
  flags=("${@:2}")
  # Until pytest has read tests/conftest.py, it takes the word after --script for a test.
  for i in "${!flags[@]}"; do
    if [ "${flags[i]:-}" = --script ]; then
      flags[i]="--script=${flags[i + 1]:-}"
      unset "flags[i + 1]"
    fi
  done
  exec "$python" -m pytest ${flags[@]+"${flags[@]}"}
fi

exec "$python" -W ignore - "$python" "$@" <<'PY'
import glob, importlib.util, math, os, re, shlex, signal, subprocess, sys, sysconfig
import torch
from data.common import ArgumentParser, UserError, require, run

# torchrun, which leaves the last word to the script and ends with the status of the rank that
# failed first.
TORCHRUN = """
import logging, signal, sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
logging.disable()
try:
    main(sys.argv[1:])
except ChildFailedError as e:
    for rank, failure in e.failures.items():
        # torchrun ends the others by SIGTERM. A rank that something else ended could not say so.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            print(f"error: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}",
                  file=sys.stderr)
    sys.exit(e.get_first_failure()[1].exitcode % 256)
except SignalException as e:
    sys.exit(128 + e.sigval)
"""
script = "train_gpt.py"
if sys.argv[2:] and sys.argv[2].endswith(".py"):
    script = sys.argv.pop(2)

def start(*command, shown=None, **options) -> str:
    """Runs one of this folder's programs, and ends with its status if it fails. Returns its output
    if stdout=subprocess.PIPE is given, and prints it meanwhile."""
    print(f"run.sh: {shlex.join(shown or command)}", flush=True)
    program = subprocess.Popen([sys.argv[1], *command], text=True, **options)
    output = ""
    try:
        for line in program.stdout or []:
            output += line
            train_gpt.say(line.removesuffix("\n"))
        program.wait()
    except KeyboardInterrupt as e:
        number = e.args[0] if e.args else signal.SIGINT
        try:  # Ctrl+C sends SIGINT to the program as well, which then ends within seconds
            program.communicate(timeout=5 if number == signal.SIGINT else 0)
        except subprocess.TimeoutExpired:
            program.terminate()
            program.communicate(timeout=40)
        finally:  # it hangs, or somebody is impatient
            program.terminate()
        sys.exit(128 + number)
    if program.returncode:
        sys.exit(program.returncode % 256)
    return output

def interrupt(number, frame):
    raise KeyboardInterrupt(number)

def main():
    global train_gpt
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)
    require(os.path.isfile(script), f"{script}: there is no such script")
    spec = importlib.util.spec_from_file_location("train_gpt", script)
    train_gpt = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train_gpt)
    try:
        train()
    except train_gpt.UserError as e:
        raise UserError(e) from None

def train():
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--NPROC", type=int, default=os.environ.get("NPROC") or 0)
    own, flags = parser.parse_known_args(sys.argv[2:])
    if flags and not flags[0].startswith("-"):
        flags[0] = f"--preset={flags[0]}"
    hp, command = train_gpt.parse_flags(flags)
    require(own.repeat is None or own.repeat > 0 and hp.seed < 0 and not command.resume,
            f"--repeat={own.repeat}: takes a number above 0, and neither --seed nor --resume")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are as fast as threads
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")  # keep what a step frees
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "2000000000")
        driver = "/proc/driver/nvidia/version"
        if os.path.exists(driver) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            version = re.search(r"\d+[.]\S+", open(driver).read())[0]
            raise UserError(f"torch {torch.__version__} sees no GPU with NVIDIA driver {version}; "
                            "install a torch that fits it, or set CUDA_VISIBLE_DEVICES= for a CPU")
        require(command.preset != "speedrun" or command.check or "num_iterations" in command.named,
                "the speedrun takes weeks without a GPU; run demo, or insist by --num_iterations=N")

    # The data of a preset
    micro_batches = hp.micro_batches
    if command.resume:
        micro_batches = train_gpt.find_checkpoint(command.resume)[1]["facts"]["micro_batches"]
    elif not {"train_files", "val_files"} & set(command.named):
        if hp.train_files.startswith("data/fineweb10B/"):
            train_gpt.check_settings(hp, world_size=1)
            sizes = [train_gpt.batch_size(step, hp) for step in (0, hp.num_iterations)]
            usable = 99_999_999 - max(sizes) * hp.train_seq_len  # tokens of a chunk, at least
            tokens = train_gpt.tokens_seen(hp.num_iterations, hp)
            chunks = math.ceil(tokens / max(1, usable * hp.epochs))
            start("data/fineweb.py", f"--num_chunks={chunks}")
        elif hp.train_files.startswith("data/demo/") and not glob.glob(hp.train_files):
            options = ("--out data/demo --name demo --tokenizer bytes --shuffle --glob *.py "
                       "--exclude *-packages --exclude test --exclude tests --exclude idle_test "
                       "--exclude encodings --exclude entities.py")  # tables of characters
            start("data/tokenize_text.py", sysconfig.get_path("stdlib"), *options.split())

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = own.NPROC or max(n for n in range(1, (gpus or cores) + 1) if micro_batches % n == 0)
    what = f"--resume={command.resume}" if command.resume else f"preset {command.preset}"
    print(f"run.sh: {what}: {ranks} rank(s)")
    start(script, "--check", *flags, env={**os.environ, "WORLD_SIZE": str(ranks)})
    if command.check:
        return
    launch = ["--standalone", f"--nproc_per_node={ranks}", script, *flags]
    logs = []
    for _ in range(own.repeat or 1):
        if ranks > 1:
            output = start("-c", TORCHRUN, *launch, shown=["torchrun", *launch],
                           stdout=subprocess.PIPE)
        else:
            output = start(script, *flags, stdout=subprocess.PIPE)
        logs += re.findall("(?m)^log: (.*)$", output)[-1:]
    if own.repeat:
        start("records/compare.py", *logs)
    elif command.preset == "demo" and hp.save_every and hp.num_iterations and not command.resume:
        start("records/sample.py", *logs, f"--script={script}", "--tokens=300",
              "--temperature=0.9")

sys.exit(run(main))
PY
