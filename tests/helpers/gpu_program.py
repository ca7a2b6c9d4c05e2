"""Looks at the program that Inductor generates for a GPU, without a GPU, and runs none of it:

    PYTHONPATH=.:tests python tests/helpers/gpu_program.py CAPABILITY CASE...

fake_gpu.py has the program generated, from fake tensors. Each case prints what it has found, and
fails where a limit is passed. test_without_gpu.py runs them in processes of their own."""

import ast
import copy
import dataclasses
import os
import re
import sys

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # whose keys cannot tell a relabelled graph
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # so that kernels are compiled in this process
import torch
from functorch.compile import make_boxed_func
from helpers.fake_gpu import GPUS, compile_as_cuda, gpu_program, pretend, sources
from helpers.memory_plan import estimated_peaks, kept_bytes
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode

from train_gpt import GPT, PRESETS, attention, build_block_masks

SPEEDRUN = dataclasses.replace(PRESETS["speedrun"], dtype="bfloat16")
GIB = 2**30


def compile_only(graph, inputs, **options):
    """Has Inductor generate the program. In its place the graph itself runs, on fake tensors."""
    plain = copy.deepcopy(graph)
    compile_as_cuda(graph, inputs, **options)
    return make_boxed_func(plain.forward)


def generate(function, *args):
    """The source of the programs, and Inductor's estimate of the memory that each needs."""
    sources.clear()
    torch._dynamo.reset()
    with estimated_peaks() as peaks:
        result = gpu_program(function, compile_only)(*args)
        if result.requires_grad:
            result.backward()
    assert len(peaks) == len(sources), "a program without an estimate"
    return list(sources), peaks


def micro_batch(tokens: int):
    """Arguments of a model, for a sequence of this length."""
    inputs = torch.zeros(tokens, dtype=torch.int32)
    return inputs, inputs.long(), torch.full((), 1792, dtype=torch.int32)


# -------- Shared memory
def case_shared_memory(capability):
    """FlexAttention's kernels at the speedrun's heads, forward and backward, compiled by Triton."""
    limit = GPUS[capability].shared_memory_per_block_optin
    used = {}

    def precompile(self, *args, **kwargs):
        name = self.fn.__name__
        if name.startswith("triton_tem"):
            for config in self.configs:
                kernel = self._precompile_config(config).kernel
                metadata = getattr(kernel, "metadata", kernel)
                used[name] = max(used.get(name, 0), metadata.shared)

    CachingAutotuner.precompile = precompile
    T, H, K = 2048, SPEEDRUN.num_heads, SPEEDRUN.head_dim

    def masked_attention(q, k, v, tokens, window):
        mask, _ = build_block_masks(tokens, 9, window, flex=True)
        return attention(q, k, v, mask, 0.12).float().sum()

    with FakeTensorMode(allow_non_fake_inputs=True):
        qkv = [torch.empty(1, H, T, K, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        tokens, _, window = micro_batch(T)
        generate(masked_attention, *qkv, tokens, window)
    assert {"backward" in name for name in used} == {True, False}, used
    for name, shared in used.items():
        print(f"{GPUS[capability].name}: {shared} of {limit} bytes of shared memory in {name}")
        assert shared <= limit, "the kernel cannot be launched: FlexAttention needs smaller tiles"


# -------- FP8 products
def tensors_of(source: str) -> dict[str, tuple]:
    """(size, stride) of each tensor in a generated program that has a name there."""
    found = {}
    for line in source.splitlines():
        line = line.strip()
        numbers = r"(\(.*?\)), (\(.*?\))"
        if made := re.match(rf"(\w+) = empty_strided_cuda\({numbers}, ", line):
            found[made[1]] = ast.literal_eval(made[2]), ast.literal_eval(made[3])
        elif checked := re.match(rf"assert_size_stride\((\w+), {numbers}", line):
            found[checked[1]] = ast.literal_eval(checked[2]), ast.literal_eval(checked[3])
        elif again := re.match(rf"(\w+) = reinterpret_tensor\(\w+, {numbers}, ", line):
            found[again[1]] = ast.literal_eval(again[2]), ast.literal_eval(again[3])
        elif renamed := re.match(r"(\w+) = (\w+); +del", line):
            found[renamed[1]] = found[renamed[2]]
    return found


def scaled_products(source: str) -> list[list[tuple]]:
    """(size, stride) of both operands of each _scaled_mm in a generated program."""
    tensors = tensors_of(source)
    operand = r"(reinterpret_tensor\(\w+, \(.*?\), \(.*?\), \d+\)|\w+)"
    products = []
    for call in re.findall(rf"_scaled_mm(?:\.default)?\({operand}, {operand}, ", source):
        operands = []
        for text in call:
            view = re.match(r"reinterpret_tensor\(\w+, (\(.*?\)), (\(.*?\)),", text)
            if view:
                operands.append((ast.literal_eval(view[1]), ast.literal_eval(view[2])))
            else:
                operands.append(tensors[text])
        products.append(operands)
    assert len(products) == len(re.findall(r"_scaled_mm(?:\.default)?\(", source))
    return products


def check_scaled_products(source: str) -> int:
    """cuBLAS takes FP8 matrices where A is row-major, B is column-major, and every dimension is a
    multiple of 16. Returns the number of products."""
    products = scaled_products(source)
    for (a_size, a_stride), (b_size, b_stride) in products:
        (rows, inner), (inner_too, columns) = a_size, b_size
        print(f"_scaled_mm of {a_size} by {a_stride} and {b_size} by {b_stride}")
        assert inner == inner_too
        assert a_stride == (inner, 1), "A is not row-major"
        assert b_stride == (1, inner), "B is not column-major"
        assert not rows % 16 and not inner % 16 and not columns % 16, "not a multiple of 16"
    return len(products)


# -------- The program of full size
def case_full_size(capability):
    """The speedrun's own model: its FP8 products, and a budget for its memory, which is what the
    README's table of hardware rests on."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(SPEEDRUN, torch.bfloat16, flex=True)
        programs, peaks = generate(model, *micro_batch(SPEEDRUN.train_seq_len))
        parts = SPEEDRUN.train_seq_len // GPT.LOGITS_TOKENS
        assert len(programs) == 2 and sum(map(check_scaled_products, programs)) == 3 * parts
        assert "program_id(0)" in programs[1]
        assert not re.search(r"program_id\(\d\)\.to\(tl\.int64\)", "".join(programs)), (
            "a kernel indexes with 64 bits")
    forward, backward = (peak / GIB for peak in peaks)
    training = max(forward, backward)
    one_gpu, eight = (kept_bytes(SPEEDRUN, processes) / GIB for processes in (1, 8))
    print(f"training: {forward:.2f} GiB forward, {backward:.2f} GiB backward; {one_gpu:.2f} GiB "
          f"kept on one GPU, {eight:.2f} GiB on each of eight")
    assert training < 26.5
    assert one_gpu < 3.3  # 0.25 of it are rotary tables for 256K positions, of all channels
    assert eight < 2.8


def case_validation(capability):
    """At full length, in four layers: most of the memory is the head's."""
    hp = dataclasses.replace(SPEEDRUN, windows="LSSL", value_embeds="0..0", attention="xx.x")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = GPT(hp, torch.bfloat16, flex=True).eval()
        _, peaks = generate(model, *micro_batch(hp.val_seq_len))
    validation = max(peaks) / GIB
    print(f"validation: {validation:.2f} GiB")
    assert validation < 7


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend(int(sys.argv[1]))
    CachingAutotuner.precompile = lambda self, *args, **kwargs: None  # of the Triton kernels
    CachingAutotuner.prepare_for_pickle = lambda self: (None,) * 10
    for case in sys.argv[2:]:
        globals()[f"case_{case}"](int(sys.argv[1]))
