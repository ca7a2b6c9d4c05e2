"""A whole run of the script as on a GPU, but on the CPU: compiled, with the head in FP8, and with
backward passes in another thread, where autograd runs them on a GPU.

    python tests/compiled_run.py FLAGS

The last line counts what the compiler's cache had."""

import dataclasses
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import train_gpt

plain_backward = torch.Tensor.backward
plain_resolve = train_gpt.resolve
plain_train_step = train_gpt.train_step


def backward_in_another_thread(self):
    failures = []

    def run():
        try:
            plain_backward(self)
        except BaseException as e:
            failures.append(e)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def dense(q, k, v, mask, scale):
    """Attention that torch.compile takes whole on a CPU, in place of FlexAttention."""
    position = torch.arange(q.size(2))
    seen = mask.mask_mod(0, 0, position[:, None], position)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


class CompiledGPT(train_gpt.GPT):
    """Compiles itself, as the script has it done on a GPU."""

    def __init__(self, hp, dtype, flex):
        super().__init__(hp, dtype, flex=True)
        self.compile(dynamic=False, fullgraph=True)


def resolve_with_fp8(hp, device):
    return dataclasses.replace(plain_resolve(hp, device), use_fp8=hp.use_fp8)


def strict_train_step(*args):
    """Where the script forbids a recompile on a GPU: in every step after the warmup."""
    strict_train_step.calls += 1
    stance = "fail_on_recompile" if strict_train_step.calls > 1 else "default"
    torch.compiler.set_stance(stance)
    return plain_train_step(*args)


strict_train_step.calls = 0

if __name__ == "__main__":
    torch.Tensor.backward = backward_in_another_thread
    train_gpt.resolve = resolve_with_fp8
    train_gpt.GPT = CompiledGPT
    train_gpt.attention = dense
    train_gpt.train_step = strict_train_step
    train_gpt.main(sys.argv[1:])
    print({name: count for name, count in counters["aot_autograd"].items() if "cache" in name})
