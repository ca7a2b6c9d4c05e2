"""What the data programs share: one-line errors with an exit status, and a folder for unfinished files."""

import argparse
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt import UserError


class ArgumentParser(argparse.ArgumentParser):
    """argparse, whose errors are one line like any other."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise UserError(f"{message} (--help lists the options)")


def run(main) -> int:
    """Runs main(); the exit status of the program. A user's error is one line and status 2, an interruption one line
    and the status the shell gives that signal."""
    def interrupt(signum, frame):
        raise KeyboardInterrupt(signum)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        main()
        return 0
    except UserError as e:
        message, status = f"error: {e}", 2
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        message, status = f"error: {where}{e.strerror or e}", 2
    except KeyboardInterrupt as e:
        message, status = "interrupted", 128 + (e.args[0] if e.args else signal.SIGINT)
    print(message, file=sys.stderr)
    return status


@contextlib.contextmanager
def staging(folder: Path):
    """A folder for unfinished files: locked against a second run, emptied of what a killed run left, and removed at the
    end whatever happens. A full disk becomes a UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another run is writing there; wait for it, or choose another name") from None
        for leftover in folder.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif leftover.name != "lock":
                leftover.unlink()
        try:
            yield folder
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(f"{folder.parent}: {os.strerror(e.errno).lower()}; the unfinished files were removed, "
                                "free some space and run this again") from None
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(staged: list[Path], folder: Path):
    """Gives finished files their final names, in order. Their content reaches the disk first, so that not even a power
    cut leaves half a file under a final name."""
    for path in staged:
        with open(path, "rb") as f:
            os.fsync(f.fileno())
    for path in staged:
        os.replace(path, folder / path.name)
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
