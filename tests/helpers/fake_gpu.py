"""What torch.compile makes of a function for a GPU, on a machine without one.

The process is told that it has a GPU, and Inductor reads its properties. A function of CPU tensors
is traced, and its graph is relabelled as one of CUDA tensors right before Inductor. Those who use
this decide whether the code runs: interpreted.py has Triton's interpreter do that, gpu_program.py
looks at it. `pretend` changes torch and triton for the whole process: give it one of its own."""

import ctypes
import functools
import os
from pathlib import Path
from types import SimpleNamespace
import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.runtime import triton_helpers
from torch._subclasses import FakeTensor
from torch.fx.node import map_aggregate
from torch.nn.attention import flex_attention as flex_module
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)

def properties(name, capability, processors, shared_memory, threads, cache, memory):
    """What torch.cuda.get_device_properties says, with shared_memory in bytes per multiprocessor,
    of which a program can have all but 1 KiB; cache in MiB; memory in GB."""
    return SimpleNamespace(
        name=name, major=capability // 10, minor=capability % 10, warp_size=32,
        multi_processor_count=processors, max_threads_per_block=1024,
        max_threads_per_multi_processor=threads, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=shared_memory - 1024,
        shared_memory_per_multiprocessor=shared_memory, L2_cache_size=cache * 2**20,
        total_memory=memory * 10**9, is_integrated=0, gcnArchName="")

GPUS = {  # by compute capability
    80: properties("NVIDIA A100-SXM4-80GB", 80, 108, 167936, 2048, 40, 85),
    89: properties("NVIDIA GeForce RTX 4090", 89, 128, 102400, 1536, 72, 25),
    90: properties("NVIDIA H100 80GB HBM3", 90, 132, 233472, 2048, 50, 85),
    100: properties("NVIDIA B200", 100, 148, 233472, 2048, 126, 192),
    120: properties("NVIDIA GeForce RTX 5090", 120, 170, 102400, 1536, 96, 34)}
graphs = []  # what Inductor has compiled: forward and backward pass are one each
sources = []  # the code that it has generated for them

def pretend(capability: int):
    gpu = GPUS[capability]
    answers = dict(
        # Inductor asks these to choose kernels.
        is_available=lambda: True,
        device_count=lambda: int(os.environ.get("FAKE_GPUS", 1)), current_device=lambda: 0,
        get_device_properties=lambda device=None: gpu,
        get_device_capability=lambda device=None: (gpu.major, gpu.minor),
        # Inductor and its generated code enter the device.
        set_device=lambda device: None, _exchange_device=lambda device: 0,
        _maybe_exchange_device=lambda device: 0,
        # Dynamo restores the random state of the device after tracing.
        get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda state, device=None: None)
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if name in vars(CudaInterface):  # which has copies
            setattr(CudaInterface, name, staticmethod(answer))
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    triton_helpers.set_driver_to_gpu = lambda: None  # which would look for libcuda.so
    # Operators on fake CUDA tensors ask for a device guard, which a CPU build does not have. The
    # guard of meta tensors does nothing.
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    kinds = torch._C._autograd.DeviceType
    guards = (ctypes.c_void_p * (kinds.Meta.value + 1)).in_dll(
        libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[kinds.CUDA.value] = guards[kinds.Meta.value]
    flex_module._validate_device = lambda *tensors: None  # which refuses gradients of CPU tensors
    plain_options = flex_module._apply_kernel_options
    def options(*args, **kwargs):  # on a CPU the log-sum-exp that gradients need is left out
        return plain_options(*args, **kwargs) | {"OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}
    flex_module._apply_kernel_options = options

def moved(x):
    if isinstance(x, torch.device) and x.type == "cpu":
        return CUDA
    if not isinstance(x, FakeTensor):
        return x
    with x.fake_mode:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA)

def compile_as_cuda(graph, inputs, **options):
    """Inductor, on the graph with CUDA in place of the CPU wherever a node names its device."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), moved)
                node.meta = {name: tree_map(moved, value) if name in ("val", "example_value")
                             else value for name, value in node.meta.items()}
            module.recompile()
    compiled = compile_fx_inner(graph, [moved(x) for x in inputs], **options)
    graphs.append(graph)
    sources.append(compiled.source_code)
    return compiled

def fused_rms_norm(x, shape, weight=None, eps=None):
    return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]

@functools.cache  # since Dynamo takes another function for another backend, and compiles anew
def backend_of(compile_inner, check):
    def backend(graph, inputs):
        check(graph)
        for node in graph.graph.nodes:
            if node.target in (torch.rms_norm, torch.nn.functional.rms_norm):
                node.target = fused_rms_norm  # as on CUDA; on a CPU tracing would take it apart
        graph.recompile()
        return compile_fx(graph, inputs, inner_compile=compile_inner)
    return backend

def gpu_program(function, compile_inner=compile_as_cuda, check=id):
    """For CPU tensors, compiled for the GPU with the script's options, unless check() raises."""
    backend = backend_of(compile_inner, check)
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
