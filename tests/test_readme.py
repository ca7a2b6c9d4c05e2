"""The README's commands and figures that can be rerun: the own-text walk-through, what to do if something goes wrong, the volume table."""

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import train_gpt

SMALL = ("--num_iterations=8 --model_dim=32 --num_heads=2 --head_dim=16 --train_seq_len=128 --val_seq_len=256 --window_end=128 "
         "--sample_tokens=0 --seed=1").split()


def commands_of(title: str) -> list[str]:
    section = (ROOT / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [line.strip() for line in section.replace("\\\n", " ").splitlines() if line.startswith("    ")]


def test_own_text_in_three_commands(tmp_path):
    commands = commands_of("Your own text")
    assert len(commands) == 3
    shutil.copy(ROOT / "tests" / "text.txt", tmp_path / "my_text.txt")
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NPROC": "1"}
    printed = []
    for number, command in enumerate(commands):
        command = command.replace("my_text.txt", str(tmp_path / "my_text.txt")).replace("data/mine", str(tmp_path / "mine"))
        words = [str(next(tmp_path.glob("r/*_mine.log"))) if "*_mine" in word else word for word in shlex.split(command)]
        if number == 1:
            words += [*SMALL, f"--records={tmp_path}/r"]
        if words[0] == "python":
            words[0] = sys.executable
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert "val:" in printed[0] and "final_val_loss:" in printed[1]
    assert len(printed[2]) > 100


def test_commands_for_when_something_goes_wrong(tmp_path, shards):
    """Each command of that section in its order; the run of the first is stopped, as by a scheduler, so that the next can resume it."""
    commands = commands_of("If something goes wrong")
    assert [" ".join(shlex.split(c)[:2]) for c in commands] == [
        "./run.sh demo", "./run.sh demo", "./run.sh demo", "python train_gpt.py", "python data/inspect_shards.py", "./run.sh demo"]
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NPROC": "2"}
    small = [*SMALL, *shards, "--val_tokens=1000", "--epochs=9999", f"--records={tmp_path}"]
    safe = ["--num_iterations=150", "--val_loss_every=50"]

    def start(command: str, *flags):
        words = [str(next(tmp_path.glob("*_safe.log"))).join(["--resume=", ""]) if word.startswith("--resume=") else word
                 for word in shlex.split(command.replace("data/demo/demo_val_000000.bin", shards[1].split("=")[1].replace("*", "000000")))]
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        return subprocess.Popen([*words, *flags], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    for number, command in enumerate(commands):
        run = start(command, *([] if "inspect" in command else small), *(safe if "safe" in command else []))
        said = ""
        for line in run.stdout:
            said += line
            if number < 2 and line.startswith(f"step:{30 + 40 * number}/"):
                run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=200) == (1 if number < 2 else 0), said
        if number < 2:
            assert re.search(r"stopped by SIGTERM; step \d+ is saved", said), said
        if "--resume" in command:
            assert "\nresumed: step " in said, said
        if "--check" in command:
            assert "checks passed: 2 training and 1 validation" in said
    log = next(tmp_path.glob("*_safe.log")).read_text()
    numbers = [int(n) for n in re.findall(r"^step:(\d+)/150 train_loss", log, re.MULTILINE)]
    assert numbers == list(range(1, 151))


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_the_volume_table_is_that_of_the_optimizers_buffers(ranks, monkeypatch):
    monkeypatch.setattr(train_gpt.dist, "new_group", lambda: None)
    hp = dataclasses.replace(train_gpt.PRESETS["speedrun"], num_kv_heads=6, dtype="bfloat16")
    matrices, groups = train_gpt.optimizer_groups(train_gpt.meta_model(hp), hp)
    muon, adam = train_gpt.Muon(matrices, 0, ranks, torch.bfloat16), train_gpt.Adam(groups, ranks)
    moved = sum(g["grads"].nbytes + g["updates"].nbytes for g in muon.groups) + 2 * sum(g["grads"].nbytes for g in adam.groups)
    volume = (ranks - 1) / ranks * moved
    row = (f"| {ranks} | {volume / 1e9:.2f} GB | {1e3 * volume / 450e9:.1f} ms | {1e3 * volume / 50e9:.0f} ms | "
           f"{1e3 * volume / 12.5e9:.0f} ms |")
    assert row in (ROOT / "README.md").read_text(), row
