"""Fetching FineWeb from a hub on this machine: what lands, what is fetched again, and what never
gets a final name."""

import hashlib
import http.server
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_data_common import another_run

from data import fineweb
from data.common import SHARD_MAGIC, SHARD_VERSION, UserError, check_shard, run

NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]


def shard(seed, count=5000):
    header = np.zeros(256, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, count
    tokens = np.random.default_rng(seed).integers(0, 50257, count)
    return header.tobytes() + tokens.astype("<u2").tobytes()


class Hub(http.server.ThreadingHTTPServer):
    """What the hub's library asks of the hub for a download: HEAD and GET of resolve/main/NAME."""
    daemon_threads = True

    def __init__(self):
        self.files = {name: shard(i) for i, name in enumerate(NAMES)}
        self.sums = {}      # etags other than the file's SHA-256
        self.fetched = []   # names, one per GET
        self.stall = None   # called in the middle of each file
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        if self.path.endswith(".bin"):
            self.server.fetched.append(self.path.rsplit("/", 1)[1])
        if content := self.answer():
            half = len(content) // 2
            self.wfile.write(content[:half])
            if self.server.stall:
                self.wfile.flush()
                self.server.stall()
            self.wfile.write(content[half:])

    def answer(self):
        folder, name = self.path.rsplit("/", 1)
        content = None
        if folder == "/datasets/kjj0/fineweb10B-gpt2/resolve/main":
            content = self.server.files.get(name)
        self.send_response(200 if content else 404)
        if content:
            self.send_header("X-Repo-Commit", "0" * 40)
            digest = self.server.sums.get(name, hashlib.sha256(content).hexdigest())
            self.send_header("ETag", f'"{digest}"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        return content

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def fetch(folder, *argv, chunks=2):
    fineweb.main([f"--num_chunks={chunks}", f"--out={folder}", *argv])


def fails(capsys, folder, *argv, chunks=2):
    handler = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    try:
        status = run(lambda: fetch(folder, *argv, chunks=chunks))
    finally:
        signal.signal(signal.SIGTERM, handler)
    lines = capsys.readouterr().err.splitlines()
    assert status == 2 and lines[-1].startswith("error: "), lines
    return lines


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_it_fetches_checks_and_records_and_then_has_nothing_to_do(hub, tmp_path, capsys):
    folder = tmp_path / "deep/fineweb10B"
    fetch(folder)
    assert names(folder) == sorted([*NAMES, "SHA256SUMS"])
    assert all((folder / name).read_bytes() == content for name, content in hub.files.items())
    assert (folder / "SHA256SUMS").read_text() == "".join(
        f"{hashlib.sha256(hub.files[name]).hexdigest()}  {name}\n" for name in sorted(NAMES))
    assert sorted(hub.fetched) == sorted(NAMES) and "3 fetched now" in capsys.readouterr().out
    hub.shutdown()
    fetch(folder)  # needs no network
    assert len(hub.fetched) == 3 and "0 fetched now" in capsys.readouterr().out


def test_one_more_chunk_fetches_one_file(hub, tmp_path):
    fetch(tmp_path, chunks=0)
    assert hub.fetched == NAMES[:1]
    fetch(tmp_path, chunks=1)
    assert hub.fetched == NAMES[:2] and len((tmp_path / "SHA256SUMS").read_text().splitlines()) == 2


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b[:2000] + b"\xff\xff" + b[2002:],
                                    lambda b: b""])
def test_a_damaged_file_is_fetched_again(hub, tmp_path, capsys, damage):
    fetch(tmp_path)
    path = tmp_path / NAMES[1]
    path.write_bytes(damage(path.read_bytes()))
    fetch(tmp_path)
    assert path.read_bytes() == hub.files[NAMES[1]]
    assert hub.fetched.count(NAMES[1]) == 2 and len(hub.fetched) == 4
    assert f"fetching it again: {path}" in capsys.readouterr().err


@pytest.mark.parametrize("content", [shard(1)[:-2], shard(1)[:1024] + b"\xff\xff" * 5000,
                                     b"<html></html>" * 100])
def test_a_bad_file_on_the_hub_never_gets_its_name(hub, tmp_path, capsys, content):
    (tmp_path / NAMES[2]).write_bytes(content)
    with pytest.raises(UserError) as training:
        check_shard(tmp_path / NAMES[2], 50257)
    (tmp_path / NAMES[2]).unlink()
    hub.files[NAMES[2]] = content
    lines = fails(capsys, tmp_path, "--workers=1")
    words_of_training = str(training.value).removeprefix(str(tmp_path))
    assert len(lines) == 1 and lines[0].endswith(words_of_training)
    assert names(tmp_path) == sorted([*NAMES[:2], "SHA256SUMS"])  # the sound ones are kept


def test_a_file_that_changed_on_its_way_never_gets_its_name(hub, tmp_path, capsys):
    hub.sums[NAMES[0]] = "5" * 64
    assert f"its SHA-256 is not {'5' * 64}" in fails(capsys, tmp_path, chunks=0)[0]
    assert names(tmp_path) == []


def test_a_mirror_without_checksums_will_do(hub, tmp_path):
    hub.sums[NAMES[0]] = "some-other-etag"
    fetch(tmp_path, chunks=0)
    assert hashlib.sha256(hub.files[NAMES[0]]).hexdigest() in (tmp_path / "SHA256SUMS").read_text()


def test_without_a_network_it_says_so_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    lines = fails(capsys, tmp_path / "new")
    assert len(lines) == 1 and "HF_ENDPOINT" in lines[0]
    assert "could not be fetched from http://127.0.0.1:9" in lines[0]
    assert not (tmp_path / "new").exists()


def test_other_user_errors(hub, tmp_path, capsys):
    del hub.files[NAMES[2]]
    assert f"{NAMES[2]}: {hub.url} does not have it" in fails(capsys, tmp_path)[0]
    assert names(tmp_path) == []
    assert "fineweb10B has 103" in fails(capsys, tmp_path, chunks=104)[0]
    assert "--workers 0: must be 1 or more" in fails(capsys, tmp_path, "--workers=0")[0]
    assert "invalid choice: 'c4'" in fails(capsys, tmp_path, "--dataset=c4")[0]
    assert "holds no fineweb_*.bin" in fails(capsys, tmp_path, "--verify")[0]
    with another_run(tmp_path / ".fineweb10B.unfinished"):
        assert "another run is writing there" in fails(capsys, tmp_path, chunks=1)[0]


def test_files_that_do_not_fit_are_not_begun(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fineweb.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 30_000}))
    assert "3 files of 0.0 GB in all do not fit" in fails(capsys, tmp_path)[0]
    assert hub.fetched == [] and names(tmp_path) == []


def test_verify(hub, tmp_path, capsys):
    fetch(tmp_path)
    hub.shutdown()
    (tmp_path / "fineweb_train_000007.bin").write_bytes(shard(7))
    capsys.readouterr()
    fetch(tmp_path, "--verify")
    said = capsys.readouterr().out
    assert said.count("5000 tokens, sound, SHA-256 as fetched") == 3
    assert "fineweb_train_000007.bin: 5000 tokens, sound, no SHA-256 on record" in said
    path = tmp_path / NAMES[2]
    content = bytearray(path.read_bytes())
    # A valid shard, and another.
    content[1024:1028] = bytes([*content[1026:1028], *content[1024:1026]])
    path.write_bytes(content)
    (tmp_path / NAMES[1]).write_bytes(shard(1)[:-2])
    lines = fails(capsys, tmp_path, "--verify")
    assert len(lines) == 3 and lines[-1].startswith("error: 2 of 4 files are bad")
    assert any(str(path) in line and "SHA-256" in line for line in lines)
    assert path.read_bytes() == content  # verifying changes nothing


@pytest.mark.parametrize("signum, status", [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_an_interrupted_fetch_leaves_no_partial_file(hub, tmp_path, signum, status):
    fetch(tmp_path, chunks=0)
    halfway, go_on = threading.Event(), threading.Event()
    hub.stall = lambda: (halfway.set(), go_on.wait())
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(run(lambda: fetch(tmp_path, "--workers=2"))))
    child.start()
    assert halfway.wait(60)
    os.kill(child.pid, signum)
    child.join(60)
    assert child.exitcode == status
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == NAMES[:1]
    go_on.set()
    hub.stall = None
    fetch(tmp_path)
    assert all((tmp_path / name).read_bytes() == content for name, content in hub.files.items())
    assert names(tmp_path) == sorted([*NAMES, "SHA256SUMS"])
