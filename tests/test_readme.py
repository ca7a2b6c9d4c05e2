"""The pages hold: their commands run, or are parsed by the programs that they name; what they link
to exists; and their figures are those of the script and of the committed logs."""

import ast
import csv
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tokenize
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import ATTEMPT, ROOT, byte_documents, load_script, write_shard
from scipy import stats

import train_gpt
from records import compare, logs

FOLDERS = sorted(path.parent for path in ROOT.glob("records/*/README.md"))
PAGES = [ROOT / "README.md", *(ROOT / name / "README.md" for name in ("records", "data", "tests")),
         *(folder / "README.md" for folder in FOLDERS)]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README = TEXTS["README.md"]
RECORDS = TEXTS["records/README.md"]
TESTS = TEXTS["tests/README.md"]
TECHNIQUES = TEXTS["records/techniques/README.md"]
SCRIPT = (ROOT / "train_gpt.py").read_text()
SPEEDRUN = train_gpt.PRESETS["speedrun"]
FIELDS = {f.name for f in fields(train_gpt.Hyperparameters)}

# In the copy of the repository in which the commands run, the demo is this small.
SMALL_DEMO = """PRESETS["demo"] = replace(
    PRESETS["demo"], model_dim=32, num_heads=2, head_dim=16, train_seq_len=128, val_seq_len=256,
    val_tokens=1000, window_start=128, window_end=128, pair_rows=64, num_iterations=8,
    val_loss_every=4)

"""


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def indented(text: str) -> str:
    """The commands of a text, as a shell script. What stands in <> becomes a word."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return re.sub(r"<([\w ]+)>", lambda match: match[1].replace(" ", "_"), "\n".join(lines) + "\n")


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
            name for name in names if Path(path, name).is_file() and not name.endswith(".py")])
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copy(ROOT / "tests" / "text.txt", folder / "my_text.txt")
    before, mark, after = SCRIPT.partition("BF16_UNITS = ")
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
    write_shard(demo / "demo_train_000001.bin", byte_documents(text) * 20)
    write_shard(demo / "demo_val_000000.bin", byte_documents(text))
    (demo / "demo.json").write_text('{"tokenizer": "bytes"}')


def test_the_first_commands(tmp_path):
    """As far as they differ from what other tests run: the clone has what they start."""
    clone, enter, train, demo, tests = indented(README.split("## What it is")[0]).splitlines()
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
    copied, race, two_settings, alone, sample = indented(page).splitlines()
    assert copied.startswith("cp ") and race == "./run.sh race my_record.py"
    # With another activation, which one might try, a run's loss is not that of the script.
    tweak = r"sed -i 's/F.relu(self.fc(x_TD))/F.silu(self.fc(x_TD))/' my_record.py"
    output = bash(copy, "\n".join([copied, tweak, f"{race} --repeat=1"]))
    folder = copy / "records" / "race_my_record"
    assert re.search(r"-.*F\.relu.*\n\+.*F\.silu", (folder / "my_record.patch").read_text())
    assert "verdict" in output and (folder / "race.png").stat().st_size > 10_000
    for side in ("my_record", "train_gpt"):
        assert len(list((folder / side).glob("*.log"))) == 1
    two_settings = two_settings.replace("--repeat=8", "--repeat=1")
    assert "verdict" in bash(copy, two_settings)
    output = bash(copy, f"{alone}\n{sample}")
    assert "\ndef " in output
    (log,) = copy.glob("records/*_mine.log")
    assert "F.silu(self.fc(x_TD))" in log.read_text()


def test_your_own_text(copy):
    commands = indented(section(TEXTS["data/README.md"], "Your own text")).splitlines()
    assert len(commands) == 3
    output = bash(copy, "\n".join(commands[:2]))
    assert "final_val_loss: " in output and len(list((copy / "data/mine").glob("mine_*.bin"))) == 2


def test_without_bash(copy):
    install, *commands = indented(section(README, "Install")).splitlines()
    assert install == "python -m pip install -r requirements.txt" and len(commands) == 3
    output = bash(copy, "\n".join(commands).replace("its_log", "*_demo.log"))
    assert "final_val_loss: " in output and "\nThe " in output


def test_commands_for_when_something_goes_wrong(copy, text):
    """Each in its order; the first run is stopped, as by a scheduler, so the second can resume."""
    make_demo_shards(copy, text)
    script = copy / "train_gpt.py"
    script.write_text(script.read_text().replace("num_iterations=8,", "num_iterations=120,"))
    commands = indented(section(README, "If something goes wrong")).splitlines()
    assert len(commands) == 4
    run = subprocess.Popen(["bash", "-c", f"exec {commands[0]}"], cwd=copy, env=environment(copy),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = ""
    for line in run.stdout:
        output += line
        if line.startswith("step:70/"):
            run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) != 0
    assert re.search(r"error: stopped by SIGTERM\b.*/step00000050\.pt ", output), output
    (log,) = copy.glob("records/*_safe.log")
    example = re.search(r"records/\S+_safe\.log", commands[1])[0]
    output = bash(copy, commands[1].replace(example, f"records/{log.name}"))
    assert "\nresumed: step 50 at " in output
    numbers = re.findall(r"^step:(\d+)/120 train_loss", log.read_text(), re.MULTILINE)
    assert numbers == [str(step) for step in range(1, 121)]
    output = bash(copy, "\n".join(commands[2:]))
    assert output.startswith("checks passed\n") and "documents" in output


# --------------------------------------------------------------------------------------------------
# What is named exists

def started(script: str) -> list[list[str]]:
    """The words of each program that a shell script starts, as the shell sees them."""
    shell = "set -fu\n"  # f: patterns stay as they are
    for name in ("./run.sh", "python", "torchrun", "tests/gpu_day.sh", "cp", "cd", "git", "diff",
                 "patch"):
        shell += f"{name}() {{ printf '%s\\n' '{name}' \"$@\" ''; }}\n"
    done = subprocess.run(["bash", "-c", shell + script], capture_output=True, text=True,
                          check=True)
    assert not done.stderr, done.stderr  # of a command that is none of these
    return [command.splitlines() for command in done.stdout.strip("\n").split("\n\n") if command]


def commands_of(text: str) -> list[list[str]]:
    text = re.sub(r"(?s)\n```.*?\n```", "", text)
    spans = "\n".join(re.findall(r"`((?:\./run\.sh|python) [^`]*)`", text))
    return started(indented(text) + spans)


COMMANDS = [words for text in TEXTS.values() for words in commands_of(text)]


def training(words: list[str]) -> tuple[str, list[str]] | None:
    """The script that a command trains, and the flags for it; None if it trains none."""
    script = "train_gpt.py"
    if words[0] == "./run.sh":
        flags = words[1:]
        if flags[:1] == ["test"]:
            return None
        if flags[:1] == ["race"]:
            only_ours = [word.partition("=")[2] for word in flags if word.startswith("--only_ours")]
            flags = [*flags[1:], *only_ours]
            race = (ROOT / "records" / "race.py").read_text()
            flags = [flag for flag in flags
                     if f'"{flag.partition("=")[0]}"' not in race]  # its own
        if flags[:1] and flags[0].endswith(".py"):
            script = flags.pop(0)
        if flags[:1] and flags[0] in train_gpt.PRESETS:
            flags[0] = f"--preset={flags[0]}"
        return script, [flag for flag in flags if not flag.startswith("--repeat=")]
    scripts = [i for i, word in enumerate(words) if re.search(r"\b(train_gpt|my_record)\.py$", word)]
    if words[0] == "torchrun" or words[0] == "python" and scripts[:1] == [1]:
        return words[scripts[0]], words[scripts[0] + 1:]
    return None


TRAINING = [found for found in map(training, COMMANDS) if found]


def test_the_commands_are_found():
    assert len(COMMANDS) > 75 and len(TRAINING) > 25


@pytest.mark.parametrize("path, flags", TRAINING, ids=str)
def test_flags_of_training_exist_and_keep_the_tokens_of_a_step(path, flags):
    assert (ROOT / path).is_file() or path == "my_record.py"
    program = load_script(ATTEMPT, "attempt") if "speedrun_2026" in path else train_gpt
    flags = [flag for flag in flags if flag != "--help"]
    hp, command = program.parse_flags(flags)
    if "--micro_batches" in " ".join(flags):
        tokens = SPEEDRUN.micro_batches * SPEEDRUN.train_seq_len
        assert hp.micro_batches * hp.train_seq_len == tokens
    program.check_settings(hp, world_size=1)


def test_flags_of_the_tools_exist():
    tools = [words for words in COMMANDS
             if words[0] == "python" and re.match("(data|records|tests)/", words[1])
             and not words[1].endswith("train_gpt.py")]
    assert len({words[1] for words in tools}) >= 10
    for words in tools:
        source = (ROOT / words[1]).read_text() + (ROOT / "records" / "sample.py").read_text()
        for flag in re.findall(r"--(\w[\w-]*)", " ".join(words)):
            known = f'"--{flag}"' in source or words[1].startswith("tests/") and flag in FIELDS
            assert known, f"{words[1]} has no --{flag}"


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
    made = {"my_record.py", "<topic>", "race_my_record", "fineweb10B", "mine_train_000001.bin"}
    for path in re.findall(r"`([\w./<>-]+(?:\.py|\.sh|\.md|\.txt|/))`", TEXTS[page]):
        found = (ROOT / path).exists() or (folder / path).exists()
        assert found or made & set(path.split("/")), path


def test_the_machines_that_are_named_train():
    """The processes of a row of the table divide its micro-batches."""
    rows = table(section(README, "Which command on which hardware"))
    assert len(rows) == 7
    for hardware, command, _ in rows[:-1]:
        script, flags = training(started(command.strip("`"))[0])
        program = load_script(ATTEMPT, "attempt") if "speedrun_2026" in script else train_gpt
        hp, _ = program.parse_flags(flags if flags else ["--preset=speedrun"])
        for ranks in re.findall(r"\d+(?= or| GPUs| H100)", hardware) or ["1"]:
            program.check_settings(hp, int(ranks))


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
    assert len(papers) > 4 and len(numbers) >= 3 and len(dates) > 4
    missing = [paper for paper in papers if f"https://arxiv.org/abs/{paper})" not in TECHNIQUES]
    missing += [number for number in numbers
                if f"[record {number}](https://" not in TECHNIQUES.lower().replace("\n", " ")]
    missing += [date for date in dates
                if f"/{date}_" not in TECHNIQUES and f"of {date}" not in README]
    assert not missing


# --------------------------------------------------------------------------------------------------
# Figures

def test_no_figure_is_missing():
    marks = {page: re.findall("@[A-Z_]+@", text) for page, text in TEXTS.items()}
    assert not {page: found for page, found in marks.items() if found}


def code_lines(path: Path) -> int:
    """Lines with code: neither blank nor a comment nor part of a docstring."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENDMARKER)
    with open(path, "rb") as f:
        tokens = [token for token in tokenize.tokenize(f.readline)
                  if token.type not in layout and token.type != tokenize.ENCODING]
    lines = {n for token in tokens for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_script_is_as_long_as_is_said():
    found = re.search(r"Ours has ([\d,]+) lines,\s+([\d,]+) of them code", README).groups()
    total, code = (int(number.replace(",", "")) for number in found)
    assert len(SCRIPT.splitlines()) == pytest.approx(total, rel=0.01)
    assert code_lines(ROOT / "train_gpt.py") == pytest.approx(code, rel=0.01)


def test_the_data_that_is_named_is_what_a_run_needs():
    chunks = int(re.search(r"the (\d+) training chunks", README)[1])
    for number, enough in ((chunks, True), (chunks - 1, False)):
        shards = [train_gpt.Shard(str(i), 100_000_000, "") for i in range(number)]
        steps = sum(1 for _ in train_gpt.step_starts(shards, SPEEDRUN))
        assert (steps >= SPEEDRUN.num_iterations) == enough
    assert f"{(chunks + 1) * 0.2:.1f} GB of FineWeb" in README
    assert f"fineweb.py --num_chunks={chunks} " in TEXTS["data/README.md"]


def ends(folder: Path) -> list[tuple[float, float]]:
    """(seconds, loss) at the end of each log in a folder."""
    found = []
    for path in sorted(folder.glob("*.log")):
        lines = re.findall(r"(?m)^step:\d+/\d+ val_loss:(\S+) train_time:(\d+)ms", path.read_text())
        found.append((int(lines[-1][1]) / 1000, float(lines[-1][0])))
    return found


def medians(folder: Path) -> tuple[str, str]:
    """(seconds, loss), as the pages write them."""
    seconds, losses = zip(*ends(folder))
    return f"{statistics.median(seconds):.1f} s", f"{statistics.median(losses):.4f}"


def test_the_measured_figures_are_those_of_the_logs():
    rows = table(README.split("<!-- measured -->")[1].split("\n\n")[0])
    assert len(rows) == 3
    for what, runs, seconds, loss, link in rows:
        folder = (ROOT / re.search(r"\]\((\S+)\)", link)[1]).parent
        assert (int(runs), (seconds, loss)) == (len(ends(folder)), medians(folder)), what
        target = re.search(r"to (\d\.\d+)", what)
        assert not target or max(loss for _, loss in ends(folder)) <= float(target[1]), what


MEDIANS = ["demo", "bench_cpu", "bench_cpu_low"]


@pytest.mark.parametrize("name", MEDIANS)
def test_the_answer_of_a_folder_is_that_of_its_logs(name):
    folder = ROOT / "records" / name
    seconds, loss = medians(folder)
    assert (f"\nMedian of {len(ends(folder))} runs: a validation loss of {loss} nats per byte after "
            f"{seconds} of training.\n") in TEXTS[f"records/{name}/README.md"]


def test_a_mean_of_the_token_runs_is_on_the_first_page():
    ours, theirs = (statistics.mean(logs.read_run(path, path.stem).loss
                                    for path in (ROOT / "records" / name).glob("*.log"))
                    for name in ("tokens_english_speedrun_2026", "tokens_english_speedrun"))
    assert f"ended lower: at {ours:.3f} against {theirs:.3f} nats per token" in " ".join(
        README.split())


@pytest.mark.parametrize("name", ["tokens_english_speedrun", "tokens_english_speedrun_2026",
                                  "tokens_c_speedrun", "tokens_c_speedrun_2026",
                                  "tokens_man_speedrun", "tokens_man_speedrun_2026"])
def test_the_answer_of_the_token_runs_is_that_of_their_logs(name):
    runs = [logs.read_run(path, path.stem) for path in (ROOT / "records" / name).glob("*.log")]
    losses = [run.loss for run in runs]
    (tokens,) = {run.tokens for run in runs}
    assert (f"\nIt ends at a validation loss of {statistics.mean(losses):.4f} nats per token (mean "
            f"of {len(runs)} runs, SD {statistics.stdev(losses):.4f}) after "
            f"{tokens / 1e6:.3f}M tokens.\n") in TEXTS[f"records/{name}/README.md"]


def test_the_race_with_nanogpt_is_that_of_its_logs():
    folder = ROOT / "records" / "nanogpt"
    lines = [line for line in (folder / "nanogpt.csv").read_text().splitlines() if line[0] != "#"]
    theirs = {row["run"]: row for row in csv.DictReader(lines)}  # the last one of each run
    loss = max(float(row["val_loss"]) for row in theirs.values())
    slow = statistics.median(float(row["seconds"]) for row in theirs.values())
    reached = []
    for path in folder.glob("*.log"):
        found = re.findall(r"(?m)^step:\d+/\d+ val_loss:(\S+) train_time:(\d+)ms", path.read_text())
        reached.append(next(int(time) / 1000 for value, time in found if float(value) <= loss))
    assert len(theirs) == len(reached)
    fast = statistics.median(reached)
    assert (f"\nMedian of {len(reached)} runs: nanoGPT ends at {loss:.4f} after {slow:.1f} s of "
            f"training; `train_gpt.py` reaches that after {fast:.1f} s.\n"
            ) in TEXTS["records/nanogpt/README.md"]
    assert (f"takes {slow:.1f} s of training to reach its final loss, and `train_gpt.py` reaches "
            f"the same loss in {fast:.1f} s (medians of three runs).") in " ".join(README.split())


@pytest.mark.parametrize("folder, base", [("techniques", "nothing"),
                                          ("speedrun_2026", "the attempt")])
def test_the_ablations_are_those_of_the_losses(folder, base):
    found = {}
    with open(ROOT / "records" / folder / "losses.csv") as f:
        for name, _, loss in list(csv.reader(f))[1:]:
            found.setdefault(name, []).append(float(loss))
    page = TEXTS[f"records/{folder}/README.md"]
    rows = table(page.split("<!-- ablation -->")[1].split("\n\n")[0])
    assert [row[0] for row in rows] == list(found)
    for name, runs, loss, *rest in rows:
        losses = found[name]
        assert int(runs) == len(losses)
        assert loss == f"{statistics.mean(losses):.4f} ({statistics.stdev(losses):.4f})"
        if name != base:
            difference = statistics.mean(losses) - statistics.mean(found[base])
            p = stats.ttest_ind(losses, found[base], equal_var=False).pvalue
            assert rest == [f"{difference:+.4f}", f"{p:.2g}"], name


LEFT_OUT = {  # a change of the record attempt: what its ablation is called
    "stages of batch, rate and window": "without stages",
    "Adam on every second step": "Adam on every step",
    "Adam's mean gradient decays by 0.5, not 0.8": "Adam's mean gradient as in train_gpt.py",
    "cautious weight decay": "without cautious weight decay",
    "NorMuon": "without NorMuon",
    "late input and backout": "without late input and backout",
    "shifted softcap": "without the shifted softcap",
    "embedding of pairs": "without pairs",
    "signs for pairs": "without signs for pairs",
    "key offset": "without key offset",
    "smear": "without smear",
}


def test_the_worth_of_each_change_is_that_of_its_ablation():
    page = TEXTS["records/speedrun_2026/README.md"]
    ablations = table(page.split("<!-- ablation -->")[1].split("\n\n")[0])
    found = {row[0]: f"{row[-2]} (p = {row[-1]})" for row in ablations}
    changes = {row[0]: row[-1] for row in table(page.split("<!-- changes -->")[1].split("\n\n")[0])}
    assert changes == {change: found[ablation] for change, ablation in LEFT_OUT.items()}


def test_the_output_that_is_shown_is_a_logs():
    shown = README.split("<!-- demo output -->\n```\n")[1].split("\n```")[0].splitlines()
    assert len(shown) <= 12
    lines = [line for line in shown if line != "..." and not line.startswith("log: ")]
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
    command = [sys.executable, "records/compare.py", str(ours.relative_to(ROOT)), "--vs",
               str(theirs.relative_to(ROOT))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.startswith("verdict") and f"{shown}\n" in done.stdout


def test_the_table_of_results_is_that_of_the_logs():
    new = compare.readme_with_table(RECORDS, compare.records_table(ROOT / "records"))
    assert new == RECORDS


@pytest.mark.parametrize("world_size", [8, 16, 64])
def test_the_volume_table_is_what_the_optimizers_exchange(world_size):
    sent = []
    share = (world_size - 1) / world_size

    class Counting(train_gpt.World):
        def reduce_scatter(self, whole):
            if not self.divides(whole):
                return self.all_reduce(whole)
            sent.append(share * whole.nbytes)
            return train_gpt.Exchange(torch.empty_like(self.rows(whole)))

        def all_gather(self, whole):
            if self.divides(whole):
                sent.append(share * whole.nbytes)
            return train_gpt.Exchange(whole)

        def all_reduce(self, whole):
            sent.append(2 * share * whole.nbytes)
            return train_gpt.Exchange(whole)

    hp = replace(SPEEDRUN, dtype="bfloat16", train_seq_len=128, val_seq_len=128,
                 num_kv_heads=SPEEDRUN.num_heads)
    world = Counting(0, world_size, torch.device("meta"))
    with world.device:
        model = train_gpt.GPT(hp, train_gpt.flex, torch.bfloat16)
        with torch.no_grad():
            for optimizer in train_gpt.build_optimizers(model, hp, world):
                for p in optimizer.params.values():
                    p.grad = torch.empty_like(p)
                optimizer.begin()
                optimizer.update(0)
                optimizer.finish(0)
    volume = sum(sent)
    milliseconds = [1e3 * volume / rate for rate in (450e9, 50e9, 12.5e9)]
    row = (f"| {world_size} | {volume / 1e9:.2f} GB | {milliseconds[0]:.1f} ms | "
           f"{milliseconds[1]:.0f} ms | {milliseconds[2]:.0f} ms |")
    assert row in TESTS, row


# --------------------------------------------------------------------------------------------------
# Committed logs

LOGS = sorted(path.relative_to(ROOT / "records").as_posix()
              for path in compare.tracked_logs(ROOT / "records"))


def parts(name: str) -> tuple[dict[str, str], dict[str, str], str]:
    """The settings, the environment and the source of a log."""
    text = (ROOT / "records" / name).read_text(encoding="utf-8")
    settings, facts, rest = text.split(f"\n{'=' * 100}\n", 2)
    source = rest.rsplit(f"\n{'=' * 100}\n", 1)[0] + "\n"
    return (dict(line.split(" = ", 1) for line in settings.splitlines()),
            dict(line.split(": ", 1) for line in facts.splitlines()), source)


def test_there_are_committed_logs_and_every_folder_has_a_page():
    folders = {Path(name).parts[0] for name in LOGS}
    assert len(LOGS) >= 10
    assert folders <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("name", LOGS)
def test_a_committed_log_is_of_a_committed_script(name):
    settings, facts, source = parts(name)
    assert sha256(source.encode()).hexdigest() == facts["script"].split()[1]
    (hyperparameters,) = [node for node in ast.parse(source).body
                          if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters"]
    known = [node.target.id for node in hyperparameters.body if isinstance(node, ast.AnnAssign)]
    assert list(settings) == known
    assert re.fullmatch("[0-9a-f]{40}", facts["git"]), "commit the script, then train"
