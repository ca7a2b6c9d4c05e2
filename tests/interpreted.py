"""The GPU program without a GPU: what torch.compile makes of a function for an H100, run on a CPU.

Faked: the process is told that it has an H100, and Inductor reads its properties. A function of CPU
tensors is traced, and its graph relabelled as one of CUDA tensors right before Inductor, which then
generates its code for compute capability 9.0. The generated code runs unchanged, on CPU tensors:
its Triton kernels in Triton's interpreter, one program after another in NumPy; what it leaves to
libraries, such as matrix products, by PyTorch's CPU kernels for the same operators.

Proven, where the result equals the script's plain path: the program that Inductor has derived (its
graph, fusions, FlexAttention's templates and their gradients, index arithmetic, masks, order and
reuse of buffers, which begin as NaN) computes what the script means.

Not proven: what lies below Triton's language, that is PTX, layouts for the tensor cores, races
between programs, limits of shared memory, CUDA's libraries, speed. Nor other shapes: at full size
Inductor may divide the work of a kernel differently. FlexAttention's tiles are those of full size.

Importing this changes torch and triton for the whole process: give it a process of its own."""

import ctypes
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import TRITON_MAX_BLOCK
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from torch._subclasses import FakeTensor
from torch.fx.node import map_aggregate
from torch.nn.attention import flex_attention as flex_module
from torch.utils._pytree import tree_map
from triton.runtime import interpreter

# The first is read when kernels are defined; the cache's keys would not tell a relabelled graph.
for variable in ("TRITON_INTERPRET", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
    assert os.environ.get(variable) == "1", f"start the process with {variable}=1"

CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_block=1024, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20, total_memory=85 * 10**9, is_integrated=0, gcnArchName="")

launches = Counter()  # {name of a kernel: how often it was run}
graphs = []  # what Inductor has compiled: forward and backward are one each
sources = []  # the code that it has generated for them


# -------- The device that is not there
def poisoned(size, stride, dtype):
    """New memory that shows where it is read before it is written."""
    memory = torch.empty_strided(size, stride, dtype=dtype)
    return memory.fill_(float("nan") if dtype.is_floating_point else 77)


def pretend_h100():
    answers = dict(
        # What Inductor asks to choose kernels
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_properties=lambda device=None: H100,
        get_device_capability=lambda device=None: (9, 0),
        # Inductor and its generated code enter the device
        set_device=lambda device: None,
        _exchange_device=lambda device: 0,
        _maybe_exchange_device=lambda device: 0,
        # Dynamo restores the device's random state after tracing
        get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda state, device=None: None,
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if name in vars(CudaInterface):  # which has copies
            setattr(CudaInterface, name, staticmethod(answer))
    torch.version.cuda = "13.0"
    # Generated code gets its stream and its memory here.
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = poisoned
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    triton_helpers.set_driver_to_gpu = lambda: None  # which would look for libcuda.so

    # Even operators on fake CUDA tensors ask for a device guard, which a CPU build does not have.
    # That of meta tensors does nothing.
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    kinds = torch._C._autograd.DeviceType
    guards = (ctypes.c_void_p * (kinds.Meta.value + 1)).in_dll(
        libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[kinds.CUDA.value] = guards[kinds.Meta.value]


# -------- From the graph of CPU tensors to Inductor's program for CUDA tensors
def moved(x):
    """x, on the H100 if it is a CPU's device or a fake tensor."""
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


def backend(graph, inputs):
    for node in graph.graph.nodes:
        if node.target in (torch.rms_norm, torch.nn.functional.rms_norm):
            node.target = fused_rms_norm  # as on CUDA; on a CPU it is taken apart while tracing
    graph.recompile()
    return compile_fx(graph, inputs, inner_compile=compile_as_cuda)


def gpu_program(function):
    """function, compiled with the script's options for an H100, to be called with CPU tensors."""
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)


def flex_attention_as_on_cuda():
    flex_module._validate_device = lambda *tensors: None  # which refuses gradients on a CPU
    plain_options = flex_module._apply_kernel_options

    def options(*args, **kwargs):  # on a CPU the log-sum-exp that gradients need is left out
        return plain_options(*args, **kwargs) | {"OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}

    flex_module._apply_kernel_options = options
    # Tiles depend on dtype and head. The speedrun's for all: those of float32 are far smaller.
    for name in ("get_flex_attn_fwd_configs", "get_flex_attn_bwd_configs"):
        def tiles(self, head_dim, dtype, plain=getattr(CUDAConfigHeuristic, name)):
            return plain(self, 128, torch.bfloat16)
        setattr(CUDAConfigHeuristic, name, tiles)


# -------- Triton's interpreter
# It keeps these as bit patterns, rounds them wrongly, and would add and multiply them as integers:
# casts and products are mended below, and whatever else computes with them is refused.
NARROW = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}
TensorHandle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
plain_cast = Builder.cast_impl
plain_dot = Builder.create_dot
plain_atomic = Builder.create_atomic_rmw


def cast(self, x, to, rounding=None):
    """By PyTorch's rounding where a type is narrow."""
    to = to.scalar
    if x.dtype not in NARROW and to not in NARROW:
        return plain_cast(self, x, to)
    values = torch.from_numpy(np.array(x.data))
    if x.dtype in NARROW:
        values = values.view(NARROW[x.dtype][0])
    values = values.float()
    if to in NARROW:
        dtype, bits = NARROW[to]
        return TensorHandle(values.to(dtype).view(bits).numpy(), to)
    return TensorHandle(values.numpy().astype(interpreter._get_np_dtype(to)), to)


def dot(self, a, b, *rest):
    """Products and sums in float32, as tensor cores have them of narrow types."""
    a, b = (cast(self, x, tl.float32) if x.dtype in NARROW else x for x in (a, b))
    return plain_dot(self, a, b, *rest)


def refusing(plain):
    def operation(self, *operands, **options):
        for x in operands:
            assert getattr(x, "dtype", None) not in NARROW, f"arithmetic on the bits of {x.dtype}"
        return plain(self, *operands, **options)
    return operation


def atomic(self, operation, pointers, values, mask, *rest):
    """The interpreter takes a mask that was broadcast, with a stride of 0, for a dense one."""
    assert values.dtype not in NARROW
    dense = [TensorHandle(np.ascontiguousarray(x.data), x.dtype) for x in (pointers, values, mask)]
    return plain_atomic(self, operation, *dense, *rest)


def mend_interpreter():
    Builder.cast_impl = Builder.create_fp_to_fp = cast
    Builder.create_dot = dot
    Builder.create_atomic_rmw = atomic
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(Builder, name, refusing(getattr(Builder, name)))
    for name in ("sum", "min_max"):
        setattr(interpreter.ReduceOps, name, refusing(getattr(interpreter.ReduceOps, name)))
    triton_helpers.libdevice = tl.math  # whose functions the interpreter has


def enlarge(block, sizes):
    """Let each program of a kernel do more of its independent elements: fewer, larger arrays."""
    room = 2**18  # elements of an array
    for axis, size in sorted(sizes.items()):  # r0_ (what is reduced), x, y
        name = f"{axis.upper()}BLOCK"
        whole = triton.next_power_of_2(size)
        if axis in ("x", "y") and name in block:
            most = TRITON_MAX_BLOCK[axis.upper()]  # beyond which masks are missing
            block[name] = max(block[name], min(whole, most, room))
        room = max(1, room // block.get(name, whole))


def speed_interpreter_up():
    # It would patch triton.language anew for each launch and each call of a device function.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    # Checks of integer overflow, which compiled kernels do not have either.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    plain_run = CachingAutotuner.run

    def run(self, *args, **kwargs):
        launches[self.fn.__name__] += 1
        if self.size_hints:  # a kernel that is no template
            enlarge(self.configs[0].kwargs, self.size_hints)
        return plain_run(self, *args, **kwargs)

    CachingAutotuner.run = run


pretend_h100()
flex_attention_as_on_cuda()
mend_interpreter()
speed_interpreter_up()
