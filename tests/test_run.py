"""run.sh: which Python it takes or makes, its verbs, and what it says where it cannot go on."""

import ast
import graphlib
import re
import runpy
import shutil
import subprocess
import sys
import pytest
from conftest import ROOT, run_sh

def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)

def stand_in(path, code: str) -> str:
    """A Python that runs this code before its program, which stands after `-W ignore`."""
    begin = (f"import runpy, sys; {code}; sys.argv[:] = sys.argv[3:]; "
             'sys.path.insert(0, ""); runpy.run_path(sys.argv[0], run_name="__main__")')
    return program(path, f"exec {sys.executable} -c '{begin}' \"$@\"")

GOOD = 'case "$3" in *fits.py) echo "Python 3.10.1, torch 2.13.0" ;; *) echo "$0 $*" ;; esac'

@pytest.fixture
def bare(tmp_path):
    """A folder with run.sh and what it asks interpreters; a function that runs it there."""
    folder = tmp_path / "repository"
    (folder / "records" / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copy(ROOT / "records" / "tools" / "fits.py", folder / "records" / "tools")
    (folder / "requirements.txt").write_text("# All\ntorch==2.13.0\nnumpy\ntriton==3; linux\n")
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    for number in range(10, 15):  # those of this machine are hidden
        program(tmp_path / "bin" / f"python3.{number}", "exit 1")
    return folder, lambda *argv, **env: run_sh(*argv, run=folder / "run.sh", LC_ALL="C",
                                               **{"PYTHON": "", "PATH": path, **env})

def old(path):
    return stand_in(path, "sys.version_info = (3, 8, 18)")

def test_what_cannot_be_used_is_passed_over_in_a_line_each(bare, tmp_path):
    folder, run = bare
    torch_280 = 'import types; sys.modules["torch"] = types.SimpleNamespace(__version__="2.8.0")'
    stand_in(folder / ".venv/bin/python", torch_280)
    old(tmp_path / "bin/python3")
    program(tmp_path / "bin/python", GOOD)
    done = run("--seed=1", "demo")
    assert done.returncode == 0 and (done.stderr + done.stdout).splitlines() == [
        "run.sh: passed over .venv/bin/python: torch 2.8.0 is older than 2.9.1",
        "run.sh: passed over python3: Python 3.8 is older than 3.10",
        f"run.sh: using {tmp_path}/bin/python (Python 3.10.1, torch 2.13.0)",
        f"{tmp_path}/bin/python -W ignore records/tools/launch.py --seed=1 demo"], done.stderr

def test_an_interpreter_that_is_asked_for_is_never_replaced(tmp_path):
    without = program(tmp_path / "without", f'exec {sys.executable} -S "$@"')
    for python, reason in {"/no/such": "/no/such: No such file or directory",
                           old(tmp_path / "old"): "Python 3.8 is older than 3.10",
                           without: "ModuleNotFoundError: No module named 'torch'"}.items():
        done = run_sh("demo", PYTHON=python, LC_ALL="C")
        assert done.returncode == 2 and done.stdout == "", python
        assert done.stderr == (
            f"error: PYTHON={python} cannot be used: {reason}; name a Python from 3.10 on that has "
            "the packages of requirements.txt, or leave PYTHON out\n")

def test_old_pythons_can_read_what_asks_for_their_version():
    tree = ast.parse((ROOT / "records" / "tools" / "fits.py").read_text(), feature_version=(3, 4))
    assert not any(isinstance(node, (ast.JoinedStr, ast.NamedExpr)) for node in ast.walk(tree))

@pytest.mark.parametrize("version, status", [("2.9.0", 1), ("2.9.1", 0), ("2.10.0+cu128", 0)])
def test_the_oldest_torch_that_will_do(version, status, tmp_path):
    (tmp_path / "torch.py").write_text(f"__version__ = '{version}'")
    done = run_sh(ROOT / "records" / "tools" / "fits.py", "torch", run=sys.executable,
                  PYTHONPATH=str(tmp_path))
    assert done.returncode == status and f"torch {version}" in (done.stdout or done.stderr)

PIP = "-m pip install --disable-pip-version-check -r requirements.txt"
UV = "pip install --python .venv/bin/python --torch-backend auto -r requirements.txt"

@pytest.mark.parametrize("there, commands", [
    ("nothing", [PIP]), ("an old Python", [PIP]), ("no Python", [PIP]),
    ("torch alone", ["-m pip install --disable-pip-version-check numpy"]),
    ("uv", ["venv --python python3.12 .venv", UV]), ("uv alone", ["venv --python 3.13 .venv", UV])])
def test_an_environment_is_made_once_and_an_unfit_one_anew(there, commands, bare, tmp_path):
    """By uv, or by the first Python that is new enough. A torch in it stays."""
    folder, run = bare
    old(tmp_path / "bin/python3")
    program(tmp_path / "bin/python", "exit 1")
    made = f"""case "$*" in
        *"-m pip install"*) echo "$*" >> {tmp_path}/asked; exit ;;
        *"fits.py torch") [ -f {tmp_path}/has_torch ] || exit 1 ;;
        *"fits.py torch"*) [ -f {tmp_path}/asked ] || exit 1 ;; esac
        {GOOD}"""
    program(tmp_path / "made", made)
    make = f"mkdir -p .venv/bin && cp {tmp_path}/made .venv/bin/python"
    if there != "uv alone":
        program(tmp_path / "bin/python3.12", f"""[ "$1 $2" != "-W ignore" ] || exit 0
            [ "$*" = "-m venv --without-pip .venv" ] && [ ! -e .venv ] && {make}""")
    if there.startswith("uv"):
        program(tmp_path / "bin/uv",
                f'echo "$*" >> {tmp_path}/asked; [ "$1" = pip ] || {{ {make}; }}')
    if there == "an old Python":
        old(folder / ".venv/bin/python")
    elif there == "no Python":  # which was removed
        (folder / ".venv/bin").mkdir(parents=True)
        (folder / ".venv/bin/python").symlink_to("/no/such")
    elif there == "torch alone":
        program(folder / ".venv/bin/python", made)
        (tmp_path / "has_torch").touch()
    for times in range(2):
        done = run("test", "--script", "mine.py", "-k", "loss")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("-m pytest --script=mine.py -k loss\n")
        assert ("making .venv" in done.stderr) == (times == 0)
    assert (tmp_path / "asked").read_text().splitlines() == commands

def test_a_folder_that_is_read_only_is_no_old_python(bare, tmp_path):
    folder, run = bare
    program(tmp_path / "bin/python3", "exit 1")
    program(tmp_path / "bin/python", "exit 1")
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("mounts need root and Linux")
    done = run_sh("-m", "sh", "-c", f"{mount} && exec {folder}/run.sh demo", run="unshare",
                  PYTHON="", PATH=f"{tmp_path}/bin:/usr/bin:/bin", HOME="/")
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == (
        "error: no Python here has the packages that this needs, and .venv cannot be made in "
        f"{folder}, which is read-only: copy the folder, or name a Python that has them by PYTHON")

def test_what_others_have_left_in_the_environment_reaches_no_program(bare, tmp_path):
    """Of launchers and notebooks. What is meant for a run stays."""
    _, run = bare
    program(tmp_path / "bin/python3", GOOD.replace('echo "$0 $*"', "env"))
    left = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT PET_NNODES PET_RDZV_ENDPOINT " \
           "OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY PYTHONOPTIMIZE"
    done = run("demo", MPLBACKEND="module://none", NCCL_DEBUG="INFO", **dict.fromkeys(
        left.split(), "2"))
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0 and not found.keys() & {*left.split()}, done.stderr
    assert (found["MPLBACKEND"], found["NCCL_DEBUG"]) == ("agg", "INFO")

def test_it_is_started_by_sh_by_slurm_and_without_a_home(bare, tmp_path):
    folder, run = bare
    program(tmp_path / "bin/python3", GOOD)
    shutil.copy(ROOT / "run.sh", tmp_path / "slurm_script")
    done = run_sh("demo", run=tmp_path / "slurm_script", SLURM_SUBMIT_DIR=str(folder),
                  PYTHON=str(tmp_path / "bin/python3"))
    assert done.returncode == 0 and "records/tools/launch.py demo" in done.stdout, done.stderr
    done = run_sh("demo", run=tmp_path / "slurm_script")
    assert done.returncode == 2 and done.stderr.startswith(
        f"error: {tmp_path} holds a copy of run.sh without the rest: start the one in the project")
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, folder / "run.sh", "demo", "--records=~/x"], check=False,
                              env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"},  # without HOME
                              capture_output=True, text=True)
        assert re.search(r"launch\.py demo --records=/.*/x\n$", done.stdout), done.stderr

def test_a_file_that_hides_one_of_pythons_modules_is_named(bare):
    folder, run = bare
    (folder / "inspect.py").touch()
    done = run("ideas", PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == (
        "error: inspect.py in this folder hides Python's own module: give it another name\n")

def test_a_clone_on_windows_has_the_lines_that_bash_reads():
    """Git for Windows ends lines by CR LF where .gitattributes does not forbid it."""
    done = run_sh("-C", ROOT, "check-attr", "text", "eol", "--", "run.sh", "x.log", run="git")
    assert {"run.sh: eol: lf", "x.log: text: unset"} <= {*done.stdout.splitlines()}

def test_help_needs_no_python():
    done = run_sh("help", PYTHON="/no/such")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("./run.sh [train] [my_record.py] [speedrun|short|demo] [")
    assert done.stdout.endswith("or per core).\n")
    assert done.stdout == run_sh("--help", PYTHON="/no/such").stdout

@pytest.mark.parametrize("verb", ["race", "ablate", "honest", "compare", "sample", "tokenize",
                                  "inspect", "fineweb", "ideas", "bench", "verify", "same",
                                  "night"])
def test_each_verb_explains_itself(verb, tmp_path, monkeypatch, capsys):
    """By its program, which is started here, where all packages are imported already."""
    done = run_sh(verb, "--help", PYTHON=program(tmp_path / "python", GOOD))
    assert done.returncode == 0 and done.stderr == ""
    path, = re.findall(r" (\S+\.py) --help\n", done.stdout)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which a program changes
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    out, err = capsys.readouterr()
    assert not ended.value.code and f"./run.sh {verb}" in out and err == ""
    assert verb != "race" or "--text=FILE_OR_FOLDER" in out and "--most" in out

def test_logs_are_compared_without_torch(tmp_path):
    without = stand_in(tmp_path / "python", f'sys.path.insert(0, "{tmp_path}")')
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    done = run_sh("compare", "records/demo/train_gpt", PYTHON=without)
    assert done.returncode == 0 and "40 runs" in done.stdout, done.stderr
    assert "no torch" in run_sh("demo", PYTHON=without).stderr

def test_no_tool_imports_one_that_imports_it():
    imports = {}
    for path in (ROOT / "records" / "tools").glob("*.py"):
        text = path.read_text()
        several = re.findall(r"(?m)^ *from records\.tools import (.*)", text)
        one = re.findall(r"(?m)^ *from records\.tools\.(\w+) import", text)
        imports[path.stem] = {*", ".join(several).split(", "), *one} - {""}
    assert {"load", "race"} <= imports["night"]  # so imports are found
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError

def test_tests_run_on_a_copy(tmp_path):
    """The tests that pin the method are left out; what they are is in tests/conftest.py."""
    copy = tmp_path / "copy.py"
    copy.write_text((ROOT / "train_gpt.py").read_text().replace("hp.lm_head_lr", "0.01"))
    done = run_sh("test", "--script", str(copy), "--collect-only", "-n", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "::test_the_script_is_honest" in done.stdout
    assert "golden" not in done.stdout and "test_model.py" not in done.stdout

@pytest.mark.parametrize("words, status, error", [
    ("rcae", 2, "error: rcae is no verb; ./run.sh help lists them"), ("z-a", 2, "z-a is no verb"),
    ("test --script none.py", 4, "none.py is not a file"),
    ("test tests/none.py::test", 4, "tests/none.py: there is no such file")])
def test_a_word_that_means_nothing_is_one_line(words, status, error):
    done = run_sh(*words.split())
    assert (done.returncode, done.stdout) == (status, "")
    assert error in done.stderr and len(done.stderr.strip().splitlines()) == 1
