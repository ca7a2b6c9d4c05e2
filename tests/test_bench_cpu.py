"""The CPU benchmark on the tests' text: a target that is reached, one that is not, a model that is
too large."""

import subprocess
import sys

import pytest
from bench_cpu import RECIPES, count_parameters
from conftest import ROOT

SMALL = [
    "--windows=SS", "--value_embeds=0.", "--attention=xx", "--model_dim=32", "--num_heads=2",
    "--head_dim=16", "--train_seq_len=128", "--val_seq_len=256", "--window_end=128",
    "--micro_batches=2", "--num_iterations=4", "--val_loss_every=2", "--seed=1",
]


def bench(*argv):
    script, text = ROOT / "tests" / "bench_cpu.py", ROOT / "tests" / "text.txt"
    return subprocess.run([sys.executable, str(script), str(text), *argv], capture_output=True,
                          text=True, timeout=250)


def test_reaches_an_easy_target_and_keeps_the_logs(tmp_path):
    done = bench("--target=5.7", "--repeat=2", "--processes=2", f"--keep={tmp_path}", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("reached 5.7 after ")
    assert " s of training (median of " in lines[-1]
    assert "GFLOP/s in float32" in done.stdout and "2 process(es)" in done.stdout
    assert all(done.stdout.count(f"\n{kind}: ") == 2 for kind in ("model", "throughput", "log"))
    rows = [line.split() for line in lines if line.endswith(" s") and line.split()[0].isdigit()]
    assert [row[:2] for row in rows] == 2 * [["0", "0"], ["2", "512"], ["4", "1024"]]
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert len(logs) == 2 and len(list(tmp_path.iterdir())) == 2, "no checkpoints"
    size = (ROOT / "tests" / "text.txt").stat().st_size
    cut = size * 9 // 10
    tokens = cut + -(-cut // 256)  # an end-of-text token stands before each 256 bytes
    for log in logs:  # the first 90 % of the bytes train, the last 10 % validate
        assert f"train_train_000001.bin {tokens} tokens" in log and f"on {size - cut} tokens" in log


def test_parameters_of_the_recipes():
    counts = [count_parameters(["--preset=demo", *flags.split()]) for _, flags in RECIPES.values()]
    assert counts == [686153, 819341]


@pytest.mark.parametrize("argv, status, words", [
    (["--target=0.001", "--processes=1", "--recipe=low"], 1,
     "error: 0.001 was not reached in 1 of 1 run(s)"),
    (["--model_dim=512"], 2, "parameters are more than 850000; --any_size allows them"),
    (["--recipe=high"], 2, "error: argument --recipe: invalid choice"),
    (["--processes=0"], 2,
     "error: --repeat, --processes, --threads and --fragment count from 1"),
    (["--no_such=1"], 2, "unrecognized arguments: --no_such=1"),
])
def test_says_in_one_line_what_is_wrong(argv, status, words):
    done = bench(*SMALL, *argv)
    assert done.returncode == status and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr, done.stderr
