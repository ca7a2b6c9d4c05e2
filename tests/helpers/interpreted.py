"""The GPU program without a GPU: what torch.compile makes of a function for an H100, run on a CPU.

fake_gpu.py has Inductor generate the program. It runs unchanged, on CPU tensors: its Triton kernels
in Triton's interpreter, one program after another in NumPy; what it leaves to libraries, such as
matrix products, by PyTorch's CPU kernels for the same operators.

Where the result equals that of the script's plain path, Inductor's program computes what the script
means: graph, fusions, FlexAttention's templates and their gradients, index arithmetic, masks, order
and reuse of buffers, which begin as NaN. Nothing is proved about what lies below Triton's language
(PTX, tensor cores, races, shared memory, CUDA's libraries, speed) or about other shapes.

Importing this changes torch and triton for the whole process: give it a process of its own."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import torch
import triton
import triton.language as tl
from helpers.fake_gpu import gpu_program, graphs, pretend, sources
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import TRITON_MAX_BLOCK
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from triton.runtime import interpreter

__all__ = ["gpu_program", "graphs", "launches", "sources"]

# The first is read when kernels are defined; the cache's keys would not tell a relabelled graph.
for variable in ("TRITON_INTERPRET", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
    assert os.environ.get(variable) == "1", f"start the process with {variable}=1"

launches = Counter()  # {name of a kernel: how often it was run}
backwards = False  # whether a kernel's last program runs first; on a GPU their order is open

def poisoned(size, stride, dtype):
    """New memory, which shows where it is read before it is written."""
    memory = torch.empty_strided(size, stride, dtype=dtype)
    return memory.fill_(float("nan") if dtype.is_floating_point else 77)

# The interpreter keeps these types as bit patterns, rounds them wrongly, and would add and multiply
# them as integers. Casts and products are mended below.
NARROW = {tl.bfloat16: (torch.bfloat16, torch.uint16),
          tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
          tl.float8e5: (torch.float8_e5m2, torch.uint8)}
TensorHandle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
plain_cast = Builder.cast_impl
plain_dot = Builder.create_dot
plain_atomic = Builder.create_atomic_rmw
plain_reduction = interpreter.ReduceOps.apply_impl
plain_scan = interpreter.ScanOps.generic_scan

def cast(self, x, to, rounding=None):
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
    """Products and sums of narrow types in float32, as tensor cores have them."""
    a, b = (cast(self, x, tl.float32) if x.dtype in NARROW else x for x in (a, b))
    return plain_dot(self, a, b, *rest)

def atomic(self, operation, pointers, values, mask, *rest):
    """The interpreter takes a mask that was broadcast, with a stride of 0, for a dense one."""
    dense = [TensorHandle(np.ascontiguousarray(x.data), x.dtype) for x in (pointers, values, mask)]
    return plain_atomic(self, operation, *dense, *rest)

def is_sum(combine_fn):
    return combine_fn.fn.__name__.startswith("_triton_helper_fn_add")

def reduction(self, values):
    """Inductor's own maximum, `any` and sum in NumPy, not number by number, which takes minutes."""
    if self.combine_fn in (triton_helpers.maximum, triton_helpers._any_combine):
        return self.min_max(values[0], val_reduce_op=np.max)
    return self.sum(values[0]) if is_sum(self.combine_fn) else plain_reduction(self, values)

def scan(self, values):
    if not is_sum(self.combine_fn):
        return plain_scan(self, values)
    (data,) = (x.handle.data for x in values)
    return [self.to_tensor(np.cumsum(data, axis=self.axis, dtype=data.dtype), values[0].dtype)]

def enlarge(block, sizes):
    """Lets each program of a kernel do more of its independent elements at once."""
    room = 2**18  # elements of an array
    for axis, size in sorted(sizes.items()):  # r0_ (the dimension that is reduced), x, y
        name = f"{axis.upper()}BLOCK"
        whole = triton.next_power_of_2(size)
        if axis in ("x", "y") and name in block:
            most = TRITON_MAX_BLOCK[axis.upper()]  # beyond it masks are missing
            block[name] = max(block[name], min(whole, most, room))
        room = max(1, room // block.get(name, whole))

def run(self, *args, plain=CachingAutotuner.run, **kwargs):
    launches[self.fn.__name__] += 1
    if self.size_hints:  # which templates lack
        enlarge(self.configs[0].kwargs, self.size_hints)
    return plain(self, *args, **kwargs)

def place_of_program(*place, plain=interpreter.interpreter_builder.set_grid_idx):
    if backwards:
        sizes = interpreter.interpreter_builder.grid_dim
        place = (size - 1 - at for size, at in zip(sizes, place))
    plain(*place)

pretend(90)
torch._C._dynamo.guards._empty_strided_cuda = poisoned  # where generated code gets its memory
# FlexAttention's tiles depend on dtype and head width, and those of float32 are far smaller than
# those of the speedrun, which are used here for all.
for name in ("get_flex_attn_fwd_configs", "get_flex_attn_bwd_configs"):
    def tiles(self, head_dim, dtype, plain=getattr(CUDAConfigHeuristic, name)):
        return plain(self, 128, torch.bfloat16)

    setattr(CUDAConfigHeuristic, name, tiles)
Builder.cast_impl = Builder.create_fp_to_fp = cast
Builder.create_dot = dot
Builder.create_atomic_rmw = atomic
interpreter.ReduceOps.apply_impl = reduction
interpreter.ScanOps.generic_scan = scan
triton_helpers.libdevice = tl.math  # whose functions the interpreter has
CachingAutotuner.run = run
# The interpreter would patch triton.language anew at each launch and each call of a function. And
# compiled kernels do not check for integer overflow.
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
builder = interpreter.interpreter_builder
builder.set_grid_idx = place_of_program
builder.options = replace(builder.options, sanitize_overflow=False)
