"""The pages hold: their commands run, links lead somewhere, figures are those of committed logs."""

import csv
import json
import os
import re
import shutil
import statistics
import subprocess
from pathlib import Path
import pytest
from conftest import ROOT, RUN_SH, edited, write_shard
import train_gpt
from data.common import sha256
from data.vocab import load_tokenizer
from records.tools import honesty, launch, logs, race

PAGES = [ROOT / "README.md", *sorted(path for pattern in ("[!.]*/*.md", "records/*/README.md")
                                     for path in ROOT.glob(pattern))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README = TEXTS["README.md"]
HOWTO = TEXTS["records/howto.md"]
LOGS = sorted(subprocess.run(["git", "-C", ROOT / "records", "ls-files", "*.log"], text=True,
                             capture_output=True, check=True).stdout.splitlines())

# In the copy of the repository in which the commands run, the demo is this small.
SMALL_DEMO = """PRESETS["demo"] = replace(
    PRESETS["demo"], model_dim=32, num_heads=2, head_dim=16, train_seq_len=128, val_seq_len=256,
    val_tokens=1000, window_start=128, window_end=128, num_iterations=4, val_loss_every=2,
    micro_batches=2, windows="SL", attention="xx", value_embeds="00")

"""

def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]

def indented(text: str) -> str:
    """The commands of a text, as a shell script. What stands in <> becomes a word."""
    text = re.sub(r"(?s)\n```.*?\n```", "", text)
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return re.sub(r"<([\w ]+)>", lambda match: match[1].replace(" ", "_"), "\n".join(lines) + "\n")

def table(text: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]

@pytest.fixture
def copy(tmp_path, text) -> Path:
    """The programs in a folder of their own, with a small demo and its data."""
    folder = tmp_path / "copy"
    for name in ("data", "records"):
        shutil.copytree(ROOT / name, folder / name, ignore=lambda path, names: [
            name for name in names
            if Path(path, name).is_file() and not name.endswith((".py", ".html", ".tiktoken"))])
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copy(ROOT / "tests" / "text.txt", folder / "my_text.txt")
    before, mark, after = (ROOT / "train_gpt.py").read_text().partition("# ---- 2. ")
    (folder / "train_gpt.py").write_text(before + SMALL_DEMO + mark + after)
    (demo := folder / "data" / "demo").mkdir(exist_ok=True)
    sidecar = {"tokenizer": "python", "shuffle": launch.PIECE}
    tokens = [1024, *load_tokenizer("python").encode(text.decode())]
    for side, name, times in (("train", "train_000001", 20), ("val", "val_000000", 1)):
        write_shard(path := demo / f"demo_{name}.bin", tokens * times)
        sidecar[side] = {"shards": {path.name: sha256(path)}}
    (demo / "demo.json").write_text(json.dumps(sidecar))
    return folder

def bash(folder: Path, script: str) -> str:
    mine = RUN_SH | {"NPROC": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(["bash", "-euxc", script], cwd=folder, env=os.environ | mine,
                          capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

def test_the_first_commands(tmp_path):
    clone, enter, *others = indented(README.split("\n## ")[0]).splitlines()
    clone = clone.replace("this_repository", str(ROOT))
    script = f"{clone}\n{enter}\n./run.sh --help"
    assert "./run.sh race my_record.py" in subprocess.check_output(script, shell=True, text=True,
                                                                   cwd=tmp_path)
    assert [line.split("#")[0].strip() for line in others] == ["./run.sh", "./run.sh test"]

@pytest.mark.full
def test_copy_tweak_and_race(copy):
    copied, _, first_race = indented(section(README, "Copy, tweak, race")).splitlines()
    tweak = r"sed -i 's/F.relu(self.fc(x_TD))/F.silu(self.fc(x_TD))/' my_record.py"
    output = bash(copy, "\n".join([copied, tweak, f"{first_race} --most=1 || [ $? = 4 ]",
                                   "./run.sh verify records/race_my_record"]))
    folder = copy / "records" / "race_my_record"
    assert re.search(r"-.*F\.relu.*\n\+.*F\.silu", (folder / "my_record.patch").read_text())
    assert "verdict" in output and (folder / "race.png").stat().st_size > 10_000
    assert len(list(folder.glob("*/*.log"))) == 2

def test_a_copy_alone_and_a_sample(copy):
    page = section(README, "More commands")
    alone, sample = re.findall(r"`(\S+ my_record\.py --name=[^`]*|\./run\.sh sample [^`]*)`", page)
    tweaked = (copy / "train_gpt.py").read_text().replace("F.relu(self", "F.silu(self")
    (copy / "my_record.py").write_text(tweaked)
    assert "\ndef" in bash(copy, f"{alone}\n{sample}")
    assert "F.silu(self.fc(x_TD))" in next(copy.glob("records/*_mine.log")).read_text()

def test_your_own_text(copy):
    commands = indented(section(TEXTS["data/README.md"], "Your own text")).splitlines()
    output = bash(copy, "\n".join(commands[:2]))
    assert output.count("final_val_loss: ") == 1 and "\nThe" in output

def test_a_new_optimizer(copy, runs_here):
    """The page's optimizer, put where the page says, trains and is honest, so that it may race."""
    page = section(HOWTO, "A new optimizer")
    optimizer, rows = re.findall(r"(?s)```python\n(.*?)```", page)
    edits = [f"«{row.replace('SignMomentum', 'Muon')}→{row}»" for row in rows.splitlines()]
    edited(copy / "my_optimizer.py", f"«→{optimizer}\n»def newton_schulz(", *edits,
           script=copy / "train_gpt.py")
    rates, last = indented(page).splitlines()
    bash(copy, re.sub(r"0\.0003 .* 0\.01;", "0.01;", rates))
    assert "\nSignMomentum, lr 0.01" in next(copy.glob("records/*_lr0.*.log")).read_text()
    assert last.startswith('./run.sh race "my_optimizer.py --muon_lr=')
    assert list(honesty.check(str(copy / "my_optimizer.py")))

def started(script: str) -> list[list[str]]:
    """The words of each program that a shell script starts, as the shell sees them."""
    shell = "set -fu\n"  # f: patterns stay as they are
    for name in ("./run.sh", "python", "torchrun", "tests/torch_versions.sh", "cp", "cd", "git",
                 "patch"):
        shell += f"{name}() {{ printf '%s\\n' '{name}' \"$@\" ''; }}\n"
    done = subprocess.run(["bash", "-c", shell + script], capture_output=True, text=True,
                          check=True)
    assert not done.stderr, done.stderr  # of a command that is none of these
    return [command.splitlines() for command in done.stdout.strip("\n").split("\n\n") if command]

TOOLS = {"tokenize": "data/tokenize_text.py", "inspect": "data/inspect_shards.py",
         "fineweb": "data/fineweb.py", "honest": "records/tools/honesty.py",
         **{verb: f"records/tools/{verb}.py" for verb in (
             "same", "bench", "compare", "sample", "verify")}}
COMMANDS = [words for text in TEXTS.values() for words in started(
    indented(text) + "\n".join(re.findall(r"`((?:\./run\.sh|torchrun) [^`]*)`", text)))]

def training(words: list[str]) -> tuple[str | None, list[str]] | None:
    """The script that a command trains, and the flags for it; None if it trains none."""
    program, *words = words
    if program == "torchrun":
        return "train_gpt.py", words[words.index("train_gpt.py") + 1:]
    others = {*TOOLS, "test", "ideas", "night", "help", "--help"}
    if program != "./run.sh" or others & {*words[:1], *words[-1:]}:
        return None
    if words[:1] and words[0] in ("race", "ablate"):
        words = [word for each in words for word in each.split()]  # flags in one word with a script
        scripts = [word for word in words if word.endswith(".py") and not word.startswith("--")]
        options = words[2:]
        if words[0] == "ablate":
            options = [word for word in options if not word.startswith("--part=")]
        flags = [word for word in options if word not in scripts and not word.startswith("--vs=")]
        ours = race.parse([__file__, *flags]).candidate  # train_gpt.py would race itself
        words = [scripts[0], *ours.flags]
    own = ("train", "--repeat=", "--text=", "--resume")  # what the launcher takes for itself
    return launch.split_words([word for word in words
                               if word == "train_gpt.py" or not word.startswith(own)])

TRAINING = [found for found in map(training, COMMANDS) if found]
assert len(COMMANDS) > 60 and len(TRAINING) > 20, "the commands are not found"

@pytest.mark.parametrize("path, flags", TRAINING, ids=str)
def test_flags_of_training_exist_and_keep_the_tokens_of_a_step(path, flags):
    assert path in (None, "train_gpt.py", "my_record.py", "my_optimizer.py", "a.py", "unchanged.py")
    hp, command = train_gpt.parse_flags(flags)
    if "micro_batches" in command.named:
        assert hp.tokens_per_step == train_gpt.PRESETS["speedrun"].tokens_per_step
    train_gpt.check_settings(hp, world_size=1)

def test_flags_of_the_tools_exist():
    tools = [words for words in COMMANDS if words[0] == "./run.sh" and {*words[1:2]} & {*TOOLS}]
    assert {words[1] for words in tools} == {*TOOLS}
    for words in tools:
        source = (ROOT / TOOLS[words[1]]).read_text()
        source += (ROOT / "records" / "tools" / "sample.py").read_text()
        for flag in re.findall(r"--(\w[\w-]*)", " ".join(words)):
            assert f'"--{flag}"' in source, f"{words[1]} has no --{flag}"

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
    made = {"record.txt", "statistics.md", "my_record.py", "my_optimizer.py", "race_my_record",
            "<date>_<idea>", "fineweb10B"}
    for path in re.findall(r"`([\w./<>-]+(?:\.py|\.sh|\.md|\.txt|/))`", TEXTS[page]):
        places = (folder, ROOT, ROOT / "records", ROOT / "tests")
        assert any((place / path).exists() for place in places) or made & {*path.split("/")}, path

def test_the_numbers_in_the_answer_of_the_demos_page_are_those_of_its_logs():
    (answer,) = re.findall("(?s)<!-- answer -->\n(.*?)\n\n", TEXTS["records/demo/README.md"])
    runs, _ = logs.read([ROOT / "records" / "demo" / "train_gpt"])
    known = {str(len(runs)), f"{statistics.median(run.loss for run in runs):.4f}",
             f"{statistics.median(run.seconds for run in runs):.1f}"}
    assert {*re.findall(r"(?<![\w.])\d[\d.]*\d", answer)} == known

PARTS = ROOT / "records" / "2026-11-25_parts"

def test_the_ablations_are_those_of_the_verdict():
    known = {f"{row['difference']:+.4f} ± {(row['interval'][1] - row['interval'][0]) / 2:.4f}"
             for row in json.loads((PARTS / "verdict.json").read_text())}
    shown = re.findall(r"[+-]\d\.\d{4}\s±\s\d\.\d{4}", TEXTS["records/2026-11-25_parts/README.md"])
    assert shown and {re.sub(r"\s", " ", text) for text in shown} <= known

def test_what_failed_is_what_the_ledger_says():
    """Where a part was left out of the attempt, the ledger has the difference without it."""
    known = set()
    for row in csv.DictReader((PARTS / "ideas.csv").read_text().splitlines()):
        sign = (-1) ** row["candidate"].startswith("without")
        known |= {f"{sign * float(row['difference']):+.4f}", f"E = {float(row['E'] or 0):.0f}"}
    shown = re.findall(r"[+-]\d\.\d{4}|E = \d+", TEXTS["records/negative.md"])
    assert len(shown) > 12 and {*shown} <= known

def test_what_one_gpu_showed_is_in_its_lines():
    """README's figures of it stand on its page, losses and memory in the raw lines as well."""
    home = "records/2026-11-26_h200"
    rows = table(README.split("<!-- H200 -->\n")[1].split("\n\n")[0])
    for number in re.findall(r"\d[\d.,]*\d", str([row[1:] for row in rows])):
        assert number in TEXTS[f"{home}/README.md"]
    for column, name in ((1, "steps_record.txt"), (2, "steps.txt")):
        text = (ROOT / home / name).read_text()
        _, losses, memory = [row[column] for row in rows]
        assert re.findall(r"(?<=\d val_loss:)\S+", text) == losses.split(", ")
        assert f": {memory.split()[0].replace(',', '')} " in text.replace("MiB", "")

@pytest.mark.parametrize("page, name", [
    (page, name) for page, text in TEXTS.items()
    for name in re.findall("<!-- verdict of records/(.*) -->", text)])
def test_the_verdict_that_is_shown_is_that_of_the_race(page, name):
    """Which test_verify.py recomputes."""
    shown = TEXTS[page].split(f"<!-- verdict of records/{name} -->\n```\n")[1].split("\n```")[0]
    assert (ROOT / "records" / name / "verdict.txt").read_text().startswith(f"{shown}\n")

def test_the_table_of_results_is_that_of_the_logs():
    rows = table(section(TEXTS["records/README.md"], "Results"))
    folders = {str(Path(name).parent) for name in LOGS}
    assert [row[0] for row in rows] == [f"[{name}]({name}/)" for name in sorted(folders)]
    for name, *cells in rows:
        runs, _ = logs.read([ROOT / "records" / re.match(r"\[(.*?)\]", name)[1]])
        mean, deviation = ([f([run.loss for run in runs]), f([run.seconds for run in runs])]
                           for f in (statistics.mean, statistics.stdev))
        assert cells == [str(len(runs)), f"{mean[0]:.4f} ({deviation[0]:.4f})",
                         f"{mean[1]:.1f} s ({deviation[1]:.1f})", str(runs[0].steps)], name

@pytest.mark.parametrize("name", LOGS)
def test_a_committed_log_is_whole_and_of_a_committed_script(name):
    """Reading it checks the hash of its source. It has a page, and the machine that the table's
    page names; entries of the contest name theirs on their own pages."""
    assert ("an Intel Xeon in `race_gelu`, and an AMD EPYC in all others" in
            " ".join(TEXTS["records/README.md"].split()))
    assert f"records/{Path(name).parts[0]}/README.md" in TEXTS
    run = logs.read_run(ROOT / "records" / name, name)
    assert run.source and not run.missing
    assert re.fullmatch("[0-9a-f]{40}", run.environment["git"]), "commit the script, then train"
    if name.startswith(("demo", "race_gelu", "nanogpt")):
        cpu = "Intel.* Xeon" if name.startswith("race_gelu") else "AMD EPYC"
        assert re.match(f"2x {cpu}.* avx512_bf16", run.hardware) and run.torch[:5] == "2.13."
