"""data/fineweb.py: what lands from a hub on this machine, what is fetched again, what not."""

import hashlib
import http.server
import threading
from pathlib import Path
import huggingface_hub
import numpy as np
import pytest
from conftest import refused, write_shard
from data import fineweb
from data.common import UserError

NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]

def shard(path, seed, count=5000):
    write_shard(path, np.random.default_rng(seed).integers(0, 50257, count))
    return path.read_bytes()

class Handler(http.server.SimpleHTTPRequestHandler):
    """What the hub's library asks of the hub for a download: HEAD and GET of resolve/main/NAME."""
    def translate_path(self, path):
        self.name = path.removeprefix("/datasets/kjj0/fineweb10B-gpt2/resolve/main/").lstrip("/")
        return str(self.server.folder / self.name)
    def do_GET(self):
        self.server.fetched += [Path(self.path).name] * self.path.endswith(".bin")
        super().do_GET()
    def end_headers(self):
        path = self.server.folder / self.name
        if path.exists():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{self.server.sums.get(self.name, digest)}"')
        super().end_headers()
    def log_message(self, *_):
        pass

@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    """A server of the files, the first of which has an etag that is no SHA-256, as mirrors have,
    and the names of all it sent. The hub's library is as in 2024, when a function knew no endpoint.
    """
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.fetched = tmp_path_factory.mktemp("hub"), []
    server.sums = {NAMES[0]: "some-other-etag"}
    server.files = {name: shard(server.folder / name, i) for i, name in enumerate(NAMES)}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    plain = huggingface_hub.get_hf_file_metadata
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: plain(url))
    yield server
    server.shutdown()
    server.server_close()

def fetch(folder, chunks=2):
    fineweb.main([f"--num_chunks={chunks}", f"--out={folder}"])

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

@pytest.mark.parametrize("content, etag, words", [
    (lambda b: b[:-2], None, "promises 5000 tokens, the file holds 4999"),
    (lambda b: b"<html></html>" * 100, None, "not a token shard"),
    (lambda b: b, "5" * 64, f"its SHA-256 is not {'5' * 64}")])
def test_a_bad_file_on_the_hub_does_not_stay(hub, tmp_path, content, etag, words):
    path = hub.folder / NAMES[2]
    path.write_bytes(content(path.read_bytes()))
    if etag:
        hub.sums[NAMES[2]] = etag
    with refused(f"{NAMES[2]}.*{words}", UserError):
        fetch(tmp_path)
    assert names(tmp_path) == sorted([*NAMES[:2], "SHA256SUMS"])  # the sound ones are kept

def test_user_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    words = "could not be fetched from http://127.0.0.1:9 .*; HF_ENDPOINT can name a mirror"
    with refused(words, UserError):
        fetch(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]

def test_damaged_files_are_found_and_fetched_again(hub, tmp_path, capsys):
    (tmp_path / NAMES[0]).write_bytes(hub.files[NAMES[0]])  # from elsewhere
    for known in (0, 2):
        fetch(tmp_path)
        said = capsys.readouterr().out
        assert said.count("5000 tokens, sound, SHA-256 as fetched") == known
        assert f"{NAMES[0]}: 5000 tokens, sound, no SHA-256 on record" in said
    shard(tmp_path / NAMES[2], 8)  # a sound shard, but another
    (tmp_path / NAMES[1]).write_bytes(hub.files[NAMES[1]][:-2] + b"\xff\xff")
    fetch(tmp_path)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in said] == [str(tmp_path / name) for name in NAMES[1:]]
    assert "its SHA-256 is not" in said[1]
    assert all((tmp_path / name).read_bytes() == content for name, content in hub.files.items())
    assert hub.fetched == 2 * NAMES[1:]
