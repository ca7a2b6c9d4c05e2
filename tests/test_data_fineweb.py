"""data/fineweb.py: fetching FineWeb from a hub on this machine: what lands, what is fetched again,
and what does not stay."""

import hashlib
import http.server
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import refused

from data import fineweb
from data.common import UserError, shard_header

NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]

def shard(seed, count=5000):
    tokens = np.random.default_rng(seed).integers(0, 50257, count)
    return shard_header(count) + tokens.astype("<u2").tobytes()

class Hub(http.server.ThreadingHTTPServer):
    """What the hub's library asks of the hub for a download: HEAD and GET of resolve/main/NAME."""
    daemon_threads = True

    def __init__(self):
        self.files = {name: shard(i) for i, name in enumerate(NAMES)}
        self.sums = {}      # etags other than the file's SHA-256
        self.fetched = []   # names, one per GET
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        if self.path.endswith(".bin"):
            self.server.fetched.append(self.path.rsplit("/", 1)[1])
        if content := self.answer():
            self.wfile.write(content)

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
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()

def fetch(folder, *argv, chunks=2):
    fineweb.main([f"--num_chunks={chunks}", f"--out={folder}", *argv])

def names(folder):
    """Without the folder in which the hub's library keeps its notes."""
    return sorted(path.name for path in Path(folder).glob("[!.]*"))

def test_it_fetches_checks_and_records_and_then_has_nothing_to_do(hub, tmp_path, capsys):
    folder = tmp_path / "deep/fineweb10B"
    fetch(folder, chunks=1)  # as the preset `short` needs
    assert hub.fetched == NAMES[:2]
    fetch(folder)
    assert names(folder) == sorted([*NAMES, "SHA256SUMS"]) and hub.fetched == NAMES
    assert all((folder / name).read_bytes() == content for name, content in hub.files.items())
    assert (folder / "SHA256SUMS").read_text() == "".join(
        f"{hashlib.sha256(hub.files[name]).hexdigest()}  {name}\n" for name in sorted(NAMES))
    assert "1 fetched now" in capsys.readouterr().out
    hub.shutdown()
    fetch(folder)  # needs no network
    assert hub.fetched == NAMES and "0 fetched now" in capsys.readouterr().out

def test_the_hubs_library_of_2024_will_do(hub, tmp_path, monkeypatch):
    """Up to 0.30 this function knew no endpoint."""
    import huggingface_hub
    plain = huggingface_hub.get_hf_file_metadata

    def older(url, token=None, proxies=None, timeout=10, library_name=None, library_version=None,
              user_agent=None, headers=None):
        return plain(url)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", older)
    fetch(tmp_path, chunks=0)
    assert hub.fetched == NAMES[:1]

@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b[:-2] + b"\xff\xff"])
def test_a_damaged_file_is_fetched_again(hub, tmp_path, capsys, damage):
    fetch(tmp_path)
    path = tmp_path / NAMES[1]
    path.write_bytes(damage(path.read_bytes()))
    fetch(tmp_path)
    assert path.read_bytes() == hub.files[NAMES[1]] and hub.fetched == [*NAMES, NAMES[1]]
    assert f"error: {path}: " in capsys.readouterr().err

@pytest.mark.parametrize("content, etag, words", [
    (shard(1)[:-2], None, "promises 5000 tokens, the file holds 4999"),
    (b"<html></html>" * 100, None, "not a token shard"), (b"", None, "404"),
    (shard(1), "5" * 64, f"its SHA-256 is not {'5' * 64}")])
def test_a_bad_file_on_the_hub_does_not_stay(hub, tmp_path, content, etag, words):
    hub.files[NAMES[2]] = content
    hub.sums = {NAMES[2]: etag} if etag else {}
    fetch(tmp_path, chunks=1)
    with refused(f"{NAMES[2]}.*{words}", UserError):
        fetch(tmp_path)
    assert names(tmp_path) == sorted([*NAMES[:2], "SHA256SUMS"])  # the sound ones are kept

def test_a_mirror_without_checksums_will_do(hub, tmp_path):
    hub.sums[NAMES[0]] = "some-other-etag"
    fetch(tmp_path, chunks=0)
    assert hashlib.sha256(hub.files[NAMES[0]]).hexdigest() in (tmp_path / "SHA256SUMS").read_text()

def test_user_errors(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--num_chunks 104: there are 103"):
        fetch(tmp_path, chunks=104)
    with pytest.raises(UserError, match="holds no fineweb_"):
        fetch(tmp_path, "--verify")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    words = "could not be fetched from http://127.0.0.1:9 .*; HF_ENDPOINT can name a mirror"
    with refused(words, UserError):
        fetch(tmp_path / "new")
    assert not (tmp_path / "new").exists()

def test_verify(hub, tmp_path, capsys):
    fetch(tmp_path)
    hub.shutdown()
    (tmp_path / "fineweb_train_000007.bin").write_bytes(shard(7))
    capsys.readouterr()
    fetch(tmp_path, "--verify")
    said = capsys.readouterr().out
    assert said.count("5000 tokens, sound, SHA-256 as fetched") == 3
    assert "fineweb_train_000007.bin: 5000 tokens, sound, no SHA-256 on record" in said
    (tmp_path / NAMES[2]).write_bytes(shard(8))  # a sound shard, but another
    (tmp_path / NAMES[1]).write_bytes(shard(1)[:-2])
    with pytest.raises(UserError, match="2 of 4 files are bad"):
        fetch(tmp_path, "--verify")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and f"{tmp_path / NAMES[2]}: its SHA-256 is not" in lines[1]
    assert (tmp_path / NAMES[2]).read_bytes() == shard(8)  # verifying changes nothing
