"""tools/launch.py by its functions, and run.sh in real starts."""

import ast
import graphlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, log_path, losses, train

import train_gpt
from data import tokenize_text
from data.common import UserError
from records.tools import launch

ENVIRONMENT = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def started(monkeypatch):
    """The commands that would be started."""
    commands = []
    monkeypatch.setattr(launch, "start", lambda *command, **more: commands.append(command))
    return commands


# ---- What to train -------------------------------------------------------------------------------

@pytest.mark.parametrize("words, path, flags", [
    ("", "train_gpt.py", ""),
    ("--seed=1 demo", "train_gpt.py", "--preset=demo --seed=1"),
    ("--seed 1 speedrun my.py --check", "my.py", "--preset=speedrun --seed 1 --check"),
    ("--name demo my.py", "my.py", "--name demo"),  # the value of a flag
])
def test_script_and_preset_may_stand_anywhere(words, path, flags):
    assert launch.split_words(words.split()) == (path, flags.split())


def test_ranks_are_as_many_as_divide_the_micro_batches(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    assert [launch.number_of_ranks(n, 0) for n in (8, 9, 7, 1)] == [4, 3, 1, 1]
    assert [launch.number_of_ranks(8, gpus) for gpus in (1, 3, 8)] == [1, 2, 8]
    monkeypatch.setenv("NPROC", "5")
    assert launch.number_of_ranks(8, 0) == 5, "the script's own check refuses it"
    monkeypatch.setenv("NPROC", "0")
    with pytest.raises(UserError, match="NPROC=0 is not a number above 0"):
        launch.number_of_ranks(8, 0)


def test_the_ranks_of_a_resumed_run_are_for_its_own_micro_batches(tmp_path, shards):
    train(train_gpt, *TINY, *shards, f"--records={tmp_path}", "--micro_batches=3",
          "--num_iterations=1", "--save_every=1")
    (checkpoint,) = tmp_path.glob("*/step00000001.pt")
    assert launch.micro_batches_of(checkpoint) == 3
    assert launch.micro_batches_of(log_path(tmp_path)) == 1, "--check says what is wrong"


def test_a_machine_without_gpus_is_set_up_and_a_driver_in_vain_is_said(tmp_path, monkeypatch):
    variables = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    for name in (*variables, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")  # a user's own stays
    launch.prepare_machine(gpus=1)
    assert "OMP_NUM_THREADS" not in os.environ
    driver = tmp_path / "version"
    monkeypatch.setattr(launch, "NVIDIA_DRIVER", driver)
    launch.prepare_machine(gpus=0)
    assert [os.environ[name] for name in variables] == ["1", "1000000000", "7"]
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\n")
    with pytest.raises(UserError, match=r"torch \d\S+ sees no GPU with NVIDIA driver 535\.54\.03"):
        launch.prepare_machine(gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch.prepare_machine(gpus=0)


@pytest.mark.parametrize("words, message", [
    ("fast", "invalid choice: 'fast'"),
    ("demo speedrun", "demo and speedrun: name one script and one preset"),
    ("demo --repeat=2 --seed=1", "--repeat=2: takes a number above 0, and neither --seed nor"),
    ("speedrun", "--preset=speedrun takes days or weeks without a GPU; run demo"),
    ("short", "--preset=short takes days or weeks without a GPU; run demo"),
    ("no_such.py demo", "no_such.py: there is no such script"),
    ("speedrun --text=README.md", "--text=README.md: trains the demo"),
    ("--text=no_such.txt", "no_such.txt: no such file or folder"),
])
def test_what_a_user_can_fix_is_one_line_before_anything_starts(words, message, started,
                                                                monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as caught:
        launch.main(words.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not started


def test_several_of_srun_are_refused(started, monkeypatch):
    """In a shell of salloc, there are tasks to start, but this is one process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launch, "prepare_machine", lambda gpus: None)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    launch.main(["demo", "--check"])
    assert started.pop()[:2] == ("train_gpt.py", "--check")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(UserError, match="srun has started 8 run.sh"):
        launch.main(["demo", "--check"])


# ---- The data ------------------------------------------------------------------------------------

def test_the_presets_get_the_data_that_they_need(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    speedrun, demo = train_gpt.PRESETS["speedrun"], train_gpt.PRESETS["demo"]
    for hp in (speedrun, replace(speedrun, num_iterations=100), replace(speedrun, epochs=4)):
        launch.make_preset_data(train_gpt, hp)
    launch.make_preset_data(train_gpt, train_gpt.PRESETS["short"])
    launch.make_preset_data(train_gpt, replace(demo, train_files="data/mine/*.bin"))
    # 696 million tokens are in 7 chunks of 100 million, 39 million and the 98 of `short` in one.
    assert started == [("data/fineweb.py", f"--num_chunks={n}") for n in (7, 1, 2, 1)]
    launch.make_preset_data(train_gpt, demo)
    assert started.pop()[0] == "data/tokenize_text.py" and len(started) == 4
    Path("data/demo").mkdir(parents=True)
    Path("data/demo/demo_train_000001.bin").touch()
    launch.make_preset_data(train_gpt, demo)
    assert len(started) == 4


def test_a_text_is_tokenized_once_and_again_when_it_has_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = []

    def start(*command):
        commands.append(command)
        tokenize_text.main([*command[1:], "--workers=1"])

    monkeypatch.setattr(launch, "start", start)
    text = Path("my texts", "demo.txt")
    text.parent.mkdir()
    text.write_text("to be or not to be " * 1000)
    first = launch.shards_of_text(str(text))
    assert launch.shards_of_text(str(text)) == first and len(commands) == 1
    assert first.parent == Path("data/demo_text"), "not the folder of the demo's own data"
    os.utime(text, ns=(0, 0))
    changed = launch.shards_of_text(str(text))
    assert changed != first and len(commands) == 2
    assert all(path.with_suffix(".json").exists() for path in (first, changed))
    folder = launch.shards_of_text("my texts")
    assert folder.parent == Path("data/my_texts")

    hp = replace(train_gpt.PRESETS["demo"], num_iterations=10)  # 40,960 tokens of 18,050
    flags = launch.flags_for_text("t", first, train_gpt, hp, {})
    assert flags == [f"--train_files={first}_train_*.bin", f"--val_files={first}_val_*.bin",
                     "--val_tokens=0", "--epochs=4"]
    assert "18051 training tokens, 951 validation tokens: --val_tokens=0 --epochs=4" in (
        capsys.readouterr().out)
    hp = replace(hp, num_iterations=4, val_tokens=950)
    assert launch.flags_for_text("t", first, train_gpt, hp, {})[2:] == ["--epochs=1"]
    named = {"epochs": 3, "val_tokens": 9}
    assert launch.flags_for_text("t", first, train_gpt, hp, named)[2:] == []
    with pytest.raises(UserError, match="--text=t: 18051 training tokens are too few for steps of"):
        launch.flags_for_text("t", first, train_gpt, replace(hp, micro_batches=40), {})


# ---- Starting programs ---------------------------------------------------------------------------

def test_what_is_started_is_passed_on_and_its_failure_ends_this(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nprint('log: a')\nprint(b'\\xff'.decode('latin1'))\n"
                       "print('log: ' + os.environ['WHERE'], flush=True)\n"
                       "sys.exit(len(sys.argv) - 1)")
    assert launch.start(str(program), read=True, WHERE="here")[-1] == "log: here\n"
    printed = capfd.readouterr().out
    assert printed.startswith(f"run.sh: python {program}\nlog: a\n") and "log: here\n" in printed
    with pytest.raises(SystemExit) as ended:
        launch.start(str(program), "fails", WHERE="")
    assert ended.value.code == 1


# ---- run.sh --------------------------------------------------------------------------------------

def run_sh(*argv, folder=ROOT, **env):
    environment = {**os.environ, **ENVIRONMENT, **env}
    return subprocess.run([str(folder / "run.sh"), *argv], capture_output=True, text=True,
                          timeout=150, env=environment, check=False)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def has_torch(version: str) -> str:
    """The text of an interpreter that says it has all packages, and this version of torch."""
    return f'case "$1" in -c) echo "3.10.1 {version}" ;; *) echo "$0 $*" ;; esac'


@pytest.fixture
def bare(tmp_path):
    """A folder with run.sh and nothing else; (the folder, a function that runs it there with the
    programs of tmp_path/bin)."""
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(ROOT / "run.sh", folder)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    return folder, lambda *argv: run_sh(*argv, folder=folder, PYTHON="", PATH=path, LC_ALL="C")


def test_what_cannot_be_used_is_passed_over_in_a_line_each(bare, tmp_path):
    folder, run = bare
    program(folder / ".venv/bin/python", "echo a warning >&2; " + has_torch("2.8.0+cu128"))
    program(tmp_path / "bin/python3", "echo 'ImportError: libcudart.so: not there' >&2; exit 1")
    program(tmp_path / "bin/python", has_torch("2.10.0a0+git1"))
    done = run("--seed=1", "demo")
    assert done.returncode == 0 and (done.stderr + done.stdout).splitlines() == [
        "run.sh: passed over .venv/bin/python: torch 2.8.0+cu128 is older than 2.9.1",
        "run.sh: passed over python3: ImportError: libcudart.so: not there",
        f"run.sh: using {tmp_path}/bin/python (Python 3.10.1, torch 2.10.0a0+git1)",
        f"{tmp_path}/bin/python -W ignore records/tools/launch.py --seed=1 demo"], done.stderr


def test_an_interpreter_that_is_asked_for_is_never_replaced(tmp_path):
    without = program(tmp_path / "without", f'exec {sys.executable} -S "$@"')
    for python, reason in {"/no/such": "/no/such: No such file or directory",
                           without: "ModuleNotFoundError: No module named 'torch'"}.items():
        done = run_sh("demo", PYTHON=python, LC_ALL="C")
        assert done.returncode == 2 and done.stdout == "", python
        assert done.stderr == f"error: PYTHON={python} cannot be used: {reason}\n"


def test_an_environment_is_made_once_and_a_torch_in_it_stays(bare, tmp_path):
    """By whatever python3 there is, which here makes one that works when pip has run."""
    folder, run = bare
    (folder / "requirements.txt").write_text("# All\ntorch==2.13.0\nnumpy\ntriton==3; linux\n")
    made = f"""echo "$1 $2 $3" >> {tmp_path}/calls
        case "$*" in
            "-m pip install"*) echo "$*" > {tmp_path}/installed; exit ;;
            "-c import sys, torch"[!,]*) [ -f {tmp_path}/has_torch ] || exit 1 ;;
            *) [ -f {tmp_path}/installed ] || exit 1 ;;
        esac
        {has_torch("2.13.0")}"""
    program(tmp_path / "made", made)
    program(tmp_path / "bin/python3", f"""[ "$1 $2 $3" = "-m venv .venv" ] || exit 1
        mkdir -p .venv/bin && cp {tmp_path}/made .venv/bin/python""")
    program(tmp_path / "bin/python", "exit 1")
    for times in range(2):
        done = run("test", "--script", "mine.py", "-k", "loss")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("-m pytest --script=mine.py -k loss\n")
        assert ("making .venv" in done.stderr) == (times == 0)
    assert (tmp_path / "calls").read_text().count("-m pip install") == 1
    assert (tmp_path / "installed").read_text().endswith(" -r requirements.txt\n")
    (tmp_path / "installed").unlink()
    (tmp_path / "has_torch").touch()
    done = run("demo")
    assert "making .venv" in done.stderr
    assert "run.sh: using .venv/bin/python (Python 3.10.1, torch 2.13.0)" in done.stdout
    assert (tmp_path / "installed").read_text().endswith("-version-check numpy\n")


def test_help_needs_no_python():
    done = run_sh("help", PYTHON="/no/such")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("./run.sh [train] [SCRIPT.py] [speedrun|short|demo] [--repeat=N]")
    assert done.stdout.endswith("micro-batches).\n")
    assert done.stdout == run_sh("--help", PYTHON="/no/such").stdout


@pytest.mark.parametrize("word, nearest", [("rcae", "race"), ("comapre", "compare"),
                                           ("honesty", "honest"), ("smaple", "sample")])
def test_an_unknown_verb_names_the_nearest_and_all(word, nearest):
    done = run_sh(word, PYTHON="/no/such")
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert f"{word} is no verb; the nearest is {nearest}, and there are: train" in done.stderr


@pytest.mark.parametrize("verb", ["race", "ablate", "honest", "compare", "sample", "hellaswag",
                                  "tokenize", "inspect", "fineweb", "ideas"])
def test_each_verb_explains_itself(verb):
    done = run_sh(verb, "--help")
    assert done.returncode == 0 and f"./run.sh {verb}" in done.stdout and done.stderr == ""


def test_logs_are_compared_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here')\n")
    assert "no torch here" in run_sh("demo", "--check", PYTHONPATH=str(tmp_path)).stderr
    done = run_sh("compare", "records/demo", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "3 runs" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["compare", "race", "sample"])
def test_an_old_path_says_where_the_program_is_now(name):
    done = subprocess.run([sys.executable, ROOT / "records" / f"{name}.py", "x", "--json"],
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: records/{name}.py is now ./run.sh {name}\n"


def test_no_tool_imports_one_that_imports_it():
    tools = {path.stem: path for path in (ROOT / "records" / "tools").glob("*.py")}
    imports = {}
    for name, path in tools.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "records.tools":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("records."):
                found.add(node.module.removeprefix("records.tools."))
        assert found <= set(tools), name
        imports[name] = found
    assert imports["ablate"] == {"load", "logs", "race"}  # so imports are found
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_a_copy_is_checked_trained_on_two_processes_and_sampled_from(tmp_path, shards):
    copy = tmp_path / "my record.py"
    text = (ROOT / "train_gpt.py").read_text()
    assert text.count("F.relu") == 1
    copy.write_text(text.replace("F.relu", "F.silu"))
    flags = [*TINY[1:], *shards, "--num_iterations=2", f"--records={tmp_path}/r"]
    done = run_sh(str(copy), *flags, "demo", NPROC="2")
    assert done.returncode == 0, done.stdout + done.stderr
    log = log_path(tmp_path / "r")
    lines = [line for line in done.stdout.splitlines() if line.startswith("run.sh: ")]
    assert len(lines) == 5 and lines[0].startswith(f"run.sh: using {sys.executable} (Python 3.")
    assert lines[1] == "run.sh: preset demo: 2 rank(s)"
    assert f"python '{copy}' --check --preset=demo" in lines[2]
    assert f"-m torch.distributed.run --standalone --nproc_per_node=2 '{copy}' --pre" in lines[3]
    assert (f"records/tools/sample.py {log} '--script={copy}' --tokens=300 --temperature=0.9"
            in lines[4])
    trained, sample = done.stdout.split(lines[4])
    assert len(losses(trained)) == 2 and len(sample) > 2
    assert len(sample) > 200 or "note: end of text after" in done.stderr
    assert "F.silu" in log.read_text() and "ranks: 2" in log.read_text()


def test_repeats_with_fresh_seeds_and_ends_with_the_table(tmp_path, shards):
    flags = [flag for flag in TINY[1:] if not flag.startswith("--seed")]
    done = run_sh("--repeat=2", "demo", *flags, *shards, "--num_iterations=1",
                  "--micro_batches=1", f"--records={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [log.read_text() for log in tmp_path.glob("*.log")]
    seeds = {line for log in logs for line in log.splitlines() if line.startswith("seed = ")}
    assert len(logs) == 2 and len(seeds) == 2 and "over the runs  n" in done.stdout
    assert "sample.py" not in done.stdout


def test_what_the_check_finds_is_one_line_and_nothing_is_trained(tmp_path, shards):
    flags = ["speedrun", "--vocab_size=257", *TINY[1:], *shards, f"--records={tmp_path}"]
    done = run_sh(*flags, "--num_iterations=99999", NPROC="2")
    assert done.returncode == 2 and "not 99999: add shards, raise --epochs" in done.stderr
    assert done.stderr.count("\n") == 1 and "preset speedrun: 2 rank(s)" in done.stdout
    done = run_sh(*flags, "--check", NPROC="1")
    assert done.returncode == 0 and done.stdout.count("checks passed") == 1, done.stderr
    assert not list(tmp_path.iterdir())


class Started:
    """A run.sh in the middle of its training, and in a session of its own, as in a terminal."""

    def __init__(self, *argv, until, **env):
        self.process = subprocess.Popen([str(ROOT / "run.sh"), *argv], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True, env={**os.environ, **ENVIRONMENT,
                                                                     **env})
        output = []
        for line in self.process.stdout:
            output.append(line)
            if until in line:
                return
        raise AssertionError("".join(output))


@pytest.mark.parametrize("number, to_all, ranks", [
    (signal.SIGINT, True, "1"), (signal.SIGINT, True, "2"), (signal.SIGTERM, False, "2")])
def test_a_signal_leaves_nothing_behind(tmp_path, shards, number, to_all, ranks):
    """Ctrl+C, which a terminal sends to all, or a signal to run.sh alone, as from a scheduler. The
    pipe is closed when the last of its programs has ended."""
    flags = [*TINY[1:], "--num_iterations=4000", "--epochs=10000", "--val_loss_every=0"]
    run = Started("demo", *flags, *shards, f"--records={tmp_path}", until="step:50/", NPROC=ranks)
    (os.killpg if to_all else os.kill)(run.process.pid, number)
    output, _ = run.process.communicate(timeout=20)
    assert run.process.returncode == 128 + number, output
    assert output.endswith("interrupted\n")


def test_a_console_that_goes_away_does_not_end_the_run(tmp_path, shards):
    run = Started("demo", *TINY[1:], *shards, f"--records={tmp_path}", "--num_iterations=40",
                  until="step:3/", NPROC="2")
    run.process.stdout.close()
    run.process.wait(timeout=100)
    assert "\nfinal_val_loss: " in log_path(tmp_path).read_text()


def test_tests_run_on_a_copy(tmp_path):
    """The tests that pin the method are left out; what they are is in tests/conftest.py."""
    copy = tmp_path / "copy.py"
    copy.write_text((ROOT / "train_gpt.py").read_text().replace("hp.head_lr", "0.01"))
    done = run_sh("test", "--script", str(copy), "--collect-only", "-n", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[train_gpt]" in done.stdout
    assert "golden" not in done.stdout and "test_model.py" not in done.stdout
    done = run_sh("test", "--script", str(tmp_path / "none.py"))
    assert done.returncode == 4 and "none.py is not a file" in done.stderr
