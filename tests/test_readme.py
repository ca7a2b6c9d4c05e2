"""The README's own-text walk-through, as it stands there, on the tests' text."""

import os
import shlex
import shutil
import subprocess
import sys

from conftest import ROOT

SMALL = ("--num_iterations=8 --model_dim=32 --num_heads=2 --head_dim=16 --train_seq_len=128 --val_seq_len=256 --window_end=128 "
         "--sample_tokens=0 --seed=1").split()


def walk_through() -> list[str]:
    section = (ROOT / "README.md").read_text().split("## Your own text")[1].split("\n## ")[0]
    return [line.strip() for line in section.replace("\\\n", " ").splitlines() if line.startswith("    ")]


def test_own_text_in_three_commands(tmp_path):
    commands = walk_through()
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
