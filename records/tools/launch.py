"""Starts training, as run.sh hands it over: makes or fetches the data, chooses the number of
processes, checks everything, and starts torchrun.

    ./run.sh [train] [SCRIPT.py] [speedrun|short|demo] [--repeat=N] [--text=PATH] [flags]

Each command that it starts is printed first, and can be given by hand as well. What --check finds
is one line and status 2. A run that fails later shows what torchrun shows.
"""

import glob
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import tokenize_text
from records.tools.load import ArgumentParser, UserError, load_script, require, run

# The standard library, without its tests and its tables of characters.
DEMO_TEXT = ("--out data/demo --name demo --tokenizer bytes --shuffle --glob *.py "
             "--exclude *-packages --exclude test --exclude tests --exclude idle_test "
             "--exclude encodings --exclude entities.py")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def say(text: str):
    print(f"run.sh: {text}", flush=True)


def start(*command: str, read=False, **variables: str) -> list[str]:
    """Runs a Python program with these environment variables added. If it fails, this process ends
    with its status. With `read`, returns the lines that it printed, which are passed on meanwhile.
    """
    say(shlex.join(["python", *command]))
    program = subprocess.Popen([sys.executable, *command], env=os.environ | variables, text=True,
                               errors="replace", stdout=subprocess.PIPE if read else None)
    lines = []
    try:
        for line in program.stdout or ():
            lines.append(line)
            with suppress(OSError):  # a run outlives its console
                print(line, end="", flush=True)
        program.wait()
    except KeyboardInterrupt:
        # Ctrl+C has reached the program too, which then ends by itself. A signal to this process
        # alone has not.
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            program.wait(timeout=3)
        program.terminate()
        program.wait()
        raise
    if program.returncode:
        sys.exit(program.returncode % 256)
    return lines


# ---- What to train -------------------------------------------------------------------------------

def split_words(words: list[str]) -> tuple[str, list[str]]:
    """The script that a command line names, and the flags for it. A word that is neither a flag nor
    a flag's value is the script or the preset, wherever it stands."""
    scripts = []
    flags = []
    presets = []
    for before, word in zip(["", *words], words):
        is_value = before.startswith("--") and "=" not in before and before != "--check"
        if word.startswith("-") or is_value:
            flags.append(word)
        elif word.endswith(".py"):
            scripts.append(word)
        else:
            presets.append(word)
    for named in (scripts, presets):
        require(len(named) < 2, f"{' and '.join(named)}: name one script and one preset at most")
    return scripts[0] if scripts else "train_gpt.py", [*map("--preset={}".format, presets), *flags]


def prepare_machine(gpus: int):
    """On a machine without GPUs that torch sees, sets what makes training fast, and complains if
    there is a driver for one."""
    if gpus:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are as fast as threads
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")  # keep what a step frees
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "2000000000")
    if NVIDIA_DRIVER.exists() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        version = re.search(r"\d+[.]\S+", NVIDIA_DRIVER.read_text())[0]
        raise UserError(f"torch {torch.__version__} sees no GPU with NVIDIA driver {version}; "
                        "install a torch that fits it, or set CUDA_VISIBLE_DEVICES= for a CPU")


def number_of_ranks(micro_batches: int, gpus: int) -> int:
    """NPROC, or as many processes as there are GPUs, or else cores, and as divide the micro-batches
    of a step."""
    wanted = os.environ.get("NPROC")
    if wanted:
        require(wanted.isdecimal() and int(wanted) > 0, f"NPROC={wanted} is not a number above 0")
        return int(wanted)
    has_affinity = hasattr(os, "sched_getaffinity")  # not on a Mac
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    return max(n for n in range(1, (gpus or cores) + 1) if micro_batches % n == 0)


def micro_batches_of(checkpoint: Path) -> int:
    """The number of micro-batches of the run that saved a checkpoint."""
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True,
                          mmap=True)["settings"]["micro_batches"]
    except Exception:  # of many kinds; the script's own check says what is wrong with the file
        return 1


# ---- The data ------------------------------------------------------------------------------------

def make_preset_data(script, hp):
    """Makes the demo's data, or fetches as much of FineWeb as the settings need."""
    if hp.train_files.startswith("data/fineweb10B/"):
        steps = (0, max(0, hp.num_iterations - 1))
        sizes = [script.tokens_seen(at + 1, hp) - script.tokens_seen(at, hp) for at in steps]
        usable = 99_999_999 - max(sizes)  # tokens of a chunk, at least
        tokens = script.tokens_seen(hp.num_iterations, hp)
        chunks = math.ceil(tokens / max(1, usable * hp.epochs))
        start("data/fineweb.py", f"--num_chunks={chunks}")
    elif hp.train_files.startswith("data/demo/") and not glob.glob(hp.train_files):
        start("data/tokenize_text.py", sysconfig.get_path("stdlib"), *DEMO_TEXT.split())


def shards_of_text(text: str) -> Path:
    """The beginning of the paths of a text's shards, data/<name>/<name>_<hash>, which are made
    unless they are there. Since the hash is that of the files' names, sizes and times, a changed
    text gets shards of its own. Those from before stay, for runs that are resumed on them."""
    files = tokenize_text.find_files([text], [], [])
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = re.sub(r"\W", "_", Path(text).resolve().stem, flags=re.ASCII)
    if name in ("demo", "fineweb10B"):  # which are the presets'
        name += "_text"
    shards = Path("data", name, f"{name}_{digest}")
    if not shards.with_suffix(".json").exists():  # it is written last
        start("data/tokenize_text.py", text, "--out", str(shards.parent), "--name", shards.name,
              "--tokenizer", "bytes", "--shuffle")
    return shards


def flags_for_text(text: str, shards: Path, script, hp, named: dict) -> list[str]:
    """The flags that have a run train on a text's shards: more passes if they are short, and all of
    the validation text. Says in one line what was chosen. Flags that the user has named stay."""
    sidecar = json.loads(shards.with_suffix(".json").read_text())
    train, val = (sidecar[side]["tokens"] for side in ("train", "val"))
    flags = [f"--train_files={shards}_train_*.bin", f"--val_files={shards}_val_*.bin"]
    if "val_tokens" not in named and hp.val_tokens >= val:
        flags.append("--val_tokens=0")
    if "epochs" not in named:
        found = script.find_shards(f"{shards}_train_*.bin")
        epochs = 1
        while hp.num_iterations > sum(1 for _ in islice(
                script.step_starts(found, replace(hp, epochs=epochs)), hp.num_iterations)):
            epochs *= 2
            require(epochs < 10**5, f"--text={text}: {train} training tokens are too few for steps "
                    f"of {script.tokens_seen(1, hp)}; take a longer text or fewer --micro_batches")
        flags.append(f"--epochs={epochs}")
    say(f"{train} training tokens, {val} validation tokens: {' '.join(flags[2:])}")
    return flags


# ---- Training ------------------------------------------------------------------------------------

def training_command(path: str, flags: list[str], ranks: int) -> list[str]:
    if ranks == 1:
        return [path, *flags]
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", path,
            *flags]


def train(command: list[str]) -> str:
    """A run; the path of its log, which is the last line that it prints."""
    logs = [line for line in start(*command, read=True) if line.startswith("log: ")]
    return logs[-1].removeprefix("log: ").rstrip("\n")


def main(argv=None):
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--text")
    parser.add_argument("-h", "--help", action="store_true")
    own, words = parser.parse_known_args(argv)
    path, flags = split_words(words)
    if own.help:
        require(os.path.isfile(path), f"{path}: there is no such script")
        start(path, "--help")
        return
    if own.text is not None and "--preset=demo" not in flags:
        flags.insert(0, "--preset=demo")
    script = load_script(path)
    try:
        hp, command = script.parse_flags(flags)
        if not command.resume:
            script.check_settings(hp, world_size=1)
    except script.UserError as e:
        raise UserError(e) from None
    own_data = bool({"train_files", "val_files"} & set(command.named))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(own.repeat is None or own.repeat > 0 and hp.seed < 0 and not command.resume,
            f"--repeat={own.repeat}: takes a number above 0, and neither --seed nor --resume")
    require(own.text is None or command.preset == "demo" and not own_data,
            f"--text={own.text}: trains the demo, and takes neither --train_files nor --val_files")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    require(tasks == "1", f"srun has started {tasks} run.sh, which do not know of each other: let "
            "it start torchrun, once on each node, as records/cluster.md shows")
    prepare_machine(gpus)
    require(gpus or command.preset not in ("speedrun", "short") or command.check
            or "num_iterations" in command.named, f"--preset={command.preset} takes days or weeks "
            "without a GPU; run demo, or insist by --num_iterations=N")

    if own.text is not None:
        shards = shards_of_text(own.text)
        flags += flags_for_text(own.text, shards, script, hp, command.named)
    elif not command.resume and not own_data:
        make_preset_data(script, hp)

    micro_batches = micro_batches_of(command.resume) if command.resume else hp.micro_batches
    ranks = number_of_ranks(micro_batches, gpus)
    what = f"--resume={command.resume}" if command.resume else f"preset {command.preset}"
    say(f"{what}: {ranks} rank(s)")
    start(path, "--check", *flags, WORLD_SIZE=str(ranks))
    if command.check:
        return
    logs = [train(training_command(path, flags, ranks)) for _ in range(own.repeat or 1)]
    if own.repeat:
        start("records/tools/compare.py", *logs)
    elif command.preset == "demo" and hp.save_every and hp.num_iterations and not command.resume:
        start("records/tools/sample.py", *logs, f"--script={path}", "--tokens=300",
              "--temperature=0.9")


if __name__ == "__main__":
    sys.exit(run(main))
