"""Looks at the program that Inductor generates for a GPU, without a GPU, and runs none of it:

    PYTHONPATH=.:tests python tests/helpers/gpu_program.py CAPABILITY CASE..."""

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
from torch._inductor import ir, memory
from torch._inductor.codegen import wrapper
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves
from records.tools.exam import CHUNK
from train_gpt import GPT, PRESETS, World, attend, build_block_masks, build_optimizers

SPEEDRUN = dataclasses.replace(PRESETS["speedrun"], dtype="bfloat16")
GIB = 2**30
peaks = []  # GiB that each generated program takes at most, without the weights
scaled_products = []  # [(size, stride), (size, stride)] of the operands of each _scaled_mm

def note(self, plain=wrapper.EfficientPeakEstimate.__init__):
    """Inductor estimates the memory before it knows what stays within a kernel. It counts the
    float32 gradient of all logits, 9.2 GiB at full size, which a kernel turns into FP8 in its
    registers. Here such buffers count nothing."""
    plain(self)
    graph = wrapper.V.graph
    nodes = graph.scheduler.nodes
    for buffer in (buffer for node in nodes for buffer in node.get_outputs()):
        if buffer.get_name() in graph.removed_buffers:
            buffer.mpi_buffer.size_alloc = buffer.mpi_buffer.size_free = 0
    inputs = memory.get_freeable_input_buf(nodes, OrderedSet(graph.graph_inputs))
    outputs = OrderedSet(graph.get_output_names())
    peaks.append(memory.estimate_peak_memory(nodes, inputs, outputs)[0] / GIB)
    for kernel in graph.operations:
        if isinstance(kernel, ir.ExternKernel) and "_scaled_mm" in str(kernel.op_overload):
            scaled_products.append([(tuple(map(int, x.get_size())), tuple(map(int, x.get_stride())))
                                    for x in kernel.inputs[:2]])

def generate(function, *args):
    def compile_only(graph, inputs, **options):
        plain = copy.deepcopy(graph)
        compile_as_cuda(graph, inputs, **options)
        return make_boxed_func(plain.forward)  # which runs on fake tensors
    result = gpu_program(function, compile_only)(*args)
    if result.requires_grad:
        result.backward()
    assert len(peaks) == len(sources), "a program without an estimate"

def micro_batch(tokens: int):
    inputs = torch.zeros(tokens, dtype=torch.int32)
    return inputs, inputs.long(), torch.full((), 1792, dtype=torch.int32)

def case_shared_memory(capability):
    """FlexAttention's kernels at the speedrun's heads, forward and backward, compiled by Triton."""
    limit = GPUS[capability].shared_memory_per_block_optin
    used = {}
    def precompile(self, *args, **kwargs):
        name = self.fn.__name__
        for config in self.configs if name.startswith("triton_tem") else ():
            kernel = self._precompile_config(config).kernel
            shared = getattr(kernel, "metadata", kernel).shared
            used[name] = max(used.get(name, 0), shared)
    CachingAutotuner.precompile = precompile
    T, H, K = 2048, SPEEDRUN.num_heads, SPEEDRUN.head_dim
    def masked_attention(q, k, v, tokens, window):
        mask, _ = build_block_masks(tokens, 9, window, flex=True)
        return attend(q, k, v, mask, 0.12).float().sum()
    with FakeTensorMode(allow_non_fake_inputs=True):
        qkv = [torch.empty(1, H, T, K, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        tokens, _, window = micro_batch(T)
        generate(masked_attention, *qkv, tokens, window)
    assert {"backward" in name for name in used} == {True, False}, used
    for name, shared in used.items():
        print(f"{GPUS[capability].name}: {shared} of {limit} bytes of shared memory in {name}")
        assert shared <= limit, "the kernel cannot be launched: FlexAttention needs smaller tiles"

def kept(processes: int) -> float:
    """GiB that one process keeps from step to step: weights, tables, optimizers, and with several
    micro-batches gradients, which with one are within what is estimated for the backward pass."""
    nowhere = torch.device("meta")
    with nowhere:
        model = GPT(SPEEDRUN, torch.bfloat16, flex=True)
    optimizers = build_optimizers(model, SPEEDRUN, World(0, processes, nowhere))
    parameters = list(model.parameters())
    held = tree_leaves([parameters, *model.buffers(), *map(vars, optimizers)])
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in held
                if isinstance(x, torch.Tensor)}
    accumulated = sum(p.nbytes for p in parameters) * (SPEEDRUN.micro_batches > processes)
    return (sum(storages.values()) + accumulated) / GIB

def most_memory(hp, tokens: int, training=True) -> float:
    """GiB that a sequence of this length takes at most, without what is kept from step to step."""
    peaks.clear()
    sources.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(training):
        generate(GPT(hp, torch.bfloat16, flex=True).train(training), *micro_batch(tokens))
    assert len(peaks) == 1 + training
    return max(peaks)

def case_full_size(capability):
    """The speedrun's own model: its FP8 products, and a budget for its memory, which is what the
    README's table of hardware rests on. cuBLAS takes FP8 matrices where A is row-major, B is
    column-major, and every dimension is a multiple of 16."""
    peak = most_memory(SPEEDRUN, SPEEDRUN.train_seq_len)
    assert len(scaled_products) == 3 * SPEEDRUN.train_seq_len // GPT.LOGITS_TOKENS
    for (a_size, a_stride), (b_size, b_stride) in scaled_products:
        assert a_stride == (a_size[1], 1) and b_stride == (1, b_size[0]) and a_size[1] == b_size[0]
        assert not any(size % 16 for size in a_size + b_size)
    assert "program_id(0)" in sources[1]
    assert "extern_kernels.addmm(" not in sources[0], "it copies the stream first, 75 MB"
    assert not re.search(r"program_id\(\d\)\.to\(tl\.int64\)", "".join(sources)), (
        "a kernel indexes with 64 bits")
    one_gpu, eight = kept(1), kept(8)
    print(f"training: {peak:.2f} GiB; kept on one GPU {one_gpu:.2f} GiB, on each of eight "
          f"{eight:.2f} GiB")
    assert peak < 26.5
    assert one_gpu < 3.25  # 0.25 of it are rotary tables for 256K positions, of all channels
    assert eight < 2.75

def case_24_gb(capability):
    """A GPU of 24 GB trains the speedrun's model on sequences of 16,384 tokens, and validates."""
    training = most_memory(SPEEDRUN, 16384)
    validation = most_memory(SPEEDRUN, SPEEDRUN.val_seq_len, training=False)
    print(f"training on 16,384 tokens: {training:.2f} GiB; validation: {validation:.2f} GiB")
    assert training < 9 and validation < 9.7
    assert max(training, validation) + kept(1) < 13

def case_exam(capability):
    """What exam.py compiles besides the model. It compares the bits of two processes, so no kernel
    may add up in an order that is left open, or that the time of a trial decides."""
    configs = {}
    def precompile(self, *args, **kwargs):
        configs[self.fn.__name__] = len(self.configs)
    CachingAutotuner.precompile = precompile
    with (FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(),
          torch._inductor.config.patch(deterministic=True)):
        model = GPT(SPEEDRUN, torch.bfloat16, flex=True).eval()
        generate(model.features, *micro_batch(SPEEDRUN.val_seq_len)[::2])
        generate(model.logits, torch.empty(CHUNK, SPEEDRUN.model_dim, dtype=torch.bfloat16))
    print("features and logits: " + ", ".join(f"{peak:.2f} GiB" for peak in peaks))
    assert len(peaks) == 2 and max(peaks) < 9.7 and "tl.atomic" not in "".join(sources)
    sums = [count for name, count in configs.items() if re.match("triton_(red|per)", name)]
    assert set(sums) == {1} and len(sums) > 3, configs

def prepare(capability):
    torch.set_num_threads(1)
    wrapper.EfficientPeakEstimate.__init__ = note
    pretend(capability)
    CachingAutotuner.precompile = lambda self, *args, **kwargs: None  # of the Triton kernels
    CachingAutotuner.prepare_for_pickle = lambda self: (None,) * 10

if __name__ == "__main__":
    prepare(int(sys.argv[1]))
    for case in sys.argv[2:]:
        globals()[f"case_{case}"](int(sys.argv[1]))
