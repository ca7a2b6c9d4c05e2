"""README.md and records/README.md hold: their commands run as they stand, what they name exists,
and their figures are those of the script and of the logs."""

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, byte_documents, write_shard

import train_gpt

README = (ROOT / "README.md").read_text()
RECORDS = (ROOT / "records" / "README.md").read_text()
SCRIPT = (ROOT / "train_gpt.py").read_text()
SPEEDRUN = train_gpt.PRESETS["speedrun"]
FIELDS = {f.name for f in fields(train_gpt.Hyperparameters)}

# In the copy of the repository in which the commands run, the demo is this small.
SMALL_DEMO = """PRESETS["demo"] = replace(
    PRESETS["demo"], model_dim=32, num_heads=2, head_dim=16, train_seq_len=128, val_seq_len=256,
    val_tokens=1000, window_end=128, pair_rows=64, num_iterations=8, val_loss_every=4)

"""


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def indented(text: str) -> str:
    """The commands of a text, as a shell script."""
    return "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("    "))


def table(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


# --------------------------------------------------------------------------------------------------
# The commands run

@pytest.fixture
def copy(tmp_path) -> Path:
    """The programs in a folder of their own, with a small demo, and `python` that runs them."""
    folder = tmp_path / "copy"
    for name in ("data", "records"):
        shutil.copytree(ROOT / name, folder / name, ignore=lambda path, names: [
            name for name in names if not name.endswith(".py")])
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copy(ROOT / "tests" / "text.txt", folder / "my_text.txt")
    before, presets, after = SCRIPT.partition("def boolean(")
    assert presets
    (folder / "train_gpt.py").write_text(before + SMALL_DEMO + presets + after)
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    mine = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHON": f"{folder}/bin/python",
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NPROC": "1",
            "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | mine


def bash(folder: Path, script: str) -> str:
    done = subprocess.run(["bash", "-euxc", script], cwd=folder, env=environment(folder),
                          capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_copy_tweak_race_and_your_own_text(copy):
    commands = indented(section(README, "Copy, tweak, race")).splitlines()
    (gpus,) = [line for line in commands if line.startswith("torchrun")]
    commands.remove(gpus)
    assert len(commands) == 7 and commands[0].startswith("cp ") and "in 1 2 3 4 5;" in commands[2]
    commands[2] = commands[2].replace("in 1 2 3 4 5;", "in 1;")
    # What one would tweak: with another activation a run's loss is not that of the script.
    commands.insert(1, r"sed -i 's/F.relu(self.fc(x_TD))/F.silu(self.fc(x_TD))/' my*.py")
    said = bash(copy, "\n".join(["./run.sh --check", *commands]))  # which makes the demo's data
    logs = [path.stem.split("_", 1)[1] for path in copy.glob("records/*.log")]
    assert sorted(logs) == ["demo", "mine", "my_record", "train_gpt"]
    assert "F.silu" in (copy / "my_record.py").read_text()
    assert re.search(r"-.*F\.relu.*\n\+.*F\.silu", said) and "\nverdict: " in said
    assert (copy / "race.png").stat().st_size > 10_000
    assert "\ndef " in said.split("verdict: ")[1]  # the sample
    assert len(list((copy / "data" / "mine").glob("mine_*.bin"))) == 2


def test_commands_for_when_something_goes_wrong(copy, text):
    """Each in its order; the first run is stopped, as by a scheduler, so the second can resume."""
    demo = copy / "data" / "demo"
    demo.mkdir()
    write_shard(demo / "demo_train_000001.bin", byte_documents(text) * 20)
    write_shard(demo / "demo_val_000000.bin", byte_documents(text))
    (demo / "demo.json").write_text('{"tokenizer": "bytes"}')
    script = copy / "train_gpt.py"
    script.write_text(script.read_text().replace("num_iterations=8, ", "num_iterations=120, "))
    commands = indented(section(RECORDS, "If something goes wrong")).splitlines()
    assert len(commands) == 4
    run = subprocess.Popen(["bash", "-c", f"exec {commands[0]}"], cwd=copy, env=environment(copy),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = ""
    for line in run.stdout:
        said += line
        if line.startswith("step:70/"):
            run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) != 0
    assert re.search(r"error: stopped by SIGTERM\b.*/step00000050\.pt ", said), said
    (log,) = copy.glob("records/*_safe.log")
    example = re.search(r"records/\S+_safe\.log", commands[1])[0]
    said = bash(copy, commands[1].replace(example, f"records/{log.name}"))
    assert "\nresumed: step 50 at " in said
    numbers = re.findall(r"^step:(\d+)/120 train_loss", log.read_text(), re.MULTILINE)
    assert numbers == [str(step) for step in range(1, 121)]
    said = bash(copy, "\n".join(commands[2:]))
    assert said.startswith("checks passed\n") and "documents" in said


# --------------------------------------------------------------------------------------------------
# What is named exists

def started(script: str) -> list[list[str]]:
    """The words of each program that a shell script starts, as the shell sees them."""
    names = ("./run.sh", "python", "torchrun", "cp", "python3", ".venv/bin/pip")
    shell = "set -fu\n"  # f: patterns stay as they are
    for name in names:
        shell += f"{name}() {{ printf '%s\\n' '{name}' \"$@\" ''; }}\n"
    done = subprocess.run(["bash", "-c", shell + script], capture_output=True, text=True,
                          check=True)
    assert not done.stderr, done.stderr  # of a command that is none of these
    return [command.splitlines() for command in done.stdout.strip("\n").split("\n\n")]


def commands_of(text: str) -> list[list[str]]:
    spans = "\n".join(re.findall(r"`((?:\./run\.sh|python) [^`]*)`", text))
    return started(indented(text) + spans.replace("<its log>", "LOG"))


def training_flags(commands: list[list[str]]) -> list[list[str]]:
    """The flags for the training script of those commands that start it."""
    found = []
    for program, *words in commands:
        scripts = [word for word in words if re.fullmatch(r"(train_gpt|my_record)\.py", word)]
        if program == "./run.sh" and words[:1] != ["test"]:
            if words[:1] and words[0] in train_gpt.PRESETS:
                words[0] = f"--preset={words[0]}"
            found.append([word for word in words if not word.startswith("--repeat=")])
        elif program == "torchrun" or program == "python" and words[0] in scripts:
            found.append(words[words.index(scripts[0]) + 1:])
    return found


COMMANDS = commands_of(README) + commands_of(RECORDS)
TRAINING = training_flags(COMMANDS)


def test_the_commands_are_found():
    assert len(COMMANDS) > 40 and len(TRAINING) > 25


@pytest.mark.parametrize("flags", TRAINING, ids=" ".join)
def test_flags_of_training_exist_and_keep_the_tokens_of_a_step(flags):
    flags = [flag for flag in flags if flag != "--help"]
    hp, _ = train_gpt.parse_flags(flags, "speedrun")
    if "--micro_batches" in " ".join(flags):
        tokens = SPEEDRUN.micro_batches * SPEEDRUN.train_seq_len
        assert hp.micro_batches * hp.train_seq_len == tokens
    train_gpt.check_settings(hp, world_size=1)


def test_flags_of_the_tools_exist():
    tools = [words for words in COMMANDS
             if words[0] == "python" and re.match("(data|records|tests)/", words[1])]
    assert len({words[1] for words in tools}) == 10
    for words in tools:
        source = (ROOT / words[1]).read_text() + (ROOT / "records" / "sample.py").read_text()
        for flag in re.findall(r"--(\w[\w-]*)", " ".join(words)):
            known = f'"--{flag}"' in source or words[1].startswith("tests/") and flag in FIELDS
            assert known, f"{words[1]} has no --{flag}"


@pytest.mark.parametrize("text, folder", [(README, ROOT), (RECORDS, ROOT / "records")])
def test_links_and_files_exist(text, folder):
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (folder / link).exists(), link
    made = {"my_record.py", "<topic>"}
    for path in re.findall(r"`([\w./<>-]+(?:\.py|\.sh|\.md|\.txt|/))`", text):
        found = (ROOT / path).exists() or (folder / path).exists()
        assert found or made & set(path.split("/")), path


def test_the_machines_that_are_named_train():
    """The ranks of a row of the table divide its micro-batches."""
    rows = table(section(README, "Which command on which hardware"))
    assert len(rows) == 6
    for hardware, command, _ in rows[:-1]:
        hp, _ = train_gpt.parse_flags(command.strip("`").split()[1:], "speedrun")
        for ranks in re.findall(r"\d+(?= or| GPUs| H100)", hardware) or ["1"]:
            train_gpt.check_settings(hp, int(ranks))


# --------------------------------------------------------------------------------------------------
# Figures and sources

def test_the_readme_is_short():
    assert len(README.splitlines()) <= 160
    assert len(README.split()) <= 1290


def test_the_script_is_as_long_as_is_said():
    said = int(re.search(r"is ([\d,]+) lines", README)[1].replace(",", ""))
    assert len(SCRIPT.splitlines()) == pytest.approx(said, rel=0.03)


def test_the_sections_are_the_scripts():
    rows = table(section(README, "Copy, tweak, race"))
    assert len(rows) == 6
    for _, name in rows:
        title = name.removesuffix(", the table")
        assert re.search(rf"(?m)^# -+ {re.escape(title)}", SCRIPT), name


def test_each_source_in_the_script_has_its_address():
    papers = set(re.findall(r"arXiv:([\d.]+\d)", SCRIPT))
    numbers = set(re.findall(r"record (#\d+)", SCRIPT))
    dates = set(re.findall(r"record (?:of )?(\d{4}-\d\d-\d\d)", SCRIPT))
    assert len(papers) > 4 and len(numbers) > 3 and len(dates) > 4
    missing = [paper for paper in papers if f"https://arxiv.org/abs/{paper})" not in README]
    missing += [number for number in numbers if f"[record {number}](https://" not in README]
    missing += [date for date in dates if f"/{date}_" not in README and f"of {date}" not in README]
    assert not missing


def test_the_data_that_is_named_is_what_a_run_needs():
    chunks = int(re.search(r"the (\d+) training chunks", README)[1])
    for number, enough in ((chunks, True), (chunks - 1, False)):
        shards = dict.fromkeys(range(number), 100_000_000)
        steps = sum(1 for _ in train_gpt.steps_of(shards, SPEEDRUN))
        assert (steps >= SPEEDRUN.num_iterations) == enough
    assert f"{(chunks + 1) * 0.2:.1f} GB of FineWeb" in README


def last_validations(folder: str) -> list[tuple[float, float]]:
    """(seconds, loss) at the end of each log in a folder of records."""
    found = []
    for path in sorted((ROOT / folder).glob("*.log")):
        lines = re.findall(r"(?m)^step:\d+/\d+ val_loss:(\S+) train_time:(\d+)ms", path.read_text())
        found.append((int(lines[-1][1]) / 1000, float(lines[-1][0])))
    return found


def test_the_measured_figures_are_those_of_the_logs():
    rows = table(section(README, "Measured"))
    assert len(rows) == 4
    for what, runs, seconds, loss, link in rows:
        found = last_validations(re.search(r"\]\((\S+)\)", link)[1])
        assert len(found) == int(runs), what
        assert seconds == f"{statistics.median(time for time, _ in found):.1f} s", what
        ends = [end for _, end in found]
        assert loss == f"{statistics.median(ends):.4f}", what
        target = re.search(r"to (\d\.\d+)$", what)
        assert not target or max(ends) <= float(target[1]), what


def test_the_output_that_is_shown_is_a_logs():
    shown = README.split("<!-- demo output -->\n```\n")[1].split("\n```")[0].splitlines()
    assert len(shown) <= 12
    steps = [line for line in shown if line.startswith("step:")]
    assert len(steps) >= 3
    logs = [path.read_text() for path in (ROOT / "records" / "demo").glob("*.log")]
    assert any(all(f"\n{line}\n" in log for line in steps) for log in logs)


def test_the_comparison_that_is_shown_is_compares():
    shown = RECORDS.split("<!-- the last lines of compare.py -->\n```\n")[1].split("```")[0]
    command = [sys.executable, "records/compare.py", "records/pairs_on", "--vs",
               "records/pairs_off", "--target", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"\n{shown}")


@pytest.mark.parametrize("world_size", [8, 16, 64])
def test_the_volume_table_is_what_the_optimizers_exchange(world_size):
    sent = []
    share = (world_size - 1) / world_size

    class Counting(train_gpt.Ranks):
        def reduce_scatter(self, whole):
            mine = self.rows(whole)
            if len(mine) == len(whole):
                return whole, self.all_reduce(whole)
            sent.append(share * whole.nbytes)
            return mine, train_gpt.DONE

        def all_gather(self, whole):
            if len(self.rows(whole)) < len(whole):
                sent.append(share * whole.nbytes)
            return train_gpt.DONE

        def all_reduce(self, tensor):
            sent.append(2 * share * tensor.nbytes)
            return train_gpt.DONE

    hp = replace(SPEEDRUN, dtype="bfloat16", train_seq_len=128, val_seq_len=128)
    with torch.device("meta"):
        model = train_gpt.GPT(hp, train_gpt.flex, torch.bfloat16)
    ranks = Counting(0, world_size, torch.device("meta"))
    with torch.no_grad():
        for optimizer in train_gpt.build_optimizers(model, hp, ranks):
            for p in optimizer.params.values():
                p.grad = torch.empty_like(p)
            optimizer.send_gradients()
            optimizer.compute(0)
    volume = sum(sent)
    milliseconds = [1e3 * volume / rate for rate in (450e9, 50e9, 12.5e9)]
    row = (f"| {world_size} | {volume / 1e9:.2f} GB | {milliseconds[0]:.1f} ms | "
           f"{milliseconds[1]:.0f} ms | {milliseconds[2]:.0f} ms |")
    assert row in RECORDS, row
