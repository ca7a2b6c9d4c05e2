#!/usr/bin/env python3
"""How long a plain CPU trains to a validation loss, from nothing but a text file.

    python tests/bench_cpu.py shakespeare.txt --target=1.874 --repeat=3
    python tests/bench_cpu.py shakespeare.txt --target=1.4697 --recipe=low
    python tests/bench_cpu.py book.txt --target=2 --num_iterations=500

are: three runs and their median; a low loss by a larger model, in some minutes; a text of
your own, with flags that go through to train_gpt.py.

The first 90 % of the file's bytes train, in fragments in random order, the last 10 % validate, all
of them; a byte is a token. It runs train_gpt.py itself, one process on up to four cores, and reads
its log: X in the last line, "reached 1.874 after X s of training", is what the script's own clock
says at the first validation loss at or below the target. The recipe "fast" refuses a model of more
than 850,000 parameters unless --any_size is given. Exit status: 0 reached, 1 not reached, 2 wrong
usage.
"""

import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch

from data import common, tokenize_text
from train_gpt import BLOCK, GPT, UserError, block_sparse, check_settings, parse_flags, resolve

MOST_PARAMETERS = 850_000
COMMON = "--preset=demo --name=bench_cpu --val_tokens=0 --epochs=1000 --save_every=0"
RECIPES = {  # bytes in a fragment, flags
    # In float32 on any processor: bfloat16 takes longer for products as small as these.
    "fast": (256, """
        --windows=LL --value_embeds=.0 --attention=.x --window_end=128 --model_dim=64 --num_heads=3
        --head_dim=32 --attention_scale=0.3 --rope_base=20 --smear --pair_rows=8192
        --micro_batches=1 --train_seq_len=1024 --val_seq_len=16384 --num_iterations=205
        --val_loss_every=0 --cooldown_frac=0.7 --embed_lr=0.4 --head_lr=0.012 --scalar_lr=0.1
        --muon_lr=0.05 --muon_momentum_steps=0 --muon_momentum_end=0.9 --adam_beta1=0.9
        --dtype=float32"""),
    # Steps for bfloat16, the default where the processor has AMX; in float32 1,200 do.
    "low": (2048, """
        --windows=LLL --value_embeds=.01 --attention=.xx --window_start=256 --window_end=256
        --model_dim=128 --num_heads=4 --head_dim=32 --attention_scale=0.3 --rope_base=20 --smear
        --pair_rows=1024 --micro_batches=1 --train_seq_len=2048 --val_seq_len=16384
        --num_iterations=1400 --val_loss_every=700 --future_tokens=1 --cooldown_frac=0.7
        --lr_floor=0 --embed_lr=0.04 --head_lr=0.004 --scalar_lr=0.1 --muon_lr=0.03
        --muon_momentum_steps=0 --muon_momentum_end=0.9 --adam_beta1=0.9"""),
}
VAL_LINE = re.compile(r"^step:(\d+)/\d+ val_loss:(\S+) train_time:(\d+)ms .*tokens:(\d+)", re.M)


def matrix_rate(dtype: torch.dtype, n: int = 512) -> float:
    """FLOP/s in a product of n x n matrices, the best of some."""
    a = torch.randn(n, n).to(dtype)
    times = []
    while len(times) < 2 or (sum(times) < 1 and len(times) < 20):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


def count_parameters(flags: list[str]) -> int:
    hp = resolve(parse_flags(flags, "demo")[0], torch.device("cpu"))
    # Sequences are short only for the table of angles, which is no parameter.
    hp = dataclasses.replace(hp, train_seq_len=BLOCK, val_seq_len=BLOCK)
    with torch.device("meta"):
        model = GPT(hp, block_sparse)
    return sum(p.numel() for p in model.parameters())


def make_shards(text: bytes, folder: Path, fragment: int) -> list[str]:
    """Shards of the two parts of a text, by the project's own tokenizer, and the flags that name
    them. The training part is cut into fragments that come in another order, since a step reads
    consecutive tokens: so it sees all of the text's styles."""
    cut = len(text) * 9 // 10
    for name, part, size in (("train", text[:cut], fragment), ("val", text[cut:], len(text))):
        (folder / name).mkdir()
        for start in range(0, len(part), size):
            (folder / name / f"{start:012}.txt").write_bytes(part[start:start + size])
        tokenize_text.main([
            str(folder / name), "--shuffle", "--out", str(folder), "--name", name,
            "--tokenizer", "bytes", "--val_fraction", "0", "--workers", "1"])
    return [f"--train_files={folder}/train_train_*.bin", f"--val_files={folder}/val_train_*.bin"]


def train(flags: list[str], processes: int, threads: int, target: float) -> float | None:
    """Seconds of training until the target, by one run; None where it was not reached. Prints a
    table as it goes."""
    launch = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone",
              f"--nproc_per_node={processes}", "train_gpt.py"]
    # glibc's allocator is to keep what a step frees: pages that come back from the kernel each time
    # cost a fifth of a step.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "",
        "MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}
    reached = None
    said = []
    with subprocess.Popen([*launch, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=environment, cwd=ROOT) as process:
        print(f"{'step':>6} {'tokens':>10} {'val loss':>9} {'train time':>11}")
        try:
            for line in process.stdout:
                said.append(line)
                if match := VAL_LINE.match(line):
                    step, tokens = int(match[1]), int(match[4])
                    loss, seconds = float(match[2]), int(match[3]) / 1000
                    print(f"{step:6} {tokens:10} {loss:9.4f} {seconds:9.2f} s", flush=True)
                    if loss <= target and reached is None:
                        reached = seconds
                elif line.startswith(("model:", "throughput:", "log:")):
                    print(line, end="", flush=True)
        except BaseException:  # SIGTERM reaches this process alone
            process.terminate()
            raise
    if process.returncode:
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        failure = "train_gpt.py failed:\n" + "".join(said[-30:])
        raise UserError(errors[0].strip() if errors else failure)
    return reached


def main():
    parser = common.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, metavar="TEXT_FILE")
    parser.add_argument("--target", type=float, default=1.874,
                        help="validation loss in nats per byte (1.874)")
    parser.add_argument("--recipe", choices=RECIPES, default="fast",
                        help="settings to start from (fast)")
    parser.add_argument("--any_size", action="store_true",
                        help=f"allow more than {MOST_PARAMETERS} parameters in the recipe fast")
    parser.add_argument("--repeat", type=int, default=1,
                        help="runs of a seed each, whose median the last line has (1)")
    parser.add_argument("--processes", type=int, default=1, help="ranks of torchrun (1)")
    parser.add_argument("--threads", type=int,
                        help="of each process (as many as it has cores, up to 4)")
    parser.add_argument("--fragment", type=int, metavar="BYTES",
                        help="of training text that stay together (256, recipe low: 2048)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for the logs")
    args, more = parser.parse_known_args()
    fragment, recipe = RECIPES[args.recipe]
    if args.fragment is not None:
        fragment = args.fragment
    processes = args.processes
    cores = (os.cpu_count() or 1) // max(1, processes)
    threads = max(1, min(4, cores)) if args.threads is None else args.threads
    if min(args.repeat, processes, threads, fragment) < 1:
        raise UserError("--repeat, --processes, --threads and --fragment count from 1")
    flags = [*COMMON.split(), *recipe.split(), *more]
    hp, _ = parse_flags(flags, "demo")
    check_settings(hp, processes)
    parameters = count_parameters(flags)
    if parameters > MOST_PARAMETERS and args.recipe == "fast" and not args.any_size:
        raise UserError(f"{parameters} parameters are more than {MOST_PARAMETERS}; --any_size "
                        "allows them")
    print(f"settings: {' '.join(flags)}")
    torch.set_num_threads(threads)
    rates = [matrix_rate(dtype) / 1e9 for dtype in (torch.float32, torch.bfloat16)]
    print(f"matrix products: {rates[0]:.1f} GFLOP/s in float32, {rates[1]:.1f} in bfloat16; "
          f"{processes} process(es) of {threads} thread(s)")
    with tempfile.TemporaryDirectory() as folder:
        records = os.path.relpath(args.keep, ROOT) if args.keep else folder
        flags += make_shards(args.text.read_bytes(), Path(folder), fragment)
        flags.append(f"--records={records}")
        times = [train(flags, processes, threads, args.target) for _ in range(args.repeat)]
    if None in times:
        print(f"error: {args.target} was not reached in {times.count(None)} of {args.repeat} "
              "run(s)", file=sys.stderr)
        sys.exit(1)
    spread = ""
    if args.repeat > 1:
        spread = f" (median of {', '.join(f'{t:.2f}' for t in times)})"
    print(f"reached {args.target:g} after {statistics.median(times):.2f} s of training{spread}")


if __name__ == "__main__":
    sys.exit(common.run(main, errors=(UserError,)))
