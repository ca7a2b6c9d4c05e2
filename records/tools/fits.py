"""Prints the versions of this Python and of its torch, or in one line why run.sh cannot use it:

    python records/tools/fits.py torch numpy      # the modules that a verb needs

Old Pythons read this as well, down to 2.7.
"""

import importlib
import os
import re
import sys

if sys.version_info < (3, 10):
    sys.exit("Python %d.%d is older than 3.10" % sys.version_info[:2])
for file in sorted(os.listdir(".")):
    if file.endswith(".py") and file[:-3] in {*sys.stdlib_module_names, *sys.argv[1:]}:
        sys.exit("%s in this folder hides Python's own module: give it another name" % file)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit("%s: %s" % (type(error).__name__, " ".join(str(error).split())))
found = "Python " + sys.version.split()[0]
if "torch" in sys.argv:
    torch = sys.modules["torch"].__version__
    if [int(number) for number in re.findall("[0-9]+", torch)[:3]] < [2, 9, 1]:
        sys.exit("torch %s is older than 2.9.1" % torch)
    found += ", torch " + torch
print(found)
