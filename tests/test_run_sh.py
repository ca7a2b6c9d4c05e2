"""run.sh with the interpreter that runs the tests, on the tests' own shards."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, log_path, losses, planted

WITHOUT_SEED = [flag for flag in TINY[1:] if not flag.startswith("--seed")]
ENVIRONMENT = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_sh(*argv, **env):
    environment = {**os.environ, **ENVIRONMENT, **env}
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run([str(ROOT / "run.sh"), *argv], capture_output=True, text=True,
                          timeout=150, env=environment, check=False)


def interpreter(path, before="", **env):
    """A program that is this interpreter, with these variables and shell commands before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    variables = " ".join(f"{name}={value}" for name, value in env.items())
    path.write_text(f'#!/bin/sh\n{before}\n{variables} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def broken_torch(folder):
    """A folder for PYTHONPATH with a torch that cannot be imported."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so: not there')")
    return folder


def test_trains_on_two_processes_says_each_decision_and_ends_with_a_sample(tmp_path, shards):
    """What a step frees stays with the process, by variables of which a user's own go first."""
    spy = f'echo "$1 $MALLOC_MMAP_THRESHOLD_ $MALLOC_TRIM_THRESHOLD_" >> {tmp_path}/env'
    python = interpreter(tmp_path / "a folder" / "python", spy)
    done = run_sh("demo", *TINY[1:], *shards, "--num_iterations=2", f"--records={tmp_path}",
                  NPROC="2", PYTHON=python, MALLOC_TRIM_THRESHOLD_="7")
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = tmp_path.glob("*.log")
    lines = [line for line in done.stdout.splitlines() if line.startswith("run.sh: ")]
    assert len(lines) == 5 and lines[0].startswith(f"run.sh: using {python} (Python 3.")
    assert "preset demo: 2 rank(s)" in lines[1] and "train_gpt.py --check" in lines[2]
    assert "torchrun --standalone --nproc_per_node=2 train_gpt.py" in lines[3]
    assert (f"records/sample.py {log} --script=train_gpt.py --tokens=300 --temperature=0.9"
            in lines[4])
    trained, sample = done.stdout.split(lines[4])
    assert len(losses(trained)) == 2 and len(sample) > 2
    assert len(sample) > 200 or "note: end of text after" in done.stderr
    assert "-c 1000000000 7\n" in (tmp_path / "env").read_text()


def test_check_starts_nothing(tmp_path, shards):
    done = run_sh("demo", *TINY[1:], *shards, "--check", f"--records={tmp_path}")
    assert done.returncode == 0 and done.stdout.count("checks passed") == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_an_interpreter_without_a_working_torch_is_passed_over(tmp_path, shards):
    interpreter(tmp_path / "python3", PYTHONPATH=broken_torch(tmp_path / "site"))
    interpreter(tmp_path / "python")
    done = run_sh("--preset", "demo", *TINY[1:], *shards, "--check", f"--records={tmp_path}",
                  NPROC="1", PYTHON="", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0 and "checks passed" in done.stdout, done.stdout + done.stderr
    assert "preset demo: 1 rank(s)" in done.stdout
    assert f"using {tmp_path}/python (" in done.stdout or "using .venv" in done.stdout


def test_an_interpreter_that_is_asked_for_is_never_replaced(tmp_path):
    broken = interpreter(tmp_path / "broken", PYTHONPATH=broken_torch(tmp_path / "site"))
    bare = interpreter(tmp_path / "bare", 'set -- -S "$@"')
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 'SyntaxError: invalid syntax' >&2\nexit 1\n")
    old.chmod(0o755)
    for python, reason in {"/no/such": "/no/such: No such file or directory",
                           "no_such_python": "no_such_python: command not found",
                           broken: "ImportError: libcudart.so: not there",
                           bare: "ModuleNotFoundError: No module named 'torch'",
                           str(old): "SyntaxError: invalid syntax"}.items():
        done = run_sh("demo", PYTHON=python, LC_ALL="C")
        assert done.returncode == 2 and done.stdout == "", python
        assert done.stderr == f"error: PYTHON={python} cannot be used: {reason}\n"


def test_an_environment_is_made_where_no_interpreter_has_the_packages(tmp_path):
    """Once, by whatever python3 is there, which here makes one that works when pip has run."""
    made = f"""#!/bin/sh
        echo "$1 $2 $3" >> {tmp_path}/calls
        case "$*" in "-m pip install"*"-r requirements.txt") touch {tmp_path}/installed; exit; esac
        [ -f {tmp_path}/installed ] || exit 1
        exec {sys.executable} "$@"
    """
    (tmp_path / "made").write_text(made)
    bare = f"""
        [ "$1 $2 $3" = "-m venv .venv" ] || exit 1
        mkdir -p .venv/bin && cp {tmp_path}/made .venv/bin/python && chmod +x .venv/bin/python; exit
    """
    for name in ("python3", "python"):
        interpreter(tmp_path / name, bare)
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copy(ROOT / "run.sh", repository)
    for times in range(2):
        done = subprocess.run([repository / "run.sh", "test", "--version"], capture_output=True,
                              text=True, timeout=100, check=False,
                              env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)})
        assert done.returncode == 0 and f"pytest {pytest.__version__}" in done.stdout, done.stderr
        assert ("making .venv" in done.stdout) == (times == 0)
        assert "run.sh: using .venv/bin/python (Python 3." in done.stdout
    assert (tmp_path / "calls").read_text().count("-m pip install") == 1
    assert "-m pytest --version" in (tmp_path / "calls").read_text()


def test_repeats_with_fresh_seeds_and_ends_with_the_table(tmp_path, shards):
    done = run_sh("--repeat=2", "demo", *WITHOUT_SEED, *shards, "--num_iterations=1",
                  "--micro_batches=1", f"--records={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "demo: 1 rank(s)" in done.stdout, "as many ranks as divide the micro-batches"
    logs = [log.read_text() for log in tmp_path.glob("*.log")]
    seeds = {line for log in logs for line in log.splitlines() if line.startswith("seed = ")}
    assert len(logs) == 2 and len(seeds) == 2 and "over the runs  n" in done.stdout
    assert "sample.py" not in done.stdout


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_needs_no_python_and_says_what_is_its_own(tmp_path, flag):
    done = run_sh("demo", flag, PYTHON="/no/such")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("./run.sh [SCRIPT.py] [speedrun|demo] [--repeat=N]")
    for word in ("train_gpt.py --help", "pytest", "PYTHON", "NPROC"):
        assert word in done.stdout
    assert "set -e" not in done.stdout


@pytest.mark.parametrize("argv, env, words", [
    (["fast"], {}, "invalid choice: 'fast'"),
    (["demo", "--repeat=0"], {}, "--repeat=0: takes a number above 0"),
    (["demo", "--repeat"], {}, "argument --repeat: expected one argument"),
    (["demo", "--repeat=2", "--seed=1"], {}, "--repeat=2: takes a number above 0, and neither "
     "--seed nor --resume"),
    (["--repeat=2", "--resume=x.log"], {}, "nor --resume"),
    (["demo"], {"NPROC": "abc"}, "argument --NPROC: invalid int value: 'abc'"),
    (["speedrun"], {}, "takes weeks without a GPU; run demo"),
    (["speedrun", "--num_iterations=1", "--micro_batches=0"], {}, "--micro_batches=0 is not"),
    (["no_such.py", "demo"], {}, "no_such.py: there is no such script"),
    (["speedrun_2026"], {}, "invalid choice: 'speedrun_2026'"),
    (["--resume=no_such.log"], {}, "no_such.log is not a log"),
    (["demo", "--resume=x.log"], {}, "not allowed with argument"),
    (["demo", "--no_such=1"], {}, "unrecognized arguments: --no_such=1"),
    (["--preset=auto"], {}, "invalid choice: 'auto'"),
])
def test_user_errors_are_one_line_with_status_2(argv, env, words):
    done = run_sh(*argv, **env)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and words in done.stderr
    assert "train_gpt.py" not in done.stdout, "nothing was started"


def test_a_speedrun_without_a_gpu_can_be_checked_and_insisted_on(tmp_path, shards):
    """And what the check finds ends it."""
    flags = ["speedrun", *TINY[1:], *shards, f"--records={tmp_path}"]
    flags = [flag for flag in flags if not flag.startswith("--num_iterations")]
    done = run_sh(*flags, "--check", NPROC="1")
    assert done.returncode == 2 and "not 1770: add shards, raise --epochs" in done.stderr
    done = run_sh(*flags, "--num_iterations=99999", NPROC="1")
    assert done.returncode == 2 and "not 99999: add shards, raise --epochs" in done.stderr
    assert done.stderr.count("\n") == 1 and "preset speedrun: 1 rank(s)" in done.stdout


def test_a_driver_whose_gpus_torch_does_not_see_is_said(tmp_path):
    """A made-up one; who hides the GPUs on purpose hears what a machine without one says."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  "
                                      "Tue Jun  6 22:20:39 UTC 2023\nGCC version:  gcc 12\n")
    (tmp_path / "sitecustomize.py").write_text(f"""if 1:
        import builtins, os.path
        real = builtins.open, os.path.exists
        path = lambda path: {str(tmp_path / 'version')!r} if "nvidia/version" in str(path) else path
        builtins.open = lambda file, *args, **more: real[0](path(file), *args, **more)
        os.path.exists = lambda file: real[1](path(file))
    """)
    python = interpreter(tmp_path / "python", PYTHONPATH=tmp_path)
    done = run_sh("demo", PYTHON=python, CUDA_VISIBLE_DEVICES=None)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    versions = re.search(r"torch (\S+) sees no GPU .* driver 535\.54\.03; ", done.stderr)
    assert versions and versions[1][0].isdigit(), done.stderr
    done = run_sh("speedrun", PYTHON=python, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "takes weeks without a GPU; run demo" in done.stderr


FOREVER = [*TINY[1:], "--num_iterations=4000", "--epochs=10000", "--save_every=20",
           "--val_loss_every=0"]


def hear_ctrl_c():
    """What a shell starts in the background would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Started:
    """A run.sh in the middle of its training, and in a session of its own, as in a terminal."""

    def __init__(self, *argv, until, **env):
        self.process = subprocess.Popen([str(ROOT / "run.sh"), *argv], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True, preexec_fn=hear_ctrl_c,
                                        env={**os.environ, **ENVIRONMENT, **env})
        self.output = []
        for line in self.process.stdout:
            self.output.append(line)
            if until in line:
                return
        raise AssertionError("".join(self.output))

    def end(self) -> int:
        """Its status, when the last of its programs has closed the pipe."""
        self.output += self.process.stdout.readlines()
        return self.process.wait(timeout=100)


def processes_of(folder) -> list[str]:
    """The command lines of all living processes that name this folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text().replace("\0", " "))
        except OSError:  # it has ended meanwhile
            pass
    return [line for line in lines if str(folder) in line]


@pytest.mark.parametrize("number, to_all, ranks", [
    (signal.SIGTERM, False, "1"), (signal.SIGTERM, False, "2"), (signal.SIGHUP, False, "1"),
    (signal.SIGHUP, False, "2"), (signal.SIGINT, True, "1"), (signal.SIGINT, True, "2"),
    (signal.SIGINT, False, "2")])
def test_a_signal_ends_the_run_whose_last_line_helps(tmp_path, shards, number, to_all, ranks):
    """SIGTERM to run.sh alone, as from a scheduler, SIGHUP as from a terminal that closes, and
    Ctrl+C, which a terminal sends to all, or `kill -INT` to run.sh alone. Nothing goes on in the
    background."""
    run = Started("demo", *FOREVER, *shards, f"--records={tmp_path}", until="step:50/", NPROC=ranks)
    (os.killpg if to_all else os.kill)(run.process.pid, number)
    assert run.end() == 128 + number, "".join(run.output)
    steps = [line for line in run.output if line.startswith("step:")]
    assert len(steps) >= 50, "".join(run.output)
    last = run.output[-1]
    assert last.startswith("error: stopped by SIG"), "".join(run.output)
    assert f"--resume={log_path(tmp_path)} continues from it" in last
    assert "Traceback" not in "".join(run.output) and processes_of(tmp_path) == []


def test_resume_needs_no_data_and_takes_the_ranks_from_the_checkpoint(tmp_path, shards):
    """A number that divides the micro-batches of the run, not those of the preset."""
    flags = [*TINY[1:], *shards, f"--records={tmp_path}", "--save_every=2", "--micro_batches=1"]
    done = run_sh("demo", *flags, NPROC=None)
    assert done.returncode == 0 and "preset demo: 1 rank(s)" in done.stdout, done.stderr
    log = log_path(tmp_path)
    done = run_sh(f"--resume={log}", "--num_iterations=8", NPROC=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--resume={log}: 1 rank(s)" in done.stdout and "\nresumed: step 6 " in done.stdout
    assert "data/" not in done.stdout.split("resumed: ")[0].replace(str(tmp_path), "")


@pytest.mark.parametrize("code, statuses, error", [
    ("require(step < 2, 'planted')", [2], "error: planted"),
    ("assert step < 2, 'planted'", [1], "AssertionError: planted"),
    ("if step == 2 and world.rank == 1: os.kill(os.getpid(), 9)", [1, 247],
     "error: rank 1 was ended by SIGKILL"),
])
def test_the_status_is_that_of_the_rank_that_failed(tmp_path, shards, code, statuses, error):
    script = planted(tmp_path, code)
    done = run_sh(str(script), "demo", *TINY[1:], *shards, f"--records={tmp_path}/r", NPROC="2")
    assert done.returncode in statuses, done.stdout + done.stderr
    assert error in done.stderr.splitlines()[-1] and "elastic" not in done.stderr


def test_a_copy_is_checked_trained_and_sampled_from(tmp_path, shards):
    copy = tmp_path / "my record.py"
    text = (ROOT / "train_gpt.py").read_text()
    assert text.count("F.relu") == 1
    copy.write_text(text.replace("F.relu", "F.silu"))
    done = run_sh(str(copy), "demo", *TINY[1:], *shards, f"--records={tmp_path}/r", NPROC="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("run.sh: ")]
    assert "preset demo: 1 rank(s)" in lines[1] and f"'{copy}' --check" in lines[2]
    log = log_path(tmp_path / "r")
    assert f"records/sample.py {log} '--script={copy}' --tokens=300 --temperature=0.9" in lines[4]
    assert "F.silu" in log.read_text() and "note: " not in done.stderr.replace("note: end of", "")


def test_repetitions_at_the_same_time_compare_their_own_runs(tmp_path, shards):
    """Of one name, in one folder: neither reports the other's."""
    flags = ["--repeat=2", "demo", *WITHOUT_SEED, *shards, "--num_iterations=1",
             f"--records={tmp_path}"]
    both = [Started(*flags, until="run.sh: ", NPROC="1") for _ in range(2)]
    compared = []
    for run in both:
        assert run.end() == 0, "".join(run.output)
        printed = [line.split()[1] for line in run.output if line.startswith("log: ")]
        (line,) = [line for line in run.output if line.startswith("run.sh: records/compare.py")]
        assert line.split()[2:] == printed and len(printed) == 2
        compared += printed
    assert sorted(compared) == sorted(map(str, tmp_path.glob("*.log"))) and len(compared) == 4


def test_a_console_that_goes_away_does_not_end_the_run(tmp_path, shards):
    run = Started("demo", *TINY[1:], *shards, f"--records={tmp_path}", "--num_iterations=40",
                  until="step:3/", NPROC="2")
    run.process.stdout.close()
    run.process.wait(timeout=100)
    assert "\nfinal_val_loss: " in log_path(tmp_path).read_text()


def test_tests_run_on_a_copy(tmp_path):
    """The tests that pin the method are left out; what they are is in tests/conftest.py."""
    copy = tmp_path / "copy.py"
    copy.write_text((ROOT / "train_gpt.py").read_text().replace("Adam, hp.head_lr)", "Adam, 0.01)"))
    done = run_sh("test", "--script", str(copy), "--collect-only", "-n", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_a_resumed_run_ends_in_the_same_bits[train_gpt]" in done.stdout
    assert "golden" not in done.stdout and "test_model.py" not in done.stdout
    done = run_sh("test", "--script", str(tmp_path / "none.py"))
    assert done.returncode == 4 and "none.py is not a file" in done.stderr
    slow = ["tests/test_training.py", "-k", "one_seed", "-n", "0"]
    done = run_sh("test", "--script", str(copy), *slow)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
