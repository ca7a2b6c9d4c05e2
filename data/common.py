"""What the data programs share: the format of a token shard, one-line errors, and safe files.

A shard is a header of 256 int32 (magic, version, token count, zeros), then uint16 tokens, all of
them little-endian. train_gpt.py, which runs without this folder, has the same constants.
"""

import argparse
import contextlib
import fcntl
import hashlib
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

SHARD_MAGIC = 20240520
SHARD_HEADER_BYTES = 4 * 256
PIECE_TOKENS = 1 << 20  # in memory at a time, where each needs several bytes

class UserError(Exception):
    """What a user can mend, in one line: what is wrong and what to do."""

def require(condition, message: str, error=UserError):
    """Raises an error with the message where the condition does not hold."""
    if not condition:
        raise error(message)

# ---- Shards --------------------------------------------------------------------------------------

def shard_header(num_tokens: int) -> bytes:
    """The header of a shard of so many tokens."""
    header = np.zeros(SHARD_HEADER_BYTES // 4, dtype="<i4")
    header[:3] = SHARD_MAGIC, 1, num_tokens
    return header.tobytes()

def check_shard(path, vocab_size: int) -> np.ndarray:
    """The tokens of a shard, mapped from the disk, once its header, its size and every token are
    right. Raises UserError that names the defect and its byte."""
    size = os.path.getsize(path)
    require(size >= SHARD_HEADER_BYTES, f"{path}: {size} bytes, shorter than the "
            f"{SHARD_HEADER_BYTES}-byte header; make it again")
    magic, version, num_tokens = np.fromfile(path, dtype="<i4", count=3).tolist()
    require((magic, version) == (SHARD_MAGIC, 1), f"{path}: begins with {magic} and {version}, not "
            f"with {SHARD_MAGIC} and version 1; not a token shard")
    held = (size - SHARD_HEADER_BYTES) / 2
    require(held == num_tokens, f"{path}: the header at byte 8 promises {num_tokens} tokens, the "
            f"file holds {held:g}; it is damaged or was cut off, fetch or make it again")
    require(num_tokens, f"{path}: holds no token; make the shard again")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES)
    if tokens.max() >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        raise UserError(f"{path}: token {tokens[at]} at byte {SHARD_HEADER_BYTES + 2 * at} is not "
                        f"below the vocabulary size {vocab_size}; wrong tokenizer or damaged file")
    return tokens

def write_shards(stretches, stem: Path, first_number: int, shard_size: int) -> dict:
    """Writes arrays of tokens into the fewest shards stem_NUMBER.bin of at most shard_size tokens,
    all of about one length, so that none is too short to train on. Returns {"tokens": how many,
    "shards": {file name: its SHA-256}}."""
    total = sum(map(len, stretches))
    number_of_shards = -(-total // shard_size)
    ends = [total * (i + 1) // number_of_shards for i in range(number_of_shards)]
    shards = {}
    rest = iter(stretches)
    stretch = np.empty(0, dtype="<u2")
    for number, (start, end) in enumerate(zip([0, *ends], ends), first_number):
        path = Path(f"{stem}_{number:06d}.bin")
        with open(path, "wb") as f:
            f.write(shard_header(end - start))
            while start < end:
                stretch = stretch if len(stretch) else next(rest)
                piece, stretch = np.split(stretch, [end - start])
                f.write(piece.data)
                start += len(piece)
        shards[path.name] = sha256(path)
    return {"tokens": total, "shards": shards}

# ---- Programs ------------------------------------------------------------------------------------

class ArgumentParser(argparse.ArgumentParser):
    """argparse, whose errors are one line like any other."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **kwargs)

    def error(self, message):
        raise UserError(f"{message} (--help lists the options)")

def between(low, high=math.inf, kind=int):
    """A type for argparse: the numbers from low to high."""
    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high and value < math.inf:
                return value
        limit = f"from {low} on" if high == math.inf else f"from {low} to {high}"
        number = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text}: expected a {number} {limit}")
    return parse

def run(main, errors: tuple = ()) -> int:
    """Runs main(), and returns what that returns, or 0, as the program's exit status. A UserError,
    also a training script's own class of this name, one of the classes in `errors`, or an error of
    the operating system is one line and status 2; an interruption is one line and the status that a
    shell gives that signal."""
    def interrupt(signum, frame):
        raise KeyboardInterrupt(signum)

    signal.signal(signal.SIGTERM, interrupt)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8
    try:
        return main() or 0
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as e:
        print("interrupted", file=sys.stderr)
        return 128 + (e.args[0] if e.args else signal.SIGINT)
    except Exception as e:
        if isinstance(e, OSError):
            e = f"{e.filename}: {e.strerror}" if e.filename else e.strerror or e
        elif type(e).__name__ != "UserError" and not isinstance(e, errors):
            raise
        print(f"error: {e}", file=sys.stderr)
        return 2

# ---- Files ---------------------------------------------------------------------------------------

def sha256(path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()

def walk(top, skip=lambda name: False):
    """Yields (folder, names of its files) for a folder and all below it, those behind links too,
    but each only once. Leaves out those for whose name skip() is true. Raises OSError for one that
    cannot be read."""
    def fail(error):
        raise error

    seen = set()
    for folder, folders, names in os.walk(top, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if real not in seen and not skip(name))
        if real not in seen:
            seen.add(real)
            yield Path(folder), names

@contextlib.contextmanager
def locked(path: Path, refusal: str = ""):
    """Refuses a second program that locks this file, or if no refusal is given, has it wait. The
    kernel releases the lock whatever ends the first one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            require(not refusal, f"{path.parent}: {refusal}")
            print(f"note: another program makes files in {path.parent}; this one waits for it",
                  file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            print(f"note: {path.parent} is on a file system without locks ({error.strerror}): make "
                  "sure that you start this only once", file=sys.stderr)
        yield

@contextlib.contextmanager
def staging(folder: Path):
    """A folder for unfinished files: locked against a second run, emptied of what a killed run
    left, and removed at the end whatever happens."""
    with locked(folder / "lock", "another run is writing there; wait for it, or choose another "
                "name"):
        for leftover in {*folder.iterdir()} - {folder / "lock"}:
            leftover.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

def write_whole(path: Path, text: str):
    """Replaces a file by one with this text, so that at no time there is half of one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)

def publish(staged: list[Path], folder: Path):
    """Gives finished files their final names, in order, once their content is on the disk."""
    for path in staged:
        with open(path, "rb+") as f:
            os.fsync(f.fileno())
    for path in staged:
        os.replace(path, folder / path.name)
