#!/usr/bin/env python3
"""How long a plain CPU trains to a validation loss, from nothing but a text file.

    python tests/bench_cpu.py shakespeare.txt --target=1.874 --repeat=3
    python tests/bench_cpu.py shakespeare.txt --target=1.4697 --recipe=low
    python tests/bench_cpu.py book.txt --target=2 --num_iterations=500
    python tests/bench_cpu.py book.txt --nanogpt=../nanoGPT --repeat=3

The first makes three runs and prints their median. The second trains a larger model to a lower loss
in some minutes. The third takes a text of your own and a flag that goes to the training script.
The fourth trains in turn nanoGPT's documented run on a CPU, from a checkout of it (see
nanogpt_cpu.py), train_gpt.py and the record attempt, with equally many threads. The target is
nanoGPT's own final loss then. With --keep the folder also gets compare.png, the losses against the
training time, and nanogpt.csv; the logs of several scripts go into a folder for each.

A byte is a token. The first 90 % of the file's bytes train, cut into fragments in random order; all
of the last 10 % validate. The training script runs as it is, one process on up to four cores. In
the last line, "reached 1.874 after X s of training", X is the script's own training time at the
first validation loss at or below the target. The script is the record attempt,
records/speedrun_2026/train_gpt.py; --script=train_gpt.py names the original, or a copy of one of
them. Given several times, it names several scripts, and the last line is that of the last one. The
recipe "fast" refuses a model of more than 850,000 parameters unless --any_size is given. Exit
status: 0 if every run of ours reached the target, 1 if one did not, 2 for wrong usage.
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
from nanogpt_cpu import Point, Side, row

from data import common, tokenize_text
from data.common import UserError
from records.sample import load_script

MOST_PARAMETERS = 850_000
COMMON = "--preset=demo --name=bench_cpu --val_tokens=0 --epochs=1000 --save_every=0"
ORIGINAL = ROOT / "train_gpt.py"
ATTEMPT = ROOT / "records" / "speedrun_2026" / "train_gpt.py"
RECIPES = {  # bytes in a fragment; flags; more flags for the record attempt, and for train_gpt.py
    "fast": (256, """
        --value_embeds=.. --model_dim=64 --num_heads=3 --head_dim=32 --attention_scale=0.3
        --rope_base=20 --micro_batches=1 --train_seq_len=2048 --val_seq_len=16384
        --val_loss_every=0 --muon_lr=0.1 --head_lr=0.02 --scalar_lr=0.1 --muon_momentum_steps=0
        """, """
        --num_iterations=24 --cooldown_frac=0.7 --attention=.x --windows=SS --softcap_height=30
        --softcap_shift=0 --embed_lr=0.6 --muon_momentum_end=0.9 --adam_beta1=0.5
        --memory=3,4,6 --document_memory=2,3,4,6 --memory_rows=65536""", """
        --num_iterations=162 --cooldown_frac=0.6 --attention=xx --windows=LL --window_start=128
        --window_end=128 --num_kv_heads=1 --embed_lr=0.3 --muon_momentum_end=0.85
        --adam_beta1=0.3"""),
    "low": (2048, """
        --model_dim=128 --num_heads=4 --head_dim=32 --attention_scale=0.3 --rope_base=20
        --micro_batches=1 --train_seq_len=2048 --val_seq_len=16384
        --val_loss_every=700 --cooldown_frac=0.7 --lr_floor=0 --scalar_lr=0.1
        --muon_momentum_steps=0 --muon_momentum_end=0.9 --adam_beta1=0.9""", """
        --num_iterations=240 --embed_lr=0.08 --head_lr=0.008 --muon_lr=0.05 --adam_beta1=0.5
        --adam_beta2=0.98
        --windows=LLL --value_embeds=.01 --attention=.xx --softcap_height=30 --softcap_shift=0
        --memory=3,4,5,6,8,12 --document_memory=2,3,4,5,6,8 --memory_rows=65536""", """
        --num_iterations=1400 --embed_lr=0.04 --head_lr=0.004 --muon_lr=0.03
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
    own = attempt if hasattr(script.PRESETS["demo"], "memory") else original
    return [*COMMON.split(), *flags.split(), *own.split()]


def count_parameters(script: ModuleType, flags: list[str]) -> int:
    hp = script.resolve(script.parse_flags(flags)[0], torch.device("cpu"))
    with torch.device("meta"):
        model = script.GPT(hp, torch.float32, flex=False)
    return sum(p.numel() for p in model.parameters())


def make_side(path: Path, args, fragment: int, more: list[str]) -> Side:
    """A script with the flags of its recipe and those of the user, after checking them."""
    script = load_script(path)
    name = path.parent.name if path == ATTEMPT else path.name
    flags = recipe_flags(args.recipe, script)
    if args.nanogpt:
        flags.append("--val_loss_every=2")  # for a curve; the clock stops meanwhile
    flags += more
    try:
        hp, _ = script.parse_flags(flags)
        script.check_settings(hp, args.processes)
        parameters = count_parameters(script, flags)
    except script.UserError as e:
        raise UserError(str(e)) from None
    if parameters > MOST_PARAMETERS and args.recipe == "fast" and not args.any_size:
        raise UserError(f"the model has {parameters} parameters, more than {MOST_PARAMETERS}; "
                        "--any_size allows that")
    print(f"settings of {name}: {' '.join(flags)}")
    window = script.window_tokens(hp.num_iterations, hp)
    if not any(mark == "L" and x == "x" for mark, x in zip(hp.windows, hp.attention)):
        window = max(1, window // script.BLOCK // 2) * script.BLOCK  # of short windows alone
    dtype = script.resolve(hp, torch.device("cpu")).dtype
    look_ups = ", look-ups" if hasattr(hp, "memory") else ""
    return Side(name, f"{len(hp.windows)} layers of width {hp.model_dim}, {dtype}; attention "
                f"over {window} bytes{look_ups}, in fragments of {fragment} in random order",
                flags, [])


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
        print(nanogpt_cpu.TABLE)
        try:
            for line in process.stdout:
                output.append(line)
                if match := VAL_LINE.match(line):
                    points.append(Point(step=int(match[1]), tokens=int(match[4]),
                                        seconds=int(match[3]) / 1000, loss=float(match[2])))
                    print(row(points[-1]), flush=True)
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
    parser.add_argument("--script", type=Path, metavar="FILE", action="append",
                        help="a training script (the record attempt; with --nanogpt also "
                             "train_gpt.py); may be given several times")
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
    named = args.script or ([ORIGINAL, ATTEMPT] if args.nanogpt else [ATTEMPT])
    paths = [path.resolve() for path in named]
    fragment = RECIPES[args.recipe][0] if args.fragment is None else args.fragment
    processes = args.processes
    cores = (os.cpu_count() or 1) // max(1, processes)
    threads = max(1, min(4, cores)) if args.threads is None else args.threads
    if min(args.repeat, processes, threads, fragment) < 1:
        raise UserError("--repeat, --processes, --threads and --fragment must be at least 1")
    ours = {path: make_side(path, args, fragment, more) for path in paths}
    if len({side.name for side in ours.values()}) < len(paths):
        raise UserError("--script: give the scripts names that differ, for the folders of their "
                        "logs are called so")
    torch.set_num_threads(threads)
    rates = [matrix_rate(dtype) / 1e9 for dtype in (torch.float32, torch.bfloat16)]
    print(f"matrix products: {rates[0]:.1f} GFLOP/s in float32, {rates[1]:.1f} in bfloat16; "
          f"{processes} process(es) of {threads} thread(s)")
    text = args.text.read_bytes()
    theirs = nanogpt_cpu.side(shlex.split(args.nanogpt_flags))
    with tempfile.TemporaryDirectory() as folder:
        shards = make_shards(text, Path(folder), fragment)
        for side in ours.values():
            kept = args.keep and (args.keep / Path(side.name).stem if len(ours) > 1 else args.keep)
            records = os.path.relpath(kept, ROOT) if kept else folder
            side.flags.extend([*shards, f"--records={records}"])
        peer = Path(folder, "nanogpt")
        if args.nanogpt:
            nanogpt_cpu.make_folder(args.nanogpt, text, peer)
        for _ in range(args.repeat):
            if args.nanogpt:
                theirs.runs.append(nanogpt_cpu.train(peer, environment(threads), theirs.flags))
            for path, side in ours.items():
                print(f"{side.name}:")
                side.runs.append(train(path, side.flags, processes, threads))

    target = 1.874 if args.target is None else args.target
    sides = list(ours.values())
    if args.nanogpt:
        if args.target is None:
            target = max(points[-1].loss for points in theirs.runs)
        sides.insert(0, theirs)
        if args.keep:
            nanogpt_cpu.draw(args.keep / "compare.png", sides, target, args.text.name, threads)
            nanogpt_cpu.write_csv(args.keep / "nanogpt.csv", theirs, args.nanogpt, args.text)
    done = [side for side in sides if len(side.reached(target)) == args.repeat]
    for side in done:
        if args.nanogpt and theirs in done and side is not theirs:
            print(split(target, side, theirs))
    for side in done:
        print(("" if side is sides[-1] else f"{side.name}: ") + time_to(target, side))
    for side in ours.values():
        missed = args.repeat - len(side.reached(target))
        if missed:
            print(f"error: {target:g} was not reached in {missed} of {args.repeat} run(s) of "
                  f"{side.name}", file=sys.stderr)
    sys.exit(any(side not in done for side in ours.values()))


def time_to(target: float, side: Side) -> str:
    times = [point.seconds for point in side.reached(target)]
    spread = f" (median of {', '.join(f'{t:.2f}' for t in times)})" if len(times) > 1 else ""
    return f"reached {target:g} after {statistics.median(times):.2f} s of training{spread}"


def split(target: float, side: Side, theirs: Side) -> str:
    """How many times as fast as theirs, and how much of that is fewer tokens and how much is more
    tokens a second; of the medians."""
    tokens, seconds = side.medians(target)
    their_tokens, their_seconds = theirs.medians(target)
    fewer = their_tokens / tokens
    faster = (tokens / seconds) / (their_tokens / their_seconds)
    return (f"{side.name}: {tokens:.0f} tokens to the target, of which nanoGPT takes {fewer:.2f} "
            f"times as many; {tokens / seconds:.0f} tokens a second, {faster:.2f} times nanoGPT's; "
            f"{fewer:.2f} x {faster:.2f} = {fewer * faster:.2f} times as fast")


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
