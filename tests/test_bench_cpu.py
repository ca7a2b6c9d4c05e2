"""The CPU benchmark on the tests' text: a target that is reached, another that is not, and a model
that is too large."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench_cpu import ATTEMPT, RECIPES, count_parameters, recipe_flags
from conftest import ROOT
from nanogpt_cpu import READ_BY_IT, points_of

from data.common import UserError
from records.sample import load_script

SMALL = [
    "--windows=SS", "--value_embeds=0.", "--attention=xx", "--model_dim=32", "--num_heads=2",
    "--head_dim=16", "--train_seq_len=128", "--val_seq_len=256",
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
    counts = [done.stdout.count(f"\n{kind}: ") for kind in ("model", "throughput", "log")]
    assert counts == [2, 2, 4]
    rows = [line.split() for line in lines if line.endswith(" s") and line.split()[0].isdigit()]
    assert [row[:2] for row in rows] == 2 * [["0", "0"], ["2", "512"], ["4", "1024"]]
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert len(logs) == 2 and len(list(tmp_path.iterdir())) == 2, "no checkpoints"
    size = (ROOT / "tests" / "text.txt").stat().st_size
    cut = size * 9 // 10
    tokens = cut + -(-cut // 256)  # an end-of-text token stands before each 256 bytes
    for log in logs:  # the first 90 % of the bytes train, the last 10 % validate
        assert f"train_train_000001.bin {tokens} tokens" in log and f"on {size - cut} tokens" in log


@pytest.mark.parametrize("path", [ATTEMPT, ROOT / "train_gpt.py"])
def test_the_recipes_are_for_either_script(path):
    script = load_script(path)
    counts = []
    for name in RECIPES:
        flags = recipe_flags(name, script)
        script.check_settings(script.parse_flags(flags)[0], 1)
        counts.append(count_parameters(script, flags))
    assert counts == ([152071, 730091] if path == ATTEMPT else [139273, 884752])


def test_the_script_may_be_the_original_or_a_copy(tmp_path):
    text = (ROOT / "train_gpt.py").read_text()
    assert text.count("throughput: ") == 1
    (tmp_path / "mine.py").write_text(text.replace("throughput: ", "throughput: of mine, "))
    done = bench("--target=5.8", f"--script={tmp_path}/mine.py", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "throughput: of mine" in done.stdout and "\nreached 5.8 after" in done.stdout


@pytest.mark.parametrize("argv, status, words", [
    (["--target=0.001", "--processes=1", "--recipe=low",
      "--windows=SSS", "--value_embeds=0..", "--attention=xxx"], 1,
     "error: 0.001 was not reached in 1 of 1 run(s)"),
    (["--model_dim=512"], 2, "parameters, more than 850000; --any_size allows that"),
    (["--processes=0"], 2,
     "error: --repeat, --processes, --threads and --fragment must be at least 1"),
    (["--script=train_gpt.py", "--script=train_gpt.py"], 2,
     "error: --script: give the scripts names that differ"),
])
def test_says_in_one_line_what_is_wrong(argv, status, words):
    done = bench(*SMALL, *argv)
    assert done.returncode == status and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr, done.stderr


# What nanoGPT needs, in a program that prints as it does: it learns nothing, but the data must be
# there, and the flags must be those of the documented run.
NANOGPT = '''import pickle, sys
import numpy as np
assert "--n_embd=128" in sys.argv and sys.argv[1] == "config/train_shakespeare_char.py"
folder = "data/shakespeare_char/"
train, val = (np.fromfile(folder + name, np.uint16) for name in ("train.bin", "val.bin"))
vocab = pickle.load(open(folder + "meta.pkl", "rb"))["vocab_size"]
assert max(train.max(), val.max()) == vocab - 1
print("tokens per iteration will be: 2,048")
print(f"step 0: train loss 5.8000, val loss {len(train) + len(val)}.0")
print("iter 0: loss 5.8000, time 9000.00ms, mfu -100.00%")
print("iter 1: loss 5.8000, time 200000.00ms, mfu -100.00%")
print("step 2: train loss 5.7000, val loss 5.3100")
print("saving checkpoint to out-shakespeare-char")
print("iter 2: loss 5.7000, time 8000.00ms, mfu 0.01%")
print("iter 3: loss 5.7000, time 300000.00ms, mfu 0.01%")
print("step 4: train loss 5.7000, val loss 5.3000")
print("iter 4: loss 5.7000, time 7000.00ms, mfu 0.01%")
'''


def test_nanogpt_is_trained_on_the_same_text_and_compared(tmp_path):
    checkout = tmp_path / "nanoGPT"
    (checkout / "config").mkdir(parents=True)
    for name in READ_BY_IT:
        (checkout / name).write_text("")
    (checkout / "train.py").write_text(NANOGPT)
    done = bench(f"--nanogpt={checkout}", f"--keep={tmp_path / 'kept'}", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    # The iterations with a validation, 0, 2 and 4, count as long as the median of 200 and 300 s.
    assert lines[-3] == "nanoGPT: reached 5.3 after 1000.00 s of training"
    for line, start in ((lines[-2], "train_gpt.py: "), (lines[-1], "")):
        assert line.startswith(f"{start}reached 5.3 after ")
    for line, name in zip(lines[-5:-3], ("train_gpt.py", "speedrun_2026")):
        number = r"([\d.]+)"
        tokens, fewer, faster, factor = map(float, re.fullmatch(
            rf"{name}: {number} tokens to the target, of which nanoGPT takes {number} times as "
            rf"many; \d+ tokens a second, {number} times nanoGPT's; .* = {number} times as fast",
            line).groups())
        assert tokens * fewer == pytest.approx(4 * 2048, rel=0.01), "what nanoGPT's 4 steps took"
        assert fewer * faster == pytest.approx(factor, rel=0.01)
    kept = tmp_path / "kept"
    size = (ROOT / "tests" / "text.txt").stat().st_size
    rows = [line for line in (kept / "nanogpt.csv").read_text().splitlines() if line[0] != "#"]
    assert rows[:4] == ["run,step,tokens,seconds,val_loss", f"1,0,0,0.000,{size}.0000",
                        "1,2,4096,450.000,5.3100", "1,4,8192,1000.000,5.3000"]
    assert len(rows) == 4 and not list(kept.glob("*.log"))
    for name in ("train_gpt", "speedrun_2026"):
        assert len(list((kept / name).glob("*.log"))) == 1
    assert (kept / "compare.png").stat().st_size > 10_000
    assert sorted(path.name for path in checkout.rglob("*") if path.is_file()) == sorted(
        Path(name).name for name in READ_BY_IT), "the checkout stays as it is"


def test_a_peer_that_is_no_checkout_or_fails_is_an_error_in_one_line(tmp_path):
    done = bench(f"--nanogpt={tmp_path}", *SMALL)
    assert done.returncode == 2 and "has no train.py: name a checkout of https" in done.stderr
    with pytest.raises(UserError, match="lacks its lines"):
        points_of("step 0: train loss 5.8000, val loss 5.8000\n")
