"""progress.py: what a run of the suite shows, and the end of a test that hangs."""

import json
import re
import shutil
import subprocess
import sys
import pytest
from conftest import ENVIRONMENT, ROOT

EXAMPLE = """
import time
import pytest

@pytest.mark.parametrize("n", range(30))
@pytest.mark.quick
def test_many(n):
    time.sleep(0.05)

def test_wrong():
    assert 1 == 2

@pytest.mark.full
def test_of_full_size():
    pass

def test_sleeps():
    time.sleep(NAP)
"""

TORCH = """# As much as conftest.py needs; torch itself takes a second in each process
from types import SimpleNamespace
cuda = SimpleNamespace(is_available=lambda: False)
manual_seed = id
"""

@pytest.fixture
def suite(tmp_path):
    """Runs a small suite with this suite's settings; its exit status, and its lines."""
    (tests := tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "tests/progress.py", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "train_gpt.py").touch()
    (tmp_path / "torch.py").write_text(TORCH)
    for name in ("records", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tests / "times.json").write_text(json.dumps(
        {"machine": "a machine", "minutes": {"plain": 7, "quick": 1, "all": 9},
         "tests": {"tests/test_example.py::test_sleeps": 2.0}}))

    def run(*flags, nap=0.1, hangs_after="20"):
        (tests / "test_example.py").write_text(EXAMPLE.replace("NAP", str(nap)))
        done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags],
                              cwd=tmp_path, text=True, stdout=subprocess.PIPE, timeout=100,
                              stderr=subprocess.STDOUT, check=False,
                              env=ENVIRONMENT | {"TEST_HANGS_AFTER": hangs_after,
                                                 "PYTHONPATH": str(tmp_path)})
        return done.returncode, done.stdout.splitlines()

    return run

def test_a_run_says_how_long_it_takes_what_fails_and_what_it_left_out(suite):
    status, lines = suite("-n2")
    assert status == 1 and lines[0] == "2 processes test; two processes take 7 minutes on a machine"
    assert lines.index("FAILED tests/test_example.py::test_wrong") < len(lines) / 2
    assert re.match("1 failed, 31 passed in ", lines[-2])
    assert lines[-1] == "1 tests of full size were left out: ./run.sh test --all"

def test_who_asks_for_some_gets_them(suite):
    status, lines = suite("-n0", "-mquick")
    assert status == 0 and lines[0] == "1 process tests; two processes take 60 seconds on a machine"
    assert re.match("30 passed, 3 deselected in ", lines[-1])
    status, lines = suite("-oaddopts=-q", "-pno:xdist", "--all", "-knot wrong")
    assert status == 0 and re.match("32 passed, 1 deselected in ", lines[-1])

def test_a_test_that_hangs_is_ended_and_named(suite):
    status, lines = suite("-n1", "-k", "sleeps", nap=60, hangs_after="0.02")
    said = "tests/test_example.py::test_sleeps has not ended after 0.02 minutes, so it is stopped"
    assert status == 1 and said in lines
    assert not any("most recent call" in line or line.startswith("Timeout") for line in lines)
