import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

# A shell lets what it starts in the background ignore these, and so would every run that a test
# starts and signals.
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt  # noqa: E402

TINY = [
    "--preset=demo", "--vocab_size=257", "--windows=LSSL", "--value_embeds=0..0",
    "--attention=xx.x", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--train_seq_len=256",
    "--val_seq_len=512", "--val_tokens=1000", "--window_start=128", "--window_end=384",
    "--num_iterations=6", "--val_loss_every=3", "--seed=1", "--dtype=float32", "--epochs=100",
    "--key_offset", "--muon_beta2=0.95",
]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
}


def pytest_configure(config):
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def write_shard(path, tokens, magic=train_gpt.SHARD_MAGIC, version=train_gpt.SHARD_VERSION,
                count=None):
    header = np.zeros(train_gpt.SHARD_HEADER_BYTES // 4, dtype="<i4")
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


@pytest.fixture
def runs_here():
    """For tests that train in this process: one thread, on whose number sums depend in their last
    bits; and the signals as they were, since a run ends its process at one."""
    threads = torch.get_num_threads()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


def command(*flags, ranks=None, script=ROOT / "train_gpt.py") -> list[str]:
    """What starts the script, by torchrun where ranks is given."""
    torchrun = []
    if ranks:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *torchrun, str(script), *flags]


def launch(*flags, ranks=None, script=ROOT / "train_gpt.py", cwd=None, threads=1, check=True,
           **env):
    """Run the script, by torchrun where ranks is given; its CompletedProcess."""
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), **env}
    done = subprocess.run(command(*flags, ranks=ranks, script=script), capture_output=True,
                          text=True, cwd=cwd, env=environment, timeout=280)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def planted(folder: Path, code: str) -> Path:
    """A copy of the script which runs this code (of ranks and step) before each training step."""
    text = (ROOT / "train_gpt.py").read_text()
    end = text.index('if __name__ == "__main__":')
    step = (
        "right_train_step = train_step\n\n"
        "def train_step(model, batches, optimizers, step, hp, ranks):\n"
        f"    {code}\n"
        "    return right_train_step(model, batches, optimizers, step, hp, ranks)\n\n"
    )
    path = folder / "planted.py"
    path.write_text(text[:end] + step + text[end:])
    return path


def log_path(folder) -> Path:
    """The one log in a records folder."""
    (path,) = Path(folder).glob("*.log")
    return path


def log_of(folder) -> str:
    return log_path(folder).read_text()


def newest_checkpoint(folder) -> dict:
    """What the newest checkpoint of the one run in a records folder holds."""
    newest = train_gpt.checkpoints_in(log_path(folder).with_suffix(""))[0]
    return torch.load(newest, weights_only=True)


def losses(text: str, kind: str = "val_loss") -> list[float]:
    return [float(part.split(":")[1]) for line in text.splitlines() if line.startswith("step:")
            for part in line.split() if part.startswith(kind + ":")]
