"""The programs that start runs and read logs. A package that is missing, where one is started by
hand, is one line."""

import sys

PACKAGES = {"matplotlib", "numpy", "plotly", "scipy", "torch", "tqdm"}

def say_missing(kind, error, trace):
    if kind is ModuleNotFoundError and error.name in PACKAGES:
        print(f"error: {error.name} is not installed here: start the program by ./run.sh, or "
              "install the packages of requirements.txt", file=sys.stderr)
        sys.exit(2)
    sys.__excepthook__(kind, error, trace)

sys.excepthook = say_missing
