"""What the programs here share: a training script as a module, programs that they start, and from
data/common.py the errors, the arguments and the lock of a program."""

import contextlib
import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from data.common import ArgumentParser, UserError, between, locked, require, run

ROOT = Path(__file__).resolve().parents[2]
# Starts several processes of this machine, also where its own name leads nowhere.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1"]

__all__ = ["ROOT", "TORCHRUN", "ArgumentParser", "UserError", "between", "child", "load_script",
           "locked", "require", "run"]

def load_script(path, name: str = "training_script") -> ModuleType:
    """A training script as a module of this name, whatever the file is called. A mistake in it
    keeps its traceback."""
    require(Path(path).is_file(), f"{path}: there is no such script")
    loader = SourceFileLoader(name, str(path))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = script  # dataclasses look for their module there
    loader.exec_module(script)
    return script

@contextlib.contextmanager
def child(*words: str, **options):
    """A Python program that ends with this one. Ctrl+C has reached it too, so that it may end by
    itself; a signal to this process alone has not."""
    program = subprocess.Popen([sys.executable, *words], **options)
    try:
        yield program
        program.wait()
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            program.wait(timeout=3)
        program.terminate()
        program.wait()
        raise
