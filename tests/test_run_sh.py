"""run.sh with the interpreter that runs the tests, on the tests' own shards."""

import os
import subprocess
import sys

from conftest import ROOT, TINY, losses


def run_sh(*argv, **env):
    return subprocess.run([str(ROOT / "run.sh"), *argv], capture_output=True, text=True, timeout=250,
                          env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | env)


def test_trains_on_two_processes_and_says_each_decision(tmp_path, shards):
    done = run_sh("demo", *TINY[1:], *shards, "--num_iterations=2", f"--records={tmp_path}", NPROC="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(done.stdout)) == 2 and len(list(tmp_path.glob("*.log"))) == 1
    said = [line for line in done.stdout.splitlines() if line.startswith("run.sh: ")]
    assert "preset demo on 0 CUDA GPU(s)" in said[1] and "2 process(es)" in said[1] and "as the flags say" in said[2] and "nproc_per_node=2" in said[3]
    assert sys.executable in said[0]


def test_check_starts_nothing(tmp_path, shards):
    """On the second of two machines, which has no records to resume from."""
    done = run_sh("demo", *TINY[1:], *shards, "--check", "--resume", f"--records={tmp_path}", NNODES="2", NODE_RANK="1", NPROC="1")
    assert done.returncode == 0 and done.stdout.count("checks passed") == 1 and "starting" not in done.stdout, done.stdout + done.stderr


def test_an_interpreter_without_a_working_torch_is_passed_over(tmp_path, shards):
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')")
    for name, site in (("broken", tmp_path / "site"), ("python3", tmp_path)):
        (tmp_path / name).write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
        (tmp_path / name).chmod(0o755)
    done = run_sh("--preset", "demo", *TINY[1:], *shards, "--check", f"--records={tmp_path}", NPROC="1",
                  PYTHON=str(tmp_path / "broken"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0 and "checks passed" in done.stdout and "preset demo" in done.stdout, done.stdout + done.stderr
    assert f"using {tmp_path}/python3" in done.stdout or "using .venv" in done.stdout, done.stdout


def test_repeats_with_fresh_seeds_and_ends_with_the_table(tmp_path, shards):
    flags = [flag for flag in TINY[1:] if not flag.startswith("--seed")]
    done = run_sh("--repeat=2", *flags, *shards, "--num_iterations=1", "--micro_batches=1", f"--records={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "core(s): 1 process(es)" in done.stdout, "only as many processes as divide the micro-batches"
    seeds = {line for log in tmp_path.glob("*.log") for line in log.read_text().splitlines() if line.startswith("seed = ")}
    assert len(seeds) == 2 and "over the runs  n" in done.stdout


def test_user_errors_are_one_line_with_status_2(tmp_path, shards):
    for argv, words in ((["fast"], "neither speedrun, demo nor test"), (["demo", "--repeat=0"], "--repeat=0 is no number"),
                        (["demo", "--repeat=2", "--seed=1"], "leave --seed out"),
                        (["demo", *shards, "--val_tokens=0", "--num_iterations=99999999"], "raise --epochs"),
                        (["demo", *shards, "--no_such=1"], "unrecognized arguments: --no_such=1"),
                        (["--preset=auto"], "invalid choice: 'auto'")):
        done = run_sh(*argv)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
