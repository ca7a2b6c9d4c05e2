"""What the programs here share: a training script as a module, programs that they start, and from
data/common.py the errors, the arguments and the lock of a program."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from data.common import ArgumentParser, UserError, between, locked, require, run  # noqa: F401
from records.tools.leash import STARTER, show_from

ROOT = Path(__file__).resolve().parents[2]
# Starts several processes of this machine, also where its own name leads nowhere.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1"]
LEASH = str(ROOT / "records" / "tools" / "leash.py")

def load_script(path, name: str = "training_script") -> ModuleType:
    """A training script as a module of this name, whatever the file is called. A mistake in it
    keeps its traceback."""
    require(Path(path).is_file(), f"{path}: there is no such script")
    try:
        Path(path).read_text(encoding="utf-8")  # as a run reads it for its log
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no text in UTF-8 ({error}); save it as UTF-8") from None
    loader = SourceFileLoader(name, str(path))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = script  # dataclasses look for their module there
    sys.excepthook = partial(show_from, str(path))
    loader.exec_module(script)
    return script

@contextlib.contextmanager
def child(*words: str, **options):
    """A Python program that ends with this one, by its leash if this one is killed. Ctrl+C has
    reached it too, so that it may end by itself; a signal to this process alone has not."""
    env = options.pop("env", os.environ) | {STARTER: str(os.getpid())}
    program = subprocess.Popen([sys.executable, LEASH, *words], env=env, **options)
    try:
        yield program
        program.wait()
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            program.wait(timeout=3)
        program.terminate()
        program.wait()
        raise
