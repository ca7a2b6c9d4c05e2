"""Imports the script, trains with the flags that are given, and says what that has loaded, and what
the compiler has found in its cache."""

import sys
import torch
import train_gpt

print("after import:", torch.cuda.is_initialized(), torch.distributed.is_initialized())
train_gpt.main(sys.argv[1:])
dynamo = sys.modules.get("torch._dynamo.utils")
found = dynamo and {name: count for name, count in dynamo.counters["aot_autograd"].items()
                    if "cache" in name}
print("compiler:", found)
