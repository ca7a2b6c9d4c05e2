"""Starts training, as run.sh hands it over: makes or fetches the data, chooses the number of
processes, checks everything, and starts torchrun.

    ./run.sh [train] [SCRIPT.py] [speedrun|short|demo] [--repeat=N] [--text=PATH] [flags]
    ./run.sh [SCRIPT.py] --resume[=RUN] [flags]

Each command that it starts is printed first, and can be given by hand as well. What --check finds
is one line and status 2. Of a run that ends early, the last lines say why, and how to go on.
"""

import hashlib
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs
from records.tools.load import (LEASH, TORCHRUN, ArgumentParser, UserError, child, locked, require,
                                run)

import torch
from tqdm import tqdm

from data import tokenize_text, vocab
from data.common import sha256
from records.tools import sample
from records.tools.leash import OPENED

RACE = "RACE_OPENED"  # in the environment of a race's run: where its ranks note what they open

# Without tests and tables, torch's source is the same for every CPU, GPU and Python.
DEMO_TEXT = ("--glob *.py --exclude version.py --exclude testing --exclude serialized_patterns "
             "--exclude hipify --exclude artifacts --exclude _triton_ops_meta.py")
# With whole files in order, some runs learn late, by chance, to copy from the window.
PIECE = 768  # tokens
DEMO_RUNS = Path("records/demo/train_gpt")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

def say(text: str, file=None):
    with suppress(OSError):  # a run outlives its console
        print(f"run.sh: {text}", file=file, flush=True)

def start(*command: str, **variables: str):
    """Runs a Python program. If it fails, this process ends with its status."""
    say(shlex.join(["python", *command]))
    with child(*command, env=os.environ | variables) as program:
        program.wait()
    if program.returncode:
        sys.exit(program.returncode % 256)

# ---- What to train -------------------------------------------------------------------------------

def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """The script that a command line names, and the flags for it. A word that is neither a flag nor
    a flag's value is the script or the preset, wherever it stands. --resume needs no value."""
    scripts = []
    flags = []
    presets = []
    for before, word in zip(["", *words], words):
        is_value = before.startswith("--") and "=" not in before and before != "--check"
        if before == "--resume" and not word.startswith("-") and not word.endswith(".py"):
            flags[-1] += word
        elif word.startswith("-") or is_value and before != "--resume":
            flags.append("--resume=" if word == "--resume" else word)
        elif word.endswith(".py"):
            scripts.append(word)
        else:
            presets.append(word)
    for named in (scripts, presets):
        require(len(named) < 2, f"{' and '.join(named)}: name one script and one preset at most")
    return scripts[0] if scripts else None, [*map("--preset={}".format, presets), *flags]

def find_resumed(path: str | None, flags: list[str]) -> tuple[str, list[str], dict]:
    """The script, the flags, and the settings of the run, where --resume names a checkpoint, a log,
    a folder or nothing. A script that is not named is the one in this folder that saved it."""
    values = dict(flag.split("=", 1) for flag in flags if "=" in flag)
    if "--resume" not in values:
        return path or "train_gpt.py", flags, {}
    run = Path(values["--resume"] or values.get("--records", "records")).expanduser()
    checkpoint = sample.find_checkpoint(run)
    writer = writer_of(checkpoint.resolve().parent)
    require(not writer, f"the log of {checkpoint} is still being written, by process {writer}: "
            "wait for its end, or end it, before you resume it")
    saved = sample.content_of(checkpoint)  # the script's own check says what is wrong with it
    settings, source = saved.get("settings", {}), saved.get("script")
    scripts = ["train_gpt.py", *sorted(map(str, Path().glob("*.py")))]
    same = [script for script in scripts if source and sample.source_hash(Path(script)) == source]
    path = path or (same or scripts)[0]
    say(f"{path} goes on from {checkpoint}")
    flags = [flag for flag in flags if not flag.startswith("--resume=")]
    return path, [*flags, f"--resume={checkpoint}"], settings

def writer_of(folder: Path) -> int | None:
    """The process on this machine that writes the log of this folder of checkpoints, if any."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.readlink(link) == f"{folder}.log":
                return int(link.parts[2])

def cores() -> int:
    """How many this process may use: by its affinity, and by the quota that a container sets."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError, ValueError):  # there is none, or it is "max"
        quota, period = CPU_QUOTA.read_text().split()
        count = min(count, int(quota) // int(period))
    return max(1, count)

def number_of_ranks(micro_batches: int, gpus: int) -> int:
    """NPROC, or the most processes, one per GPU or core, that divide a step's micro-batches."""
    wanted = os.environ.get("NPROC")
    if wanted:
        require(wanted.isdecimal() and int(wanted) > 0, f"NPROC={wanted} is not a number above 0")
        require(micro_batches % int(wanted) == 0, f"NPROC={wanted} processes cannot share "
                f"{micro_batches} micro-batches equally: unset NPROC, or set one that divides it")
        return int(wanted)
    return max(n for n in range(1, (gpus or cores()) + 1) if micro_batches % n == 0)

def idle_gpus(ranks: int, gpus: int, tokens: int, micro_batches: int) -> str:
    """Says that GPUs are left over, and which flags would use all of them for a step of as many
    tokens, in sequences of whole blocks of 128."""
    if ranks >= gpus or os.environ.get("NPROC"):
        return ""
    blocks = tokens // 128
    for count in range(gpus, blocks + 1, gpus):
        if count >= micro_batches and blocks % count == 0:
            length = 128 * blocks // count
            return (f" on {ranks} of {gpus} GPUs (--micro_batches={count} --train_seq_len={length} "
                    "would use all)")
    return f" on {ranks} of {gpus} GPUs"

def places(at_once: int | None) -> list[dict]:
    """The environment of each run that may go on at a time: one on a GPU, or `at_once`."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": names[i % gpus]} for i in range(at_once or gpus)]
    return [{"NPROC": str(max(1, cores() // at_once))}] * at_once if at_once else [{}]

def prepare_cpu(ranks: int):
    """Sets what makes training on a CPU fast, and complains if there is a driver for a GPU."""
    if NVIDIA_DRIVER.exists() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        version = re.search(r"\d+[.]\S+", NVIDIA_DRIVER.read_text())[0]
        raise UserError(f"torch {torch.__version__} sees no GPU with NVIDIA driver {version}; "
                        "install a torch that fits it, or set CUDA_VISIBLE_DEVICES= for a CPU")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")  # keep what a step frees
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "2000000000")
    # Processes are as fast as threads. Threads beyond the cores wait for each other.
    wanted = os.environ.setdefault("OMP_NUM_THREADS", "1")
    most = max(1, cores() // ranks)
    if not (wanted.isdecimal() and 0 < int(wanted) <= most):
        os.environ["OMP_NUM_THREADS"] = str(most)
        say(f"OMP_NUM_THREADS={most} in place of {wanted}: {ranks} rank(s) share {cores()} core(s)")

def validation_spacing(steps: int) -> int:
    """The steps between validations for a race, which reads the slope of the loss at the end: four
    on the way, and one in the last tenth. Short runs validate every tenth."""
    return math.ceil(9 * steps / 40) if steps >= 40 else max(1, steps // 10)

def save_spacing(steps: int) -> int:
    """The steps between checkpoints for a race, drawn so that a run saves one in its second half,
    from which an exam trains again, and the last one."""
    last = max(steps // 2 + 1, steps - 8)
    return random.SystemRandom().randint(steps // 2 + 1, last)

# ---- The data ------------------------------------------------------------------------------------

def make_shards(prefix: str, *words: str) -> bool:
    """Makes shards of shuffled pieces by these words for data/tokenize_text.py, unless there are
    some that are still as their sidecar says, which is written last. Says whether it made any."""
    sidecar = Path(f"{prefix}.json")
    with locked(sidecar.with_name(f".{sidecar.stem}.lock")):
        old = [*sidecar.parent.glob(f"{sidecar.stem}_*.bin"), *sidecar.parent.glob(sidecar.name)]
        with suppress(OSError, ValueError, LookupError, TypeError):
            sides = json.loads(sidecar.read_text())
            sums = sides["train"]["shards"] | sides["val"]["shards"]  # {file: SHA-256}
            found = {path.name: sha256(path) for path in old if path != sidecar}
            if found == sums and (sides["tokenizer"], sides["shuffle"]) == ("python", PIECE):
                return False
        if old:
            say(f"{prefix}*: files are missing, damaged or of an older kind; all are made again")
        for path in old:
            path.unlink()
        start("data/tokenize_text.py", *words, f"--out={sidecar.parent}", f"--name={sidecar.stem}",
              "--tokenizer=python", f"--shuffle={PIECE}")
        return True

def make_preset_data(script, hp):
    """Makes the demo's data, or fetches as much of FineWeb as the settings need."""
    if hp.train_files.startswith("data/fineweb10B/"):
        usable = 99_999_999 - script.tokens_seen(1, hp)  # tokens of a chunk, at least
        tokens = script.tokens_seen(hp.num_iterations, hp)
        chunks = math.ceil(tokens / max(1, usable * hp.epochs))
        start("data/fineweb.py", f"--num_chunks={chunks}")
    elif hp.train_files.startswith("data/demo/"):
        make_shards("data/demo/demo", str(Path(torch.__file__).parent), *DEMO_TEXT.split())

def digest_of(text: str, field: str) -> str:
    """A hash of what shards of this text depend on: its files' names and content, and the field of
    JSON Lines that holds the text."""
    files = [(path.name, sha256(path)) for path in tokenize_text.find_files([text], [], [])]
    facts = repr((files, field, PIECE)).encode("utf-8", "surrogateescape")
    return hashlib.sha256(facts).hexdigest()[:16]

def flags_for_text(text: str, script, hp, named: dict, field: str = "text") -> list[str]:
    """The flags that have a run train on a text's shards, data/texts/<name>_<hash>*, which are made
    unless they are there: as many passes as it takes, and all of the validation text. Flags that
    the user has named stay. The shards of a text before it was changed stay for resumed runs."""
    digest = digest_of(text, field)
    name = re.sub(r"\W", "_", Path(text).resolve().stem, flags=re.ASCII)
    prefix = f"data/texts/{name}_{digest}"
    if make_shards(prefix, text, f"--text_field={field}") and digest_of(text, field) != digest:
        Path(f"{prefix}.json").unlink()
        raise UserError(f"--text={text} was changed while it was read: give the command again")
    sidecar = json.loads(Path(f"{prefix}.json").read_text())
    train, val = (sidecar[side]["tokens"] for side in ("train", "val"))
    step = script.tokens_seen(1, hp)
    require(train > step, f"--text={text}: {train} training tokens are too few for steps of "
            f"{step}; take a longer text or fewer --micro_batches")
    passes = script.tokens_seen(hp.num_iterations, hp) / train
    say(f"{train} training tokens, {passes:.1f} passes over them; {val} validation tokens")
    flags = {"train_files": f"{prefix}_train_*.bin", "val_files": f"{prefix}_val_*.bin",
             "epochs": 100_000}  # at most
    if hp.val_tokens >= val:
        flags["val_tokens"] = 0
    return [f"--{name}={value}" for name, value in flags.items() if name not in named]

# ---- A run and its end ---------------------------------------------------------------------------

def pass_errors(pipe, ended: dict):
    """Passes on what the ranks write to stderr. Keeps their last error, and the exit code that
    torchrun reports."""
    held = ""  # the first line of a traceback, until the second one shows whose it is
    is_report = False  # torchrun's own traceback has begun, which its report follows
    codes = []
    for line in pipe:
        codes += map(int, re.findall(r"exitcode\s*: (-?\d+)", line))
        is_report = is_report or held and "runpy" in line
        if is_report or re.match(r"[EW]\d{4} .*torch/distributed/elastic/", line):
            continue
        ended["last"] = held + line
        held = line if line.startswith("Traceback (") else ""
        if line.startswith("error: "):
            ended["error"] = line.rstrip("\n")
        with suppress(OSError):
            print(ended["last"] if not held else "", end="", file=sys.stderr, flush=True)
    # Where a signal has killed a rank, the others fail with it, or torchrun ends them by SIGTERM.
    killed = [code for code in codes if code < 0 and code != -signal.SIGTERM]
    ended["status"] = (killed + codes + [None])[0]

def show(lines):
    """Prints what a run prints, and yields it. On a terminal, one line that tqdm keeps up to date
    stands for the training steps, with the time left. The log has every step."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    bar = None
    for line in lines:
        step = re.match(r"step:(\d+)/(\d+) train_(loss:\S+)", line) if terminal else None
        with suppress(OSError):  # a run outlives its console
            if step:
                done, total = int(step[1]), int(step[2])
                bar = bar or tqdm(total=total, initial=done - 1, file=sys.stdout, leave=False,
                                  dynamic_ncols=True, unit="step")
                bar.set_postfix_str(step[3].replace(":", " "), refresh=False)
                bar.update(done - bar.n)
            else:
                if bar:
                    bar.clear()
                print(line, end="", flush=True)
        yield line
    with suppress(OSError):
        if bar:
            bar.close()

def train(path: str, flags: list[str], ranks: int) -> Path:
    """A run; its log. If it ends early, the last lines say why and how to go on, and this process
    ends with its status."""
    torchrun = [*TORCHRUN, f"--nproc_per_node={ranks}"] if ranks > 1 else []
    say(shlex.join(["python", *torchrun, path, *flags]))
    noted = {"PYTHONIOENCODING": "utf-8:surrogateescape"}
    if RACE in os.environ:
        noted[OPENED] = os.environ[RACE]
    leashed = [*torchrun, *[LEASH] * (ranks > 1), path, *flags]
    log = None
    ended = {}
    try:
        # Whatever the console can show, the paths that a run prints arrive here as they are.
        with child(*leashed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
                   errors="surrogateescape", env=os.environ | noted) as program:
            errors = threading.Thread(target=pass_errors, args=(program.stderr, ended), daemon=True)
            errors.start()
            for line in show(program.stdout):
                if line.startswith("log: "):
                    log = Path(line.removeprefix("log: ").rstrip("\n"))
                if line.startswith("model: "):
                    say("warming up; where there is a GPU, this compiles the model, for minutes")
            errors.join()
        status = program.returncode and (
            2 if "error" in ended else ended.get("status") or program.returncode)
        what = ended.get("error", f"error: the run has failed with status {status}, see above")
        if status < 0:
            what = f"error: a process was killed by {signal.Signals(-status).name}"
            what += ", as when memory runs out" * (status == -signal.SIGKILL)
    except KeyboardInterrupt as e:
        status = 128 + (e.args[0] if e.args else signal.SIGINT)
        what = "interrupted"
    if status:
        with suppress(OSError):
            if ended.get("last", "").rstrip("\n") != what:
                print(what, file=sys.stderr, flush=True)
        say(how_to_go_on(path, log), file=sys.stderr)
        sys.exit(status if status > 0 else 128 - status)
    require(log, f"{path} prints no line `log: PATH`, which ./run.sh reads; restore that")
    return log

def how_to_go_on(path: str, log: Path | None) -> str:
    try:
        checkpoint = sample.find_checkpoint(log or Path("no log"))
    except UserError:
        return "it has saved no checkpoint to go on from; the same command starts it again"
    script = [path] * (path != "train_gpt.py")
    return f"to go on: {shlex.join(['./run.sh', *script, f'--resume={checkpoint}'])}"

# ---- The whole -----------------------------------------------------------------------------------

def compare_with_committed(log: Path):
    """Says how the loss of a demo compares with those of the committed runs."""
    runs, _ = logs.read([log])
    if not (runs and runs[0].loss):  # the disk was full
        return
    run = runs[0]
    losses = [each.loss for each in logs.read([DEMO_RUNS])[0]
              if (each.validated_on, each.total) == (run.validated_on, run.total)]
    others = "had another number of steps, or another version of torch, whose source is their text"
    if losses:
        others = f"ended between {min(losses):.4f} and {max(losses):.4f}"
    say(f"val_loss {run.loss:.4f} nats per token; the runs in {DEMO_RUNS} {others}")

def show_sample(path: str, log: Path, hp, prompt: list[str]):
    """A sample of a demo, and what to do next."""
    try:
        checkpoint = sample.find_checkpoint(log)
        str(checkpoint).encode()  # torch reads no file whose path is not UTF-8
    except (UserError, UnicodeEncodeError) as e:
        say(f"no sample: {e}; if a save has failed, a warning above says so")
        return
    say(f"what the model writes after step {int(checkpoint.stem[4:])} of {hp.num_iterations}:")
    words = [*[f"--script={path}"] * (path != "train_gpt.py"), *prompt]
    start("records/tools/sample.py", str(checkpoint), *words, "--tokens=300", "--temperature=0.9")
    say(f"log: {log}")
    say("another sample: " + shlex.join(["./run.sh", "sample", str(log), *words, "--seed=1"]))
    race = shlex.join(["./run.sh", "race", path])
    if path == "train_gpt.py":
        race = "cp train_gpt.py my_record.py; ./run.sh race my_record.py"
    say(f"next, a race of a copy that you change: {race}")

def main(argv=None):
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--text")
    parser.add_argument("--text_field", default="text")
    parser.add_argument("--curve", action="store_true")  # of a race
    parser.add_argument("-h", "--help", action="store_true")
    own, words = parser.parse_known_args(argv)
    path, flags = split_words(words)
    if own.help:
        start(path or "train_gpt.py", "--help")
        print("\n./run.sh also takes --repeat=N, --text=PATH, --text_field=NAME, --resume[=RUN].")
        return
    require(own.text != "", "--text= is empty: name a file or a folder")
    path, flags, saved = find_resumed(path, flags)
    if own.text is not None and "--preset=demo" not in flags:
        flags.insert(0, "--preset=demo")
    script = sample.checked_script(Path(path), "parse_flags", "check_settings")
    try:
        hp, command = script.parse_flags(flags)
        if command.resume:
            known = {name: saved[name] for name in asdict(hp).keys() & saved.keys()}
            hp = replace(hp, **known | command.named)
        else:
            script.check_settings(hp, world_size=1)
    except script.UserError as e:
        raise UserError(e) from None
    for name, spacing in (("val_loss_every", validation_spacing), ("save_every", save_spacing)):
        if own.curve and name not in command.named:
            flags.append(f"--{name}={spacing(hp.num_iterations)}")
    own_data = bool({"train_files", "val_files"} & set(command.named))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(own.repeat is None or own.repeat > 0 and hp.seed < 0 and not command.resume,
            f"--repeat={own.repeat}: takes a number above 0, and neither --seed nor --resume")
    records = Path(hp.records).expanduser()
    there = next(path for path in (records, *records.parents, Path()) if os.path.exists(path))
    require(there.is_dir() and os.access(there, os.W_OK), f"--records={hp.records} cannot hold "
            f"logs: {there} is no folder that you can write into")
    require(own.text is None or command.preset == "demo" and (not own_data or RACE in os.environ),
            f"--text={own.text}: trains the demo, and takes neither --train_files nor --val_files")
    require(own_data or not hp.train_files.startswith("data/demo/")
            or hp.vocab_size == vocab.PythonTokenizer.vocab_size, f"--vocab_size={hp.vocab_size}: "
            "that is not the demo's; name shards of your own by --train_files and --val_files")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    require(tasks == "1", f"srun has started {tasks} run.sh, which do not know of each other: let "
            "it start torchrun, once on each node, as records/cluster.md shows")
    ranks = number_of_ranks(hp.micro_batches, gpus)
    if gpus:
        # The script knows of no quotas when it shares the cores among the ranks' compilers.
        share = max(1, min(32, cores() // ranks))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
    else:
        prepare_cpu(ranks)
    require(gpus or command.preset not in ("speedrun", "short") or command.check
            or "num_iterations" in command.named, f"{command.preset} takes weeks without a GPU; "
            "run demo, or insist by --num_iterations=N")
    if own.text is not None:
        flags += flags_for_text(own.text, script, hp, command.named, own.text_field)
    elif not own_data:
        make_preset_data(script, hp)
    what = "the checkpoint's settings" if command.resume else f"preset {command.preset}"
    idle = idle_gpus(ranks, gpus, script.tokens_seen(1, hp), hp.micro_batches)
    if command.resume:  # it keeps its micro-batches
        idle = ""
    say(f"{what}, {ranks} rank(s){idle}; settings and data are checked")
    start(path, "--check", *flags, WORLD_SIZE=str(ranks))
    if command.check:
        return
    runs = [train(path, flags, ranks) for _ in range(own.repeat or 1)]
    if own.repeat:
        start("records/tools/compare.py", *map(str, runs))
    elif command.preset == "demo" and hp.save_every and hp.num_iterations and not (
            command.resume or RACE in os.environ):
        if not (own.text or own_data):
            compare_with_committed(runs[0])
        show_sample(path, runs[0], hp, [] if own.text or own_data else ["--prompt=def"])

if __name__ == "__main__":
    sys.exit(run(main))
