"""The pages hold: their commands run, or are parsed by the programs that they name; what they link
to exists; and the numbers in their marked tables are those of the committed logs."""

import ast
import csv
import hashlib
import json
import math
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
from mutants import MUTANTS
from test_data_vocab import write_vocabulary

import train_gpt
from data import vocab
from data.common import sha256
from records.tools import ablate, compare, launch, logs, race

FOLDERS = sorted(path.parent for path in ROOT.glob("records/*/README.md"))
PAGES = [ROOT / "README.md", *sorted(path for pattern in ("*/*.md", "records/*/README.md")
                                     for path in ROOT.glob(pattern))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README = TEXTS["README.md"]
SCRIPT = (ROOT / "train_gpt.py").read_text()
SPEEDRUN = train_gpt.PRESETS["speedrun"]
LOGS = sorted(subprocess.run(["git", "-C", ROOT / "records", "ls-files", "*.log"], text=True,
                             capture_output=True, check=True).stdout.splitlines())
FIELDS = {f.name for f in fields(train_gpt.Hyperparameters)}

# In the copy of the repository in which the commands run, the demo is this small.
SMALL_DEMO = """PRESETS["demo"] = replace(
    PRESETS["demo"], model_dim=32, num_heads=2, head_dim=16, train_seq_len=128, val_seq_len=256,
    val_tokens=1000, window_start=128, window_end=128, num_iterations=8, val_loss_every=4)

"""


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def indented(text: str) -> str:
    """The commands of a text, as a shell script. What stands in <> becomes a word."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return re.sub(r"<([\w ]+)>", lambda match: match[1].replace(" ", "_"), "\n".join(lines) + "\n")


def blocks(text: str, mark: str) -> list[str]:
    """What follows each <!-- mark -->, up to an empty line."""
    return [part.split("\n\n")[0] for part in text.split(f"<!-- {mark} -->\n")[1:]]


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
            name for name in names
            if Path(path, name).is_file() and not name.endswith((".py", ".html"))])
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copy(ROOT / "tests" / "text.txt", folder / "my_text.txt")
    before, mark, after = SCRIPT.partition("# ---- 2. Schedules")
    assert mark
    (folder / "train_gpt.py").write_text(before + SMALL_DEMO + mark + after)
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


def make_demo_shards(folder: Path, text: bytes):
    demo = folder / "data" / "demo"
    demo.mkdir(exist_ok=True)
    sidecar = {"tokenizer": "bytes"}
    for side, number, times in (("train", 1, 20), ("val", 0, 1)):
        path = demo / f"demo_{side}_{number:06}.bin"
        write_shard(path, byte_documents(text) * times)
        sidecar[side] = {"shards": [{"file": path.name, "sha256": sha256(path)}]}
    (demo / "demo.json").write_text(json.dumps(sidecar))


def test_the_first_commands(tmp_path):
    """As far as they differ from what other tests run: the clone has what they start."""
    first = README.split("## Copy, tweak, race")[0]
    clone, enter, train, demo, tests = indented(first).splitlines()
    clone = clone.replace("this_repository", str(ROOT))
    done = subprocess.run(["bash", "-euc", f"{clone}\n{enter}\n./run.sh --help"], cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    assert "./run.sh race my_record.py" in done.stdout
    for command, words in ((train, ["./run.sh"]), (demo, ["./run.sh", "demo"]),
                           (tests, ["./run.sh", "test"])):
        assert command.split("#")[0].split() == words


def test_copy_tweak_race_and_sample(copy, text):
    make_demo_shards(copy, text)
    page = section(README, "Copy, tweak, race")
    copied, race = indented(page).splitlines()
    (two_settings,) = re.findall(r"`(\S+ race .*--only_ours=.*)`", page)
    alone, sample = re.findall(r"`(\S+ my_record\.py --name=[^`]*|\./run\.sh sample [^`]*)`",
                               page)
    assert copied.startswith("cp ") and race == "./run.sh race my_record.py"
    # With another activation, which one might try, a run's loss is not that of the script.
    tweak = r"sed -i 's/F.relu(self.fc(x_TD))/F.silu(self.fc(x_TD))/' my_record.py"
    output = bash(copy, "\n".join([copied, tweak, f"{race} --most=1 || [ $? = 4 ]"]))
    folder = copy / "records" / "race_my_record"
    assert re.search(r"-.*F\.relu.*\n\+.*F\.silu", (folder / "my_record.patch").read_text())
    assert "verdict" in output and (folder / "race.png").stat().st_size > 10_000
    for side in ("my_record", "train_gpt"):
        assert len(list((folder / side).glob("*.log"))) == 1
    assert "verdict" in bash(copy, f"{two_settings} --most=1 || [ $? = 4 ]")
    output = bash(copy, f"{alone}\n{sample}")
    assert "\ndef " in output
    (log,) = copy.glob("records/*_mine.log")
    assert "F.silu(self.fc(x_TD))" in log.read_text()


def test_your_own_text(copy):
    """The commands in bytes, with fewer steps; those in GPT-2's tokens with a smaller model, and
    without a network, so with a made-up vocabulary of the same size."""
    page = TEXTS["data/README.md"]
    commands = indented(section(page, "Your own text"))
    commands, fewer = re.subn(r"--num_iterations=\d+", "--num_iterations=4", commands)
    *in_bytes, tokenize, train, sample = commands.splitlines()
    assert fewer == 1 and len(in_bytes) == 3
    output = bash(copy, "\n".join(in_bytes))
    assert output.count("final_val_loss: ") == 2 and "\nThe " in output
    assert len(list((copy / "data" / "my_text").glob("*.bin"))) == 2

    vocabulary = write_vocabulary(copy)
    source = (copy / "data" / "vocab.py").read_text()
    for name, published in vocab.GPT2_SHA256.items():
        made_up = hashlib.sha256((vocabulary / name).read_bytes()).hexdigest()
        source = source.replace(published, made_up)
    (copy / "data" / "vocab.py").write_text(source)
    train, smaller = re.subn(r"--model_dim=\d+ --num_heads=\d+ ", "", train)
    assert smaller == 1
    inspect = indented(section(page, "The format of a shard")).strip()
    assert "`--vocab_dir=FOLDER`" in page
    offline = "export TIKTOKEN_CACHE_DIR= https_proxy=http://127.0.0.1:9\n"
    output = bash(copy, offline + f"{tokenize} --vocab_dir=.\n{train}\n{sample} --vocab_dir=.\n"
                  f"{inspect} --vocab_dir=.")
    assert "final_val_loss: " in output and "\nThe " in output and "(gpt2)" in output
    assert len(list((copy / "data" / "mine").glob("*.bin"))) == 2


def test_commands_for_when_something_goes_wrong(copy, text):
    """Each in its order; the first run is ended, as by a scheduler, and the second resumes it."""
    make_demo_shards(copy, text)
    script = copy / "train_gpt.py"
    script.write_text(script.read_text().replace("num_iterations=8,", "num_iterations=120,"))
    first, resume = indented(section(TEXTS["records/howto.md"], "A run that died")).splitlines()
    others = indented(section(TEXTS["records/howto.md"], "If something else goes wrong"))
    run = subprocess.Popen(["bash", "-c", f"exec {first}"], cwd=copy, env=environment(copy),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in run.stdout:
        if line.startswith("step:110/"):
            run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) == 128 + signal.SIGTERM
    (log,) = copy.glob("records/*_safe.log")
    bash(copy, resume.replace("records/time_safe/", f"records/{log.stem}/"))
    (resumed,) = set(copy.glob("records/*.log")) - {log}
    run = logs.read_run(resumed, "safe")
    assert run.logs == [(str(log), 0), (str(resumed), 100)] and run.finished
    assert not run.missing and not run.mixed and not run.changed
    trained = [line.step for line in run.lines if line.kind == "train"]
    assert trained == [*range(1, 121)]
    output = bash(copy, others)
    assert output.startswith("checks passed\n") and "documents" in output


def test_a_new_optimizer(copy, text):
    """The page's optimizer, put where the page says, trains and is raced at the rate chosen."""
    make_demo_shards(copy, text)
    page = section(TEXTS["records/howto.md"], "A new optimizer")
    optimizer, row = re.findall(r"(?s)```python\n(.*?)```", page)
    script = (copy / "train_gpt.py").read_text()
    place, old_row = "def newton_schulz(", row.replace("SignMomentum", "Muon")
    assert script.count(place) == script.count(old_row) == 1
    script = script.replace(place, f"{optimizer}\n{place}").replace(old_row, row)
    (copy / "my_optimizer.py").write_text(script)
    rates, race = indented(re.sub("(?s)```.*?```", "", page)).splitlines()
    bash(copy, rates)
    assert [len(list(copy.glob(f"records/*_lr{rate}.log"))) for rate in (0.0003, 0.001, 0.003, 0.01)
            ] == [1, 1, 1, 1]
    output = bash(copy, f"{race} --most=1 || [ $? = 4 ]")
    assert "verdict" in output and "+class SignMomentum" in (
        copy / "records" / "race_my_optimizer" / "my_optimizer.patch").read_text()


# --------------------------------------------------------------------------------------------------
# What is named exists

def started(script: str) -> list[list[str]]:
    """The words of each program that a shell script starts, as the shell sees them."""
    shell = "set -fu\n"  # f: patterns stay as they are
    for name in ("./run.sh", "python", "torchrun", "tests/torch_versions.sh", "cp", "cd", "git",
                 "diff", "patch"):
        shell += f"{name}() {{ printf '%s\\n' '{name}' \"$@\" ''; }}\n"
    done = subprocess.run(["bash", "-c", shell + script], capture_output=True, text=True,
                          check=True)
    assert not done.stderr, done.stderr  # of a command that is none of these
    return [command.splitlines() for command in done.stdout.strip("\n").split("\n\n") if command]


def commands_of(text: str) -> list[list[str]]:
    text = re.sub(r"(?s)\n```.*?\n```", "", text)
    spans = "\n".join(re.findall(r"`((?:\./run\.sh|python) [^`]*)`", text))
    return started(indented(text) + spans)


TOOLS = {"honest": "records/tools/honesty.py", "tokenize": "data/tokenize_text.py",
         "inspect": "data/inspect_shards.py", "fineweb": "data/fineweb.py",
         **{verb: f"records/tools/{verb}.py" for verb in ("bench", "compare", "sample", "hellaswag")}}
COMMANDS = [words for text in TEXTS.values() for words in commands_of(text)]


def training(words: list[str]) -> tuple[str, list[str]] | None:
    """The script that a command trains, and the flags for it; None if it trains none."""
    if "--help" in words:
        return None
    if words[:2] == ["./run.sh", "race"]:
        scripts = [word for word in words[2:] if word.endswith(".py")] or ["my_record.py"]
        flags = [word for word in words[2:] if word not in scripts]
        there = next(filter(Path.exists, [ROOT / scripts[0], ROOT / "train_gpt.py"]))
        racer = race.parse([str(there), *flags]).candidates[0]
        return os.path.relpath(racer.script, ROOT), launch.split_words(racer.flags)[1]
    if words[:2] == ["./run.sh", "ablate"]:
        _, script, flags = ablate.parse(words[2:])
        there = next(filter(Path.exists, [ROOT / script, ROOT / "train_gpt.py"]))
        racer = race.parse([str(there), *flags]).candidates[0]
        return os.path.relpath(racer.script, ROOT), launch.split_words(racer.flags)[1]
    if words[0] == "./run.sh" and words[1:2] == ["train"]:
        words = [words[0], *words[2:]]
    if words[0] == "./run.sh" and words[1:2] and words[1] in TOOLS:
        return None
    if words[0] == "./run.sh" and words[1:2] not in (["test"], ["ideas"], ["help"], ["VERB"]):
        own = ("--repeat=", "--text=", "--help")
        return launch.split_words([word for word in words[1:] if not word.startswith(own)])
    scripts = [i for i, word in enumerate(words)
               if re.search(r"\b(train_gpt|my_record)\.py$", word)]
    if words[0] == "torchrun" or words[0] == "python" and scripts[:1] == [1]:
        return words[scripts[0]], [word for word in words[scripts[0] + 1:] if word != "--help"]
    return None


TRAINING = [found for found in map(training, COMMANDS) if found]
assert len(COMMANDS) > 75 and len(TRAINING) > 25, "the commands are not found"


@pytest.mark.parametrize("path, flags", TRAINING, ids=str)
def test_flags_of_training_exist_and_keep_the_tokens_of_a_step(path, flags):
    assert (ROOT / path).is_file() or path in ("my_record.py", "my_optimizer.py")
    hp, command = train_gpt.parse_flags(flags)
    if "micro_batches" in command.named and "model_dim" not in command.named:  # no miniature
        tokens = SPEEDRUN.micro_batches * SPEEDRUN.train_seq_len
        assert hp.micro_batches * hp.train_seq_len == tokens
    train_gpt.check_settings(hp, world_size=1)


def test_flags_of_the_tools_exist():
    tools = [words for words in COMMANDS if words[0] == "./run.sh" and words[1:2]
             and words[1] in TOOLS]
    assert len({words[1] for words in tools}) >= 7
    for words in tools:
        source = (ROOT / TOOLS[words[1]]).read_text()
        source += (ROOT / "records" / "tools" / "sample.py").read_text()
        for flag in re.findall(r"--(\w[\w-]*)", " ".join(words)):
            assert f'"--{flag}"' in source or flag == "help", f"{words[1]} has no --{flag}"


def headings(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)\n```.*?\n```", "", text))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS)
def test_links_and_files_exist(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in headings(target.read_text(encoding="utf-8")), link
    made = {"record.txt", "my_record.py", "my_optimizer.py", "neither.py",
            "<topic>", "race_my_record", "fineweb10B", "my_text"}
    for path in re.findall(r"`([\w./<>-]+(?:\.py|\.sh|\.md|\.txt|/))`", TEXTS[page]):
        found = any((where / path).exists() for where in (ROOT, ROOT / "records", folder))
        assert found or made & set(path.split("/")), path


def test_the_machines_that_are_named_train():
    """The processes of a row of the table divide its micro-batches."""
    rows = table(section(README, "Which command on which hardware"))
    assert len(rows) == 3
    for hardware, command, _ in rows:
        _, flags = training(started(command.strip("`"))[0])
        hp, _ = train_gpt.parse_flags(flags or ["--preset=speedrun"])
        for ranks in re.findall(r"\d+(?= or| GPUs)", hardware) or ["1"]:
            train_gpt.check_settings(hp, int(ranks))


# --------------------------------------------------------------------------------------------------
# Figures

def figures(folder: Path) -> set[str]:
    """The numbers that a page may give of the runs in a folder: their count, their steps, their
    tokens in millions; medians of seconds and losses, or means and SDs, as the folder's own page
    has it; the targets in its commands, if all runs end at or below; the figures of nanoGPT, where
    they are compared with it."""
    sides = sorted({path.parent for path in folder.glob("*/*.log")})
    if (folder / "nanogpt.csv").exists() and sides:
        return set().union(*map(figures, sides))
    home = folder if (folder / "README.md").exists() else folder.parent
    runs, unread = logs.read([folder])
    assert runs and not unread
    losses = [run.loss for run in runs]
    found = {str(len(runs)), *(str(run.steps) for run in runs)}
    found |= {f"{run.tokens / 1e6:.3f}" for run in runs}
    page = (home / "README.md").read_text()
    averages = (statistics.mean, statistics.stdev)
    for average in averages if "Median of" not in page else (statistics.median,):
        found |= {f"{average(losses):.4f}", f"{average(losses):.3f}"}
        found.add(f"{average([run.seconds for run in runs]):.1f}")
    targets = re.findall(r"--target[= ](\d\S*)", page)
    found |= {target for target in targets if max(losses) <= float(target)}
    if (home / "nanogpt.csv").exists():
        lines = (home / "nanogpt.csv").read_text().splitlines()
        rows = csv.DictReader(line for line in lines if line[0] != "#")
        ends = {row["run"]: row for row in rows}.values()  # the last row of each run
        target = max(float(row["val_loss"]) for row in ends)
        found.add(f"{target:.4f}")
        reached = [next(line for line in run.validations if line.loss <= target) for run in runs]
        (tokens, seconds), (their_tokens, their_seconds) = (
            [statistics.median(values) for values in zip(*points)] for points in (
                [(line.tokens, line.seconds) for line in reached],
                [(float(row["tokens"]), float(row["seconds"])) for row in ends]))
        for t, s in ((tokens, seconds), (their_tokens, their_seconds)):
            found |= {f"{s:.1f}", f"{t / 1e6:.3f}", f"{t / s / 1e3:.0f}"}
        fewer, factor = their_tokens / tokens, their_seconds / seconds
        found |= {f"{fewer:.1f}", f"{factor / fewer:.1f}", f"{factor:.1f}"}
    return found


MARKED = [(page, mark) for page, text in TEXTS.items()
          for mark in dict.fromkeys(re.findall("<!-- (measured|answer.*) -->", text))]


@pytest.mark.parametrize("page, mark", MARKED)
def test_every_number_in_a_marked_table_or_paragraph_is_that_of_the_logs(page, mark):
    """Those of the folders to which a row or paragraph links, else of the page's own folder."""
    here = (ROOT / page).parent
    for block in blocks(TEXTS[page], mark):
        is_table = block.startswith("|")
        for text in block.splitlines()[2:] if is_table else [block]:
            links = [here / link for link in re.findall(r"\]\(([^)#]+)", text)] or [here]
            folders = {(path if path.is_dir() else path.parent).resolve() for path in links}
            known = set().union(*map(figures, folders))
            words = re.sub(r"\]\(.*?\)", "]", text)
            numbers = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-\d+)?", words)
            assert numbers and {number.replace(",", "") for number in numbers} <= known, text


def test_the_ablations_are_those_of_the_verdict():
    verdict = json.loads((ROOT / "records" / "2026-11-25_parts" / "verdict.json").read_text())
    rows = {row["candidate"]: row for row in verdict}
    (shown,) = blocks(TEXTS["records/method.md"], "ablation")
    parts = []
    for line in shown.splitlines()[2:]:
        name, lines = line.strip("| ").split(" | ")[:2]
        parts.append(ablate.Part(name, [], lines))
    assert len(parts) == len(rows)
    made = ablate.table_of(parts, rows, 0.01)
    assert shown == made.strip()


def test_the_output_that_is_shown_is_a_logs():
    page = TEXTS["records/demo/README.md"]
    shown = page.split("<!-- demo output -->\n```\n")[1].split("\n```")[0].splitlines()
    assert len(shown) <= 12
    lines = [line for line in shown if line != "..."]
    assert len(lines) >= 8
    texts = [path.read_text() for path in (ROOT / "records" / "demo").glob("*.log")]
    assert any(all(f"\n{line}\n" in text for line in lines) for text in texts)


@pytest.mark.parametrize("page, name", [
    (page, name) for page, text in TEXTS.items()
    for name in re.findall("<!-- verdict of records/(.*) -->", text)])
def test_the_verdict_that_is_shown_is_that_of_the_logs(page, name):
    folder = ROOT / "records" / name
    shown = TEXTS[page].split(f"<!-- verdict of records/{name} -->\n```\n")[1].split("\n```")[0]
    sides = sorted({path.parent for path in folder.glob("*/*.log")})
    assert len(sides) == 2
    ours, theirs = sides if sides[0].name != "train_gpt" else sides[::-1]
    command = [sys.executable, "records/tools/compare.py", str(ours.relative_to(ROOT)), "--vs",
               str(theirs.relative_to(ROOT)), "--until_decided=0.01"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.startswith("verdict") and f"{shown}\n" in done.stdout
    assert done.stdout == (folder / "verdict.txt").read_text()


def test_the_table_of_results_is_that_of_the_logs():
    """On one machine and torch, as is said above it, or on those that a row names."""
    page = TEXTS["records/README.md"]
    rows = table(section(page, "Results"))
    folders = {str(Path(name).parent) for name in LOGS} - {
        name for name in {str(Path(name).parent) for name in LOGS} if name.startswith("tokens/")}
    assert [row[0] for row in rows] == [f"[{name}]({name}/)" for name in sorted(folders)]
    for name, count, loss, seconds, steps, tokens, _ in rows:
        runs, _ = logs.read([ROOT / "records" / re.match(r"\[(.*?)\]", name)[1]])
        losses, times = [run.loss for run in runs], [run.seconds for run in runs]
        assert count == str(len(runs)) and {steps} == {str(run.steps) for run in runs}, name
        assert loss == f"{statistics.mean(losses):.4f} ({statistics.stdev(losses):.4f})", name
        assert seconds == f"{statistics.mean(times):.1f} s ({statistics.stdev(times):.1f})", name
        assert {tokens} == {compare.tokens_text(run.tokens) for run in runs}, name
    assert "two cores of an AMD EPYC with AVX512-BF16, in torch 2.13, unless" in page
    runs, _ = logs.read([ROOT / "records" / name for name in LOGS])
    for run in runs:
        usual = re.match("2x AMD EPYC.* avx512_bf16", run.hardware) and run.torch[:5] == "2.13."
        assert usual or f"{run.hardware}, torch {run.torch}" in page, run.name


@pytest.mark.parametrize("size", [8, 16, 64])
def test_the_volume_table_is_that_of_the_models_parameters(size):
    """Gradients are reduce-scattered, updates or weights gathered: in bfloat16, but the head's in
    float32. A process sends all parts but its own. Each shape's stack of matrices is padded."""
    hp = replace(SPEEDRUN, train_seq_len=128, val_seq_len=128)
    with torch.device("meta"):
        model = train_gpt.GPT(hp, torch.bfloat16, flex=True)
    head, shapes = model.lm_head.weight.numel(), {}
    for p in model.blocks.parameters():
        if p.ndim > 1:
            shapes.setdefault(p.shape, []).append(p.numel())
    matrices = sum(counts[0] * math.ceil(len(counts) / size) * size for counts in shapes.values())
    embeddings = model.embed.weight.numel() * (1 + len(model.value_embeds))
    volume = (size - 1) / size * (4 * matrices + 8 * head + 4 * embeddings)
    milliseconds = [1e3 * volume / rate for rate in (450e9, 50e9, 12.5e9)]
    row = (f"| {size} | {volume / 1e9:.2f} GB | {milliseconds[0]:.1f} ms | "
           f"{milliseconds[1]:.0f} ms | {milliseconds[2]:.0f} ms |")
    assert row in blocks(TEXTS["records/cluster.md"], "volume")[0].splitlines(), row


def test_the_mistakes_of_the_page_are_those_that_are_planted():
    """As many as it says, in all sections. Each differs from the others, its text still stands in
    the script, and the test that should find it exists."""
    page = section(TEXTS["tests/README.md"], "The mistakes that the suite finds")
    counts = re.findall(r"(?:plants|all) (\d+)\s+mistakes", page)
    assert counts == 2 * [str(len(MUTANTS))], "plant them, and write here what came out"
    assert {m.section for m in MUTANTS} == set(range(1, 12))
    assert len({(m.text, m.wrong) for m in MUTANTS}) == len(MUTANTS)
    assert not [m.mistake for m in MUTANTS if SCRIPT.count(m.text) != 1 or m.text == m.wrong]
    for mutant in MUTANTS:
        file, _, test = mutant.test.partition("::")
        assert f"def {test or 'test_'}" in (ROOT / "tests" / file).read_text(), mutant.mistake


# --------------------------------------------------------------------------------------------------
# Committed logs

def test_there_are_committed_logs_and_every_folder_has_a_page():
    assert len(LOGS) >= 10
    assert {Path(name).parts[0] for name in LOGS} <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("name", LOGS)
def test_a_committed_log_is_whole_and_of_a_committed_script(name):
    """Reading it checks the hash of its source."""
    run = logs.read_run(ROOT / "records" / name, name)
    (hyperparameters,) = [node for node in ast.parse(run.source).body
                          if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters"]
    known = [node.target.id for node in hyperparameters.body if isinstance(node, ast.AnnAssign)]
    assert list(run.hyperparameters) == known and not run.missing
    assert re.fullmatch("[0-9a-f]{40}", run.environment["git"]), "commit the script, then train"
