#!/usr/bin/env python3
"""What tests/gpu_lease.sh needs besides a shell.

    python tests/gpu_lease.py gpus                        # how many torch sees
    python tests/gpu_lease.py machine                     # versions, driver, links, compiler
    python tests/gpu_lease.py kill_at STEP COMMAND...     # runs it, and kills it at that step
    python tests/gpu_lease.py record LOG SCRIPT FLAGS...  # the record's script, for our data
    python tests/gpu_lease.py figure OUTPUT OFFSET STATUS # of a part of the lease, from its output
"""

import faulthandler
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


# --------------------------------------------------------------------------------------------------
# Figures of a part, from its output

def losses(log: str, kind: str) -> dict[int, float]:
    lines = re.findall(rf"(?m)^step:(\d+)/\d+ {kind}:(\S+) ", log)
    return {int(step): float(loss) for step, loss in lines}


def milliseconds_of_a_step(log: str) -> float | None:
    """Those of the steps after the second one, since the first ones are slower."""
    found = re.findall(r"(?m)^step:(\d+)/\d+ train_loss:\S+ train_time:(\d+)ms", log)
    if len(found) < 4:
        return None
    (first, begin), (last, end) = found[1], found[-1]
    return (int(end) - int(begin)) / (int(last) - int(first))


def figure_of_run(path: Path) -> str:
    """What a log of train_gpt.py says, as far as it goes."""
    log = path.read_text(errors="replace")
    words = []
    if found := re.search(r"(?m)^warmup: (\S+ s)", log):
        words.append(f"warmup {found[1]}")
    if milliseconds := milliseconds_of_a_step(log):
        words.append(f"{milliseconds:.1f} ms a step")
    if found := re.search(r"(?m)^peak_memory: (\d+ MiB)", log):
        words.append(f"peak {found[1]}")
    facts = dict(re.findall(r"(?m)^(dtype|use_fp8) = (\S+)$", log))
    words.append(facts.get("dtype", "").strip("'") + (" FP8" * (facts.get("use_fp8") == "True")))
    for kind in ("train_loss", "val_loss"):
        if curve := losses(log, kind):
            shown = [f"{loss:.4f}" for loss in curve.values()]
            if len(shown) > 4:
                shown = [*shown[:2], "...", shown[-1]]
            words.append(f"{kind} {' '.join(shown)}")
    if found := re.search(r"(?m)^resumed: (.*)/step\d+\.pt at step (\d+)", log):
        parent = Path(found[1]).with_suffix(".log")
        if parent.exists():
            before, after = (losses(text, "train_loss")
                             for text in (parent.read_text(errors="replace"), log))
            both = sorted(before.keys() & after.keys())
            if both:
                largest = max(abs(before[step] - after[step]) for step in both)
                words.append(f"steps {both[0]} to {both[-1]} were trained before as well: losses "
                             f"differ by {largest:.4f} at most")
    return ", ".join(filter(None, words))


def error_of(output: str, status: int) -> str:
    """The last line of a traceback, or the place where a part hung, or its last line."""
    if status in (124, 137, 134, -6):
        # faulthandler prints the innermost call first.
        dump = output.partition("Fatal Python error: Aborted")[2]
        for frames in re.split(r"\n(?=(?:Current )?[Tt]hread )", dump):
            found = re.search(r'File "(.*?)", line (\d+) in (\S+)', frames)
            if found and "Current thread" in frames:
                return f"it hung in {found[3]} ({found[1]}, line {found[2]})"
    # Of several processes each line begins with its rank, and torchrun adds an error of its own.
    lines = [re.sub(r"^\[rank\d+\]:", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if "ChildFailedError" not in line
              and re.match(r"(error: |(\w+\.)*\w*(Error|Exception|Interrupt)\b)", line)]
    return (errors or lines or ["it printed nothing"])[-1]


def figure(path: Path, offset: int, status: int) -> str:
    """A line on what a part has measured and, if it failed, why; then the tables that it printed,
    and the tests that failed."""
    with open(path, "rb") as f:
        f.seek(offset)
        output = f.read().decode(errors="replace")
    words = []
    if found := re.findall(r"(?m)^figure: (.*)$", output):
        words.append(found[-1])
    elif logs := [Path(log) for log in re.findall(r"(?m)^log: (.*)$", output)]:
        words.append(figure_of_run(logs[-1]) if logs[-1].exists() else "")
    elif curve := losses(output, "val_loss"):  # of the record's script
        average = re.findall(r"(?m)^step:\d+/\d+ val_loss:.* step_avg:(\S+)ms", output)[-1]
        words.append(f"{average} ms a step, val_loss "
                     f"{' '.join(f'{loss:.4f}' for loss in curve.values())}")
    elif found := re.findall(r"(?m)^=*\s*(\d+ (?:passed|failed|skipped|error).* in \S+s)", output):
        words.append(found[-1])
        status = 0
    if status:
        words.append(error_of(output, status))
    lines = [". ".join(filter(None, words)) or "done"]
    lines += re.findall(r"(?m)^(?:FAILED|ERROR) .*$|^\| .*$", output)
    return "\n    ".join(line[:300] for line in lines)


# --------------------------------------------------------------------------------------------------
# The record's script

def source_of(log: Path) -> str:
    """The source that a published log begins with."""
    source, divider, _ = log.read_text(encoding="utf-8").partition("=" * 100 + "\n")
    if not divider:
        raise SystemExit(f"error: {log} is no published log: it has no line of 100 `=`")
    return source


def replaced(source: str, log: Path, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        if source.count(old) != 1:
            raise SystemExit(f"error: {log} is not of record 2025-01-26: it has not once {old!r}")
        source = source.replace(old, new)
    return source


def make_record(log: Path, script: Path, flags: list[str]):
    """Writes the record's script, changed in these places alone: where its data are and how many
    tokens it validates on; how many steps it makes; and that a step has eight sequences on any
    number of processes, where it had one on each. (The gradients of several are summed, where the
    script averages over processes. Its optimizers take no notice of a factor.)"""
    value = dict(flag.removeprefix("--").split("=", 1) for flag in flags if "=" in flag)
    changes = {
        "train_batch_size = world_size * args.seq_len": "train_batch_size = 8 * args.seq_len",
        "Path.cwd().glob(filename_pattern)": 'Path("/").glob(filename_pattern[1:])',
        'train_files = "data/fineweb10B/fineweb_train_*.bin"':
            f"train_files = {os.path.abspath(value['train_files'])!r}",
        'val_files = "data/fineweb10B/fineweb_val_*.bin"':
            f"val_files = {os.path.abspath(value['val_files'])!r}",
        "val_tokens = 10485760": f"val_tokens = {value['val_tokens']}",
        "num_iterations = 1770": f"num_iterations = {value['num_iterations']}",
        "val_loss_every = 125": f"val_loss_every = {value['val_loss_every']}",
    }
    script.write_text(replaced(source_of(log), log, changes), encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# The machine, and a run that is killed

def printed_by(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        return done.stdout.strip() or done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{command[0]}: {e}"


def machine():
    import torch
    memory = re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    header = Path(sysconfig.get_path("include"), "Python.h").exists()
    has_gpu = torch.cuda.is_available()
    words = [
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if has_gpu else "no GPU",
        f"torch {torch.__version__}", f"Triton {triton_version}",
        f"Python {platform.python_version()}{'' if header else ' WITHOUT Python.h'}",
        "gcc" if shutil.which("gcc") else "NO gcc", f"{os.cpu_count()} cores",
        f"{int(memory[1]) >> 20} GiB"]
    if has_gpu:
        words.insert(1, "driver " + printed_by(
            "nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit",
            "--format=csv,noheader").splitlines()[0])
    print("figure:", ", ".join(words), flush=True)
    names = re.compile("torch|cuda|nccl|triton|alloc", re.I)
    for name in sorted(filter(names.search, os.environ)):
        print(f"{name}={os.environ[name]}")
    print(platform.platform())
    for command in ("date -u", "git describe --always --dirty", "nvidia-smi", "gcc --version",
                    "nvidia-smi topo -m", "df -h .",
                    f"{sys.executable} -m torch.utils.collect_env"):
        print(f"\n$ {command}\n{printed_by(*command.split())}", flush=True)


def kill_at(step: str, command: list[str]) -> int:
    """Runs a training command until it prints that step, then kills it. Status 0 if it did."""
    faulthandler.disable()  # if both hang, the place that matters is the command's
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
    for line in run.stdout:
        print(line, end="", flush=True)
        if line.startswith(f"step:{step}/") and " train_loss:" in line:
            run.kill()
            run.wait()
            return 0
    return run.wait() or 1


def main(argv: list[str]):
    match argv:
        case ["gpus"]:
            import torch
            print(torch.cuda.device_count())
        case ["machine"]:
            machine()
        case ["kill_at", step, *command]:
            return kill_at(step, command)
        case ["record", log, script, *flags]:
            make_record(Path(log), Path(script), flags)
        case ["figure", path, offset, status]:
            print(figure(Path(path), int(offset), int(status)))
        case _:
            print(f"error: {argv} is no command; see the first lines of this file", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
