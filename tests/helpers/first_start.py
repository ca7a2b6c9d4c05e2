"""Imports the script, trains with the flags that are given, and says what that has loaded."""

import sys
import torch
import train_gpt

print("after import:", torch.cuda.is_initialized(), torch.distributed.is_initialized())
train_gpt.main(sys.argv[1:])
print("compiler:", "torch._dynamo" in sys.modules)
