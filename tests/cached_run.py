"""A run of the script, and then a line that counts what it found in the compiler's cache.

    python tests/cached_run.py FLAGS"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from torch._dynamo.utils import counters
import train_gpt

train_gpt.main(sys.argv[1:])
print({name: count for name, count in counters["aot_autograd"].items() if "cache" in name})
