#!/usr/bin/env python3
"""How long a plain CPU trains to a validation loss, from nothing but a text file.

    python tests/bench_cpu.py shakespeare.txt --target=1.874 --repeat=3
    python tests/bench_cpu.py shakespeare.txt --target=1.4697 --recipe=low
    python tests/bench_cpu.py book.txt --target=2 --num_iterations=500
    python tests/bench_cpu.py book.txt --nanogpt=../nanoGPT --repeat=3

The first makes three runs and prints their median. The second trains a larger model to a lower loss
in some minutes. The third takes a text of your own and a flag that goes to the training script.
The fourth also trains nanoGPT's documented run on a CPU from a checkout of it (see nanogpt_cpu.py),
in turn with ours and with as many threads. The target is nanoGPT's own final loss then. With --keep
the folder also gets compare.png, the losses against the training time, and nanogpt.csv.

A byte is a token. The first 90 % of the file's bytes train, cut into fragments in random order; all
of the last 10 % validate. The training script runs as it is, one process on up to four cores. In
the last line, "reached 1.874 after X s of training", X is the script's own training time at the
first validation loss at or below the target. The script is the record attempt,
records/speedrun_2026/train_gpt.py; --script=train_gpt.py names the original, or a copy of one of
them. The recipe "fast" refuses a model of more than 850,000 parameters unless --any_size is given.
Exit status: 0 if the target was reached, 1 if it was not, 2 for wrong usage.
"""

import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nanogpt_cpu
import torch
from nanogpt_cpu import Point

from data import common, tokenize_text
from data.common import UserError
from records.sample import load_script

MOST_PARAMETERS = 850_000
COMMON = "--preset=demo --name=bench_cpu --val_tokens=0 --epochs=1000 --save_every=0"
ATTEMPT = ROOT / "records" / "speedrun_2026" / "train_gpt.py"
RECIPES = {  # bytes in a fragment; flags; further flags for the record attempt, and for train_gpt.py
    "fast": (256, """
        --value_embeds=.. --attention=.x
        --model_dim=64 --num_heads=3 --head_dim=32 --attention_scale=0.3 --rope_base=20
        --micro_batches=1 --train_seq_len=2048 --val_seq_len=16384 --num_iterations=96
        --val_loss_every=0 --cooldown_frac=0.7 --embed_lr=0.6 --head_lr=0.02 --scalar_lr=0.1
        --muon_momentum_steps=0 --muon_momentum_end=0.9 --adam_beta1=0.5""", """
        --windows=SS --stages=1:1:256 --skips=.0 --late_input=1 --backout=0 --softcap_height=30
        --softcap_shift=0 --muon_lr=0.1 --muon_decay=0 --embed_decay=0 --adam_every=1
        --muon_beta2=0.9 --future_tokens=0 --pair_rows=8192""", """
        --windows=LL --window_start=128 --window_end=128 --muon_lr=0.05"""),
    "low": (2048, """
        --model_dim=128 --num_heads=4 --head_dim=32 --attention_scale=0.3 --rope_base=20
        --micro_batches=1 --train_seq_len=2048 --val_seq_len=16384
        --num_iterations=1400 --val_loss_every=700 --cooldown_frac=0.7
        --lr_floor=0 --embed_lr=0.04 --head_lr=0.004 --scalar_lr=0.1 --muon_lr=0.03
        --muon_momentum_steps=0 --muon_momentum_end=0.9 --adam_beta1=0.9""", """
        --windows=LLL --value_embeds=.01 --attention=.xx --skips=..0 --late_input=2 --backout=0
        --stages=1:1:256 --softcap_height=30 --softcap_shift=0 --muon_decay=0 --embed_decay=0
        --adam_every=1 --muon_beta2=0.9 --future_tokens=1 --pair_rows=1024""", """
        --windows=LLLL --value_embeds=..01 --attention=.xxx --window_start=256 --window_end=256"""),
}
VAL_LINE = re.compile(r"^step:(\d+)/\d+ val_loss:(\S+) train_time:(\d+)ms .*tokens:(\d+)", re.M)


def matrix_rate(dtype: torch.dtype, n: int = 512) -> float:
    """FLOP/s in a product of n x n matrices, the best of several."""
    a = torch.randn(n, n).to(dtype)
    times = []
    while len(times) < 2 or (sum(times) < 1 and len(times) < 20):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


def recipe_flags(name: str, script: ModuleType) -> list[str]:
    """The flags of a recipe for a script, which is the record attempt, the original, or a copy."""
    _, flags, attempt, original = RECIPES[name]
    own = attempt if hasattr(script.PRESETS["demo"], "stages") else original
    return [*COMMON.split(), *flags.split(), *own.split()]


def count_parameters(script: ModuleType, flags: list[str]) -> int:
    hp = script.resolve(script.parse_flags(flags)[0], torch.device("cpu"))
    with torch.device("meta"):
        model = script.GPT(hp, torch.float32, flex=False)
    return sum(p.numel() for p in model.parameters())


def make_shards(text: bytes, folder: Path, fragment: int) -> list[str]:
    """Makes shards of the two parts of a text by the project's own tokenizer, and returns the flags
    that name them. The training part is cut into fragments in random order: a step reads
    consecutive tokens, and so it sees all styles of the text."""
    cut = len(text) * 9 // 10
    for name, part, size in (("train", text[:cut], fragment), ("val", text[cut:], len(text))):
        (folder / name).mkdir()
        for start in range(0, len(part), size):
            (folder / name / f"{start:012}.txt").write_bytes(part[start:start + size])
        tokenize_text.main([
            str(folder / name), "--shuffle", "--out", str(folder), "--name", name,
            "--tokenizer", "bytes", "--val_fraction", "0", "--workers", "1"])
    return [f"--train_files={folder}/train_train_*.bin", f"--val_files={folder}/val_train_*.bin"]


def environment(threads: int) -> dict[str, str]:
    # The last two have glibc's allocator keep the pages that a step frees. To get them from the
    # kernel again would take a fifth of a step.
    return {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "",
            "MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}


def train(script: Path, flags: list[str], processes: int, threads: int) -> list[Point]:
    """The validations of one run. Prints a table as it goes."""
    launch = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone",
              f"--nproc_per_node={processes}", os.path.relpath(script, ROOT)]
    points = []
    output = []
    with subprocess.Popen([*launch, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=os.environ | environment(threads),
                          cwd=ROOT) as process:
        print(f"{'step':>6} {'tokens':>10} {'val loss':>9} {'train time':>11}")
        try:
            for line in process.stdout:
                output.append(line)
                if match := VAL_LINE.match(line):
                    step, tokens = int(match[1]), int(match[4])
                    loss, seconds = float(match[2]), int(match[3]) / 1000
                    print(f"{step:6} {tokens:10} {loss:9.4f} {seconds:9.2f} s", flush=True)
                    points.append(Point(step, seconds, loss))
                elif line.startswith(("model:", "throughput:", "log:")):
                    print(line, end="", flush=True)
        except BaseException:  # a signal may reach this process alone
            process.terminate()
            raise
    if process.returncode:
        errors = [line.removeprefix("error: ") for line in output if line.startswith("error: ")]
        failure = f"{script} failed:\n" + "".join(output[-30:])
        raise UserError(errors[0].strip() if errors else failure)
    return points


def seconds_to(target: float, points: list[Point]) -> float | None:
    """The training time at the first validation at or below the target, if there is one."""
    return next((point.seconds for point in points if point.loss <= target), None)


def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, metavar="TEXT_FILE")
    parser.add_argument("--target", type=float, metavar="LOSS",
                        help="validation loss in nats per byte (1.874, or nanoGPT's)")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR",
                        help="train this checkout of nanoGPT as well, and compare")
    parser.add_argument("--nanogpt_flags", default="", metavar="FLAGS",
                        help="flags for nanoGPT alone, after those of its documented run")
    parser.add_argument("--recipe", choices=RECIPES, default="fast",
                        help="settings to start from (fast)")
    parser.add_argument("--script", type=Path, metavar="FILE", default=ATTEMPT,
                        help="the training script (the record attempt)")
    parser.add_argument("--any_size", action="store_true",
                        help=f"allow more than {MOST_PARAMETERS} parameters in the recipe fast")
    parser.add_argument("--repeat", type=int, default=1,
                        help="number of runs, of whose times the last line has the median (1)")
    parser.add_argument("--processes", type=int, default=1, help="processes of torchrun (1)")
    parser.add_argument("--threads", type=int,
                        help="threads of each process (one for each of its cores, up to 4)")
    parser.add_argument("--fragment", type=int, metavar="BYTES",
                        help="bytes of training text that stay together (256; recipe low: 2048)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs in this folder")
    args, more = parser.parse_known_args()
    path = args.script.resolve()
    fragment = RECIPES[args.recipe][0] if args.fragment is None else args.fragment
    processes = args.processes
    cores = (os.cpu_count() or 1) // max(1, processes)
    threads = max(1, min(4, cores)) if args.threads is None else args.threads
    if min(args.repeat, processes, threads, fragment) < 1:
        raise UserError("--repeat, --processes, --threads and --fragment must be at least 1")
    script = load_script(path)
    flags = recipe_flags(args.recipe, script)
    if args.nanogpt:
        flags.append("--val_loss_every=6")  # for a curve; the clock stops meanwhile
    flags += more
    try:
        hp, _ = script.parse_flags(flags)
        script.check_settings(hp, processes)
        parameters = count_parameters(script, flags)
    except script.UserError as e:
        raise UserError(str(e)) from None
    if parameters > MOST_PARAMETERS and args.recipe == "fast" and not args.any_size:
        raise UserError(f"the model has {parameters} parameters, more than {MOST_PARAMETERS}; "
                        "--any_size allows that")
    print(f"settings: {' '.join(flags)}")
    torch.set_num_threads(threads)
    rates = [matrix_rate(dtype) / 1e9 for dtype in (torch.float32, torch.bfloat16)]
    print(f"matrix products: {rates[0]:.1f} GFLOP/s in float32, {rates[1]:.1f} in bfloat16; "
          f"{processes} process(es) of {threads} thread(s)")
    text = args.text.read_bytes()
    theirs = []
    ours = []
    with tempfile.TemporaryDirectory() as folder:
        records = os.path.relpath(args.keep, ROOT) if args.keep else folder
        flags += [*make_shards(text, Path(folder), fragment), f"--records={records}"]
        peer = Path(folder, "nanogpt")
        if args.nanogpt:
            nanogpt_cpu.make_folder(args.nanogpt, text, peer)
        for _ in range(args.repeat):
            if args.nanogpt:
                more = shlex.split(args.nanogpt_flags)
                theirs.append(nanogpt_cpu.train(peer, environment(threads), more))
            ours.append(train(path, flags, processes, threads))

    target = 1.874 if args.target is None else args.target
    if args.nanogpt:
        if args.target is None:
            target = max(points[-1].loss for points in theirs)
        print_times("nanoGPT: ", target, theirs)
        if args.keep:
            nanogpt_cpu.draw(args.keep / "compare.png", theirs, ours, target, args.text.name,
                             threads)
            nanogpt_cpu.write_csv(args.keep / "nanogpt.csv", theirs, args.nanogpt, args.text)
    print_times("", target, ours)
    missed = sum(seconds_to(target, points) is None for points in ours)
    if missed:
        print(f"error: {target:g} was not reached in {missed} of {args.repeat} run(s)",
              file=sys.stderr)
        sys.exit(1)


def print_times(who: str, target: float, runs: list[list[Point]]):
    times = [seconds_to(target, points) for points in runs]
    if None not in times:
        spread = f" (median of {', '.join(f'{t:.2f}' for t in times)})" if len(times) > 1 else ""
        print(f"{who}reached {target:g} after {statistics.median(times):.2f} s of training{spread}")


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
