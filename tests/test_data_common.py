"""data/common.py: the format, errors of one line, and files that are published when whole."""

import signal
import numpy as np
import pytest
from conftest import refused, write_shard
import train_gpt
from data import common
from data.common import UserError, check_shard, run, shard_header, staging

def status_of(main, **options):
    """What run() returns; the tests keep their handler of SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return run(main, **options)
    finally:
        signal.signal(signal.SIGTERM, handler)

def test_the_format_is_the_scripts():
    for name in ("SHARD_MAGIC", "SHARD_HEADER_BYTES"):
        assert getattr(common, name) == getattr(train_gpt, name), name
    assert shard_header(7)[:12] == np.array([20240520, 1, 7], dtype="<i4").tobytes()
    assert shard_header(7)[12:] == bytes(1012)

def test_every_token_of_a_shard_is_checked_and_the_first_bad_one_named(tmp_path):
    tokens = np.arange(20) + 100
    path = write_shard(tmp_path / "a.bin", tokens)
    assert check_shard(path, 120).tolist() == tokens.tolist()
    for at in range(20):
        bad = np.where(np.arange(20) < at, tokens, tokens + 20 - at)  # the first of them is 120
        write_shard(path, bad)
        with refused(f"a.bin: token 120 at byte {1024 + 2 * at} is not below the vocabulary size "
                     "120", UserError):
            check_shard(path, 120)

@pytest.mark.parametrize("change, words", [
    (lambda b: b[:1000], "1000 bytes, shorter than the 1024-byte header"),
    (lambda b: b"\1" + b[1:], "and 1, not with 20240520 and version 1; not a token shard"),
    (lambda b: b[:4] + b"\2" + b[5:], "begins with 20240520 and 2, not with"),
    (lambda b: b[:8] + bytes(1016), "holds no token; make the shard again"),
    (lambda b: b[:8] + b"\xfb\xff\xff\xff" + b[12:], "promises -5 tokens, the file holds 3; it is"),
    (lambda b: b[:-1], "promises 3 tokens, the file holds 2.5; it is damaged or was cut off")])
def test_a_damaged_header_or_size_is_named(tmp_path, change, words):
    path = tmp_path / "a.bin"
    write_shard(path, [256, 1, 2])
    path.write_bytes(change(path.read_bytes()))
    with refused(f"^{path}: .*{words}", UserError):
        check_shard(path, 257)

@pytest.mark.parametrize("error, status, said", [
    (UserError("wrong; do this"), 2, "error: wrong; do this"),
    (EOFError("of another module"), 2, "error: of another module"),
    (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: a.txt: No such file"),
    (KeyboardInterrupt(signal.SIGTERM), 143, "interrupted"),
    (KeyboardInterrupt(), 130, "interrupted")])
def test_errors_are_one_line_with_a_status(capsys, error, status, said):
    def main():
        raise error
    assert status_of(main, errors=(EOFError,)) == status
    assert capsys.readouterr().err == f"{said}\n"

def test_a_defect_is_a_traceback():
    with pytest.raises(ZeroDivisionError):
        status_of(lambda: 1 / 0)

def test_a_folder_is_of_one_run_at_a_time(tmp_path):
    folder = tmp_path / "unfinished"
    with staging(folder):
        (folder / "precious").touch()
        with refused("another run is writing there", UserError), staging(folder):
            pass
        assert (folder / "precious").exists()
    assert not folder.exists()
    folder.mkdir()
    (folder / "left").touch()
    with staging(folder):
        assert [path.name for path in folder.iterdir()] == ["lock"]
    assert not folder.exists()
