"""Runs a Python program that ends with the process that started it, whatever ended that one:

    python records/tools/leash.py train_gpt.py --seed=1
    python records/tools/leash.py -m torch.distributed.run --nproc_per_node=2 LEASH train_gpt.py

torchrun gives its ranks sessions of their own, so they would train on when it is killed. On Linux
the kernel sends them a signal then; on other systems the program runs without a leash.

A script runs in this process as `python SCRIPT` runs it, and a hook that is set here before sees
all that it does. Words that begin with a dash are for a Python that takes this process's place.
"""

import os
import re
import sys
from functools import partial
from types import ModuleType

# In the environment: the process that starts this one, and a file that notes what a script opens.
STARTER = "LEASH_STARTER"
OPENED = "LEASH_OPENED"
# What Python, the system and compilers open by themselves is not noted.
OWN = re.compile(r"(?:/(?:proc|sys|dev|etc|usr|lib\w*)/|.*(?:torchinductor|\.triton|__pycache__)"
                 r"|.*\.(?:pyc?|so(?:\.\d+)*|ptx\.o)$)")
CACHES = ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"]

def end_with_starter():
    """SIGTERM for this process when its parent ends. Ends it now if that has happened before."""
    if sys.platform == "linux":
        import ctypes
        from signal import SIGTERM
        ctypes.CDLL(None).prctl(1, SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG, which exec leaves alone
        if os.environ.get(STARTER, str(os.getppid())) != str(os.getppid()):
            sys.exit("the process that started this one has ended")
    os.environ[STARTER] = str(os.getpid())  # of what it starts, since exec keeps the number

def show_from(script: str, kind, error, trace):
    """A traceback begins in the script; that of a syntax error has no frame in it."""
    own = trace
    while own and own.tb_frame.f_code.co_filename != script:
        own = own.tb_next
    if not own and not issubclass(kind, SyntaxError):
        own = trace
    sys.__excepthook__(kind, error.with_traceback(own), own)

def note_what_is_opened(file: str):
    """Appends the path of each file that this process opens from now on, except new ones, such as a
    compiler's temporary files. What C++ code or a child process opens is not seen."""
    notes = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    caches = [os.path.abspath(os.environ[name]) + os.sep for name in CACHES if os.environ.get(name)]
    own = (sys.prefix, sys.base_prefix, *caches)

    def note(event, values):
        if (event == "open" and isinstance(values[0], (str, bytes, os.PathLike))
                and not (values[2] or 0) & (os.O_EXCL | os.O_TRUNC)):
            path = os.path.abspath(os.fsdecode(values[0]))
            if not (OWN.match(path) or path.startswith(own) or os.path.isdir(path)):
                os.write(notes, os.fsencode(path) + b"\n")
    sys.addaudithook(note)

def run_script(path: str):
    """As __main__, whose text is read by its own coding line."""
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    sys.excepthook = partial(show_from, main.__file__)
    with open(path, "rb") as file:
        exec(compile(file.read(), main.__file__, "exec", dont_inherit=True), main.__dict__)

if __name__ == "__main__":
    end_with_starter()
    if sys.argv[1].startswith("-"):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    del sys.argv[0]
    if OPENED in os.environ:
        note_what_is_opened(os.environ.pop(OPENED))
    run_script(sys.argv[0])
