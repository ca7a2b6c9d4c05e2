"""Options, fixtures and helpers of all tests. `import train_gpt` gets the script under test.

With `--script=my_record.py` only the tests run that every script must pass: those in EVERY_SCRIPT
that are not marked `method`, which is for tests that pin what train_gpt.py trains."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread in each of several processes
    os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch

# Processes that a shell starts in the background ignore these signals, and so would every run that
# a test starts and signals.
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"  # the script under test; --script changes it
EVERY_SCRIPT = ("test_training.py", "test_reliability.py", "test_processes.py", "test_settings.py",
                "test_loader.py", "test_honesty.py")
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))
from progress import LEFT_OUT, Progress, SlowestFirst, Watchdog, idle_cores
from records.tools.load import TORCHRUN, load_script

# The demo, made small, in settings that every script is expected to have. Layers, windows and
# whatever else the script under test has of its own stay as its demo has them.
TINY = ["--preset=demo", "--vocab_size=257", "--model_dim=32", "--num_heads=2", "--head_dim=16",
        "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=1000", "--num_iterations=6",
        "--val_loss_every=3", "--seed=1", "--dtype=float32", "--epochs=100"]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}

def pytest_addoption(parser):
    parser.addoption("--script", metavar="PATH", help="test this copy of train_gpt.py instead, by "
                     "the tests that every script must pass")
    parser.addoption("--all", action="store_true", help="run the tests of full size as well")
    parser.addoption("--record-times", action="store_true", help="write how long each test takes "
                     "to tests/times.json")

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return idle_cores()

def pytest_configure(config):
    global SCRIPT
    if config.option.script:
        SCRIPT = Path(config.option.script).resolve()
        config.option.script = str(SCRIPT)  # for the workers of xdist, which may start elsewhere
        if not SCRIPT.is_file():
            raise pytest.UsageError(f"--script={SCRIPT} is not a file")
    for path in (word.partition("::")[0] for word in config.args):
        if not Path(path).exists():  # xdist would not say which
            raise pytest.UsageError(f"{path}: there is no such file")
    load_script(SCRIPT, "train_gpt")
    torch.manual_seed(0)
    config.pluginmanager.register(Watchdog(config))
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowestFirst())
    else:
        config.pluginmanager.register(Progress(config), "progress")

def pytest_ignore_collect(collection_path, config):
    if collection_path.suffix == ".py":
        without_quick = (config.option.markexpr == "quick"  # importing the others takes seconds
                         and "mark.quick" not in collection_path.read_text())
        not_for_all = config.option.script and collection_path.name not in EVERY_SCRIPT
        return without_quick or not_for_all or None

def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    option = config.option
    named = option.all or option.markexpr or any("::" in word for word in config.args)
    left_out = {"full": not named, "method": bool(option.script)}
    for marker in (marker for marker, out in left_out.items() if out):
        marked = [item for item in items if item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
        if marker == "full":
            config.stash[LEFT_OUT] = len(marked)

@contextmanager
def refused(words: str, error=None):
    """Expects an error of one line with these words, the script's own where none is named."""
    with pytest.raises(error or Exception, match=words) as raised:
        yield
    # By name, since a script that is loaded again has another class of this name.
    assert error or raised.type.__name__ == "UserError", raised.value
    assert "\n" not in str(raised.value)

def write_shard(path, tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    Path(path).write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return str(path)

def byte_documents(text: bytes) -> list[int]:
    """Paragraphs as documents, each with the end-of-text token in front."""
    return [t for paragraph in text.split(b"\n\n") for t in (256, *paragraph, 10)]

@pytest.fixture(scope="session")
def text() -> bytes:
    return (ROOT / "tests" / "text.txt").read_bytes()

@pytest.fixture(scope="session")
def shards(tmp_path_factory, text):
    """The flags that name two training shards and a validation shard of tests/text.txt."""
    folder = tmp_path_factory.mktemp("shards")
    tokens = byte_documents(text)
    cut = len(tokens) * 8 // 10
    write_shard(folder / "t_train_000001.bin", tokens[:cut // 2])
    write_shard(folder / "t_train_000002.bin", tokens[cut // 2:cut])
    write_shard(folder / "t_val_000000.bin", tokens[cut:])
    return [f"--train_files={folder}/t_train_*.bin", f"--val_files={folder}/t_val_*.bin"]

@contextmanager
def one_thread():
    """Since the last bits of sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

@pytest.fixture
def runs_here():
    """For tests that compute in this process."""
    with one_thread():
        yield

def train(script, *flags):
    with one_thread():
        script.main([str(flag) for flag in flags])

def launch(*flags, ranks=None, script=None, cwd=None, check=True, torchrun=False, **env):
    """Runs the script at this path; its CompletedProcess. Several ranks are started by a program
    that does as torchrun does in less time, or by torchrun itself."""
    start = [ROOT / "tests" / "helpers" / "ranks.py", ranks] if ranks else []
    if torchrun:
        start = [*TORCHRUN, f"--nproc_per_node={ranks}"]
    words = [sys.executable, *start, script or SCRIPT, *flags]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd,
                          env=ENVIRONMENT | env, timeout=500)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done

RUN_SH = {"PYTHON": str(ROOT / "tests" / "helpers" / "python.sh"), "TEST_PYTHON": sys.executable,
          "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

def run_sh(*argv, run=ROOT / "run.sh", **env):
    """Runs run.sh, or a link to it or a copy; its CompletedProcess."""
    return subprocess.run([str(run), *argv], capture_output=True, text=True, errors="replace",
                          timeout=200, env={**os.environ, **RUN_SH, **env}, check=False)

def run_helper(name: str, *arguments, ranks=None, **env) -> str:
    """Runs a program of tests/helpers to its end, by several ranks if asked; what it prints."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = launch(*arguments, ranks=ranks, script=ROOT / "tests" / "helpers" / name,
                  PYTHONPATH=paths, **env)
    print(done.stdout)
    return done.stdout

def edited(path: Path, *edits: str, script=None) -> Path:
    """A copy of the script with edits, each a text that it has once, with «old→new» in it."""
    text = Path(script or SCRIPT).read_text()
    for edit in edits:
        old, new = (re.sub("(?s)«(.*?)→(.*?)»", side, edit) for side in (r"\1", r"\2"))
        assert text.count(old) == 1, f"the script has no single {old!r} any more"
        text = text.replace(old, new)
    path.write_text(text)
    return path

def planted(folder: Path, code: str, script=None) -> Path:
    """A copy of the script that runs this code, which may use `world` and `step`, before each
    training step. (The warmup makes one of step 0.)"""
    right, main, end = Path(script or SCRIPT).read_text().partition('if __name__ == "__main__":')
    path = folder / "planted.py"
    path.write_text(f"""{right}import inspect
right_train_step = train_step

def train_step(*args):
    named = inspect.signature(right_train_step).bind(*args).arguments
    world, step = named["world"], named["step"]
    {code}
    return right_train_step(*args)

{main}{end}""")
    return path

def log_path(folder) -> Path:
    (path,) = Path(folder).glob("*.log")
    return path

def log_of(folder) -> str:
    return log_path(folder).read_text()

def newest_checkpoint(folder) -> Path:
    return max(Path(folder).glob("*/step*.pt"), key=lambda path: path.name)

def load_checkpoint(folder) -> dict:
    return torch.load(newest_checkpoint(folder), weights_only=True)

def losses(text: str, kind: str = "val_loss") -> list[float]:
    return [float(loss) for loss in re.findall(rf"(?m)^step:.* {kind}:(\S+)", text)]
