"""What a training step of a script does on a GPU, found on a machine that has none.

torch.compile is replaced: what a script has compiled is traced, and Inductor generates its program
for the GPU (fake_gpu.py has it do so). The rest of the script runs as it is, on meta
tensors, which have a shape and no values. Generated programs run on meta tensors too, so that each
kernel, matrix product and operator is noted with its bytes and products, and each collective with
what it sends, in the order in which the script launches them. predict.py turns these notes into
times.

A script is one of ours, whose `train_step` is called with its model and its optimizers, or one that
the speedrun published from December 2024 to July 2025, which runs from its first line to its last
in ten steps, on a shard of made-up documents."""

import ast
import copy
import gc
import inspect
import math
import os
import re
import sys
import tempfile
import types
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import compress
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # whose keys cannot tell a relabelled graph
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import numpy as np
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from records.fake_gpu import compile_as_cuda, gpu_program, pretend
from records.memory_plan import estimated_peaks
from torch import Tensor, nn
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from data.common import UserError, require
from records.launch import load_script
from records.predict import BLOCK, Collective, Launch, Notes, Step, Wait

META = torch.device("meta")
SAMPLES = 10  # steps of a run that are looked at, from its first to its last
STORED = 28 * 1024  # bytes of a row that stay near a processor between two loops over it


class Recorder:
    """Takes notes of what is launched."""

    def __init__(self):
        self.steps = []
        self.step = Step(0)
        self.stage = "optimizer"  # or forward, or backward
        self.vocabularies = set()  # lengths of tables of tokens, by which the head is known
        self.tokens = 0  # of a sequence
        self.kept = 0  # bytes, from step to step
        self.peak = 0  # bytes that a generated program needs besides
        self.validates = False  # whether a validation has come
        self.new_step_with_each_batch = False

    def begin_step(self, at: float):
        self.step = Step(at)
        self.steps.append(self.step)

    def begin_micro_batch(self, module: nn.Module, tokens: int, window: int = 0):
        if self.new_step_with_each_batch and self.validates:
            self.begin_step(len(self.steps) / (2 * SAMPLES))
        self.step.window = window if window >= BLOCK else window * BLOCK  # some count in blocks
        self.tokens = tokens
        self.vocabularies |= {len(p) for p in module.parameters()
                              if p.ndim == 2 and len(p) > 8 * p.size(1)}
        if not self.kept and len(self.steps) > 2:
            self.kept = kept_now()

    def add(self, name, tensors, bytes=None, product=(), **more):
        if bytes is None:
            bytes = sum(map(nbytes, tensors))
        part = self.part_of(name, tensors, product)
        self.step.notes.append(Launch(name, part, bytes, product, **more))

    def part_of(self, name, tensors, product):
        if self.stage == "optimizer":
            return "optimizer"
        if "flex_attention" in name:
            return "attention"
        shapes = [set(x.shape) for x in tensors]
        large = self.tokens * max(self.vocabularies, default=0) // 2
        of_head = any(shape & self.vocabularies and (x.numel() >= large or x.dtype.itemsize == 1)
                      for shape, x in zip(shapes, tensors))
        if of_head or self.vocabularies & set(product):
            return "head and loss"
        if product:
            return "products"
        if "embedding" in name or not any(x.is_floating_point() for x in tensors):
            return "embeddings and masks"
        if any(shape & self.vocabularies for shape in shapes):
            return "head and loss"
        return "norms and elementwise"

    def product(self, name, a, b, out, *summand):
        """A matrix product a @ b, perhaps with a summand."""
        m, k, n = a.size(-2), a.size(-1), b.size(-1)
        batch = out.numel() // (m * n)
        if summand and summand[0].ndim > 1 and summand[0] is not out:
            # torch copies the summand into the output first (until 2.13, PR 191706).
            self.add(f"{name}: copy of the summand", [*summand, out])
        self.add(name, [a, b, *summand, out], product=(batch, m, n, k),
                 fp8=a.dtype.itemsize == 1)

    def collective(self, sent):
        """Notes a collective and returns its handle, which is a future as well."""
        number = self.step.collectives
        step = self.step
        step.collectives += 1
        step.notes.append(Collective(sent))

        def wait():
            if step is self.step:
                step.notes.append(Wait(number))
        handle = types.SimpleNamespace(wait=wait)
        handle.get_future = lambda: handle
        return handle


recorder = Recorder()


def kept_now() -> int:
    """The bytes of all tensors that there are."""
    storages = {}
    for x in gc.get_objects():
        if type(x) in (Tensor, nn.Parameter, nn.Buffer) and x.device == META:
            storage = x.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def tensors_in(x) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def meta(size, stride, dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=META)


# ---- Generated programs --------------------------------------------------------------------------

def touched_bytes(kernel) -> int:
    """The bytes that a Triton kernel of Inductor's reads and writes: of each buffer the regions
    that its index expressions span, each once. (Inductor's own estimate counts a table of all
    positions whole, and twice what is read in two orders.)"""
    points = math.prod(int(n) for n in kernel.numels.values())
    accesses = kernel.features.buf_accesses()
    in_place = {b.inner_name for b in kernel.args.inplace_buffers.values()
                if hasattr(b, "inner_name")}
    total = 0
    for i, name in enumerate(kernel.args.python_argdefs()[1]):
        regions = {}
        for access in accesses.get(name, ()):
            if not isinstance(access, MemoryDep) or access.is_indirect():
                regions[str(access)] = points
                continue
            ends = []
            for upper in (True, False):
                at = {v: int(n) - 1 if (access.index.coeff(v) >= 0) == upper else 0
                      for v, n in zip(access.var_names, access.size)}
                ends.append(access.index.subs(at))
            regions[str(ends)] = int(access.get_numel())
        if not regions:  # of the kernel itself, such as a workspace
            continue
        size = min(int(V.graph.get_numel(name)), sum(regions.values()))
        total += size * V.graph.get_dtype(name).itemsize * (1 + (i < len(in_place)))
    return total


# Functions that a special unit computes, and how often they use it.
SPECIAL = {r"tl_math\.(?:exp|log|sin|cos)\w*|libdevice\.(?:exp|log|sin|cos|rsqrt|sqrt)\w*| / ": 1,
           r"tl\.sigmoid|libdevice\.(?:tanh|pow)|online_softmax": 2}


class Kernel:
    """Stands for a Triton kernel of a generated program. Its source tells what it costs."""

    def __init__(self, name, source):
        self.name = name
        size = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)
        self.bytes = float(size[1]) * 1e9 if size else None
        self.atomic = "tl.atomic_add" in source
        parameters, body = re.search(r"(?s)\ndef triton_\w+\((.*?)\):(.*)", source).groups()
        loops = body.split("for r0_offset in ")[1:]
        inside = "".join(loops) or body
        self.special = sum(uses * len(re.findall(name, inside)) for name, uses in SPECIAL.items())
        # A looped reduction over rows that are too long to stay near reads them in each loop.
        loads = [set(re.findall(r"tl\.load\((\w+) \+ \(.*?r0_", loop)) for loop in loops]
        self.again = [name for i, loop in enumerate(loads) for name in loop
                      if any(name in earlier for earlier in loads[:i])]
        self.names = [name.partition(":")[0].strip() for name in parameters.split(",")]

    def run(self, *args, stream=None):
        named = dict(zip(self.names, args))
        tensors = [x for x in args if isinstance(x, Tensor)]
        if "flex_attention" in self.name and "triton_tem" in self.name:
            heads = next(x for x in tensors if x.ndim == 3 and x.size(2) == recorder.tokens).size(1)
            width = next(x for x in tensors if x.ndim == 4).size(3)
            recorder.add(self.name, tensors, heads=(heads, width), attention=
                         "backward" if "backward" in self.name else "forward")
            return
        size = self.bytes
        if size is None:
            size = sum(map(nbytes, {id(x): x for x in tensors}.values()))
        if self.atomic:  # which read what they add to
            size += max(map(nbytes, tensors[-2:]))
        numels = [x for x in args if isinstance(x, int)]  # of the loops; the last is a row's length
        points = math.prod(numels)
        for x in map(named.get, self.again):
            if numels[-1] * x.element_size() > STORED:
                size += min(points, x.numel()) * x.element_size()
        recorder.add(self.name, tensors, bytes=size, special=self.special * points)


class Extern:
    """Stands for what a generated program leaves to cuBLAS."""

    def __getattr__(self, name):
        summands = int("add" in name)

        def call(*args, out=None, **_):
            recorder.product(name, *args[summands:summands + 2], out, *args[:summands])
        return call


def run_generated(source, inputs):
    """Runs a generated program on meta tensors."""
    space = {"__name__": "generated"}
    source = source.replace("async_compile = AsyncCompile()", "")
    space["async_compile"] = types.SimpleNamespace(
        triton=lambda name, text, **_: Kernel(name, text), wait=lambda _: None)
    exec(source.replace("device='cuda:0'", "device='meta'"), space)
    for name in ("assert_size_stride", "assert_alignment", "get_raw_stream"):
        space[name] = lambda *args: None
    space |= dict(copy_if_misaligned=lambda x: x, extern_kernels=Extern(), empty_strided_cuda=meta,
                  reinterpret_tensor=lambda x, size, stride, offset=0: meta(size, stride, x.dtype))
    space["call"](list(inputs))


@contextmanager
def no_modes():
    """Without the two modes below, of which OnMeta is off already within an operator."""
    on = _get_current_function_mode() is not None
    with _disable_current_modes(), _pop_mode_temporarily() if on else nullcontext():
        yield


class Program:
    """What Inductor generates for a function and arguments of certain shapes."""

    def __init__(self, function, args, kwargs):
        """If the function is a module's method, the module's tensors are read as well. On return,
        `parts` has (graph, source, example inputs) of the forward and of the backward pass."""
        self.parts = []
        self.blocks = {}  # window: see attended_blocks
        module = getattr(function, "__self__", None)

        def inner(graph, inputs, **options):
            plain = copy.deepcopy(graph)
            source = compile_as_cuda(graph, inputs, **options).source_code
            described = [describe(x) for x in inputs]
            self.parts.append((copy.deepcopy(plain), source, described))
            return make_boxed_func(plain.forward)  # on fake tensors

        # The compiler has modes of its own, and traces tensors of a CPU that are fake.
        with (no_modes(), estimated_peaks() as peaks,
              FakeTensorMode(allow_non_fake_inputs=True)):
            fakes = {id(x): fake_of(x) for x in tensors_in([args, kwargs])}
            if module is not None:
                fakes |= {id(x): fake_of(x) for x in [*module.parameters(), *module.buffers()]}
                function = function.__func__.__get__(copy.deepcopy(module, dict(fakes)))
            given = args, kwargs
            args, kwargs = tree_map(lambda x: fakes.get(id(x), x), given)
            torch._dynamo.reset()
            result = gpu_program(function, inner)(*args, **kwargs)
            if getattr(result, "requires_grad", False):
                result.backward()
            # Which tensors get a gradient, among the module's parameters and the arguments.
            inputs = [*(module.parameters() if module else ()), *tensors_in([given])]
            self.trained = [fakes[id(x)].grad is not None for x in inputs]
        self.peak = max(peaks, default=0)

    def run(self, part: int, stage: str):
        """Runs the generated program on meta tensors, which notes what it launches."""
        _, source, inputs = self.parts[part]
        outer, recorder.stage = recorder.stage, stage
        run_generated(source, [meta(*x) if isinstance(x, tuple) else x for x in inputs])
        recorder.stage = outer

    def attended_blocks(self, tokens: Tensor, window: int) -> float:
        """The number of pairs of a query block and a key block that FlexAttention visits, over all
        layers: the part of the graph that makes the masks runs on tokens with real values."""
        if window not in self.blocks:
            graph, _, inputs = self.parts[0]
            graph = copy.deepcopy(graph)
            counts = []
            for node in graph.graph.nodes:
                if "flex_attention" in str(node.target):
                    mask = node.args[4]
                    counts += [mask[2], mask[4]]  # of partial and of full key blocks
                if node.op == "output":
                    node.args = (counts,)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            values = []
            for x in inputs:
                size, dtype = (x[0], x[2]) if isinstance(x, tuple) else (None, None)
                if dtype == torch.int32 and size == ():
                    values.append(torch.tensor(window, dtype=torch.int32))
                else:
                    values.append(tokens if dtype == torch.int32 and len(size) == 1 else None)
            with no_modes():
                self.blocks[window] = float(sum(int(n.clamp(min=0).sum()) for n in graph(*values)))
        return self.blocks[window]


def describe(x):
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


def fake_of(x: Tensor) -> Tensor:
    """A fake tensor of a CPU like x. (Called within a FakeTensorMode.)"""
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    if isinstance(x, nn.Parameter):
        return nn.Parameter(fake, x.requires_grad)
    return fake.requires_grad_(x.requires_grad)


class Loss(torch.autograd.Function):
    """The programs of a loss, as autograd runs them."""

    @staticmethod
    def forward(ctx, program, *inputs):
        ctx.program = program
        ctx.inputs = [describe(x) for x in inputs]
        program.run(0, "forward")
        return torch.empty((), device=META)

    @staticmethod
    def backward(ctx, gradient):
        ctx.program.run(1, "backward")
        return None, *[meta(*x) for x in ctx.inputs]


class Compiled:
    """What torch.compile returns."""
    programs = {}  # of all functions, by their code and their arguments

    def __init__(self, function):
        self.function = function
        self.module = getattr(function, "__self__", None)

    def __deepcopy__(self, memo):
        return self

    def program(self, args, kwargs) -> Program:
        key = str((id(self.function.__code__), tree_map(describe, (args, kwargs))))
        if key not in self.programs:
            self.programs[key] = Program(self.function, args, kwargs)
        return self.programs[key]

    def __call__(self, *args, **kwargs):
        if self.module is None:
            return self.run_function(args, kwargs)
        if not torch.is_grad_enabled():
            recorder.validates = True
            return torch.zeros((), device=META)
        given = tensors_in([args, kwargs])
        scalars = [x.known for x in given if hasattr(x, "known") and not x.is_floating_point()]
        tokens = next(x for x in given if x.dtype == torch.int32 and x.ndim == 1)
        recorder.begin_micro_batch(self.module, len(tokens), *scalars)
        program = self.program(args, kwargs)
        recorder.peak = max(recorder.peak, program.peak)
        if scalars:
            recorder.step.blocks += program.attended_blocks(documents(len(tokens)), *scalars)
        inputs = [*self.module.parameters(), *given]
        return Loss.apply(program, *compress(inputs, program.trained))

    def run_function(self, args, kwargs):
        try:
            with torch.no_grad():
                program = self.program(args, kwargs)
        except torch._dynamo.exc.Unsupported:  # it is compiled in parts, and so it runs as it is
            return self.function(*args, **kwargs)
        program.run(0, recorder.stage)
        with _disable_current_modes():
            return self.function(*args, **kwargs)


real_compile = torch.compile

def compile_here(function=None, *, backend=None, **options):
    """In place of torch.compile."""
    if backend is not None:
        return real_compile(function, backend=backend, **options)
    if function is None:
        return compile_here
    if isinstance(function, nn.Module):
        function._compiled_call_impl = Compiled(function.forward)
        return function
    if getattr(function, "__func__", None) is nn.Module._call_impl:
        return Compiled(function.__self__.forward)
    return Compiled(function)


# ---- What is not compiled ------------------------------------------------------------------------

class Operators(TorchDispatchMode):
    """Notes the operators that run on meta tensors. Changes in place are only noted."""
    FREE = re.compile(r"empty|new_empty|detach|alias|_reshape_alias|lift")

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        read = tensors_in([args, kwargs])
        name = func._schema.name.partition("::")[2]
        own = OPDEFS.get(func._schema.name)
        if own:  # an operator of the script's, which the compiler has left alone
            with OnMeta(), self:  # neither is on while an operator runs
                own._init_fn(*args, **kwargs)
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        changed = tensors_in([x for x, a in zip(args, arguments)
                              if a.alias_info and a.alias_info.is_write])
        if changed and changed[0].device == META:
            overwrites = re.fullmatch(r"(_foreach_)?(zero|fill|copy)_", name)
            others = [x for x in read if all(x is not y for y in changed)]
            if name.startswith("scatter"):  # it reads and writes only where an index points
                changed = [others[-1]]
            recorder.add(name, [*others, *changed, *([] if overwrites else changed)],
                         count=math.ceil(len(changed) / 30))
            return args[0] if func._schema.returns else None
        out = func(*args, **kwargs)
        made = [x for x in tensors_in(out) if x.device == META]
        if func.is_view or self.FREE.match(name) or not made:
            return out
        if name in ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm"):
            first = int("add" in name)
            recorder.product(name, *args[first:first + 2], out, *args[:first])
        elif name in ("index", "gather", "embedding"):  # of a table it reads what it returns
            recorder.add(name, [*read[1:], *made, *made])
        else:
            recorder.add(name, [*read, *made])
        return out


class OnMeta(TorchFunctionMode):
    """Has a script for GPUs work on meta tensors: a tensor that is put on a device comes here. A
    number in a tensor is remembered in `known`, for it may be the attention window."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        kwargs.pop("pin_memory", None)
        if func is torch.device and isinstance(args[0], int):
            return META
        if func is Tensor.cuda:
            out = args[0].to(META)
        elif func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            out = func(args[0], META, *args[2:], **kwargs)
        elif func in (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__format__,
                      Tensor.__bool__) and args[0].device == META:
            return "0" if func is Tensor.__format__ else 0
        else:
            out = func(*args, **kwargs)
        if func is torch.full and out.ndim == 0:
            out.known = args[1]
        elif func is torch.tensor and out.ndim == 0:
            out.known = args[0]
        elif func is Tensor.copy_ and not isinstance(args[1], Tensor):
            out.known = args[1]
        elif func in (Tensor.cuda, Tensor.to) and hasattr(args[0], "known"):
            out.known = args[0].known
        return out


def replace_collectives(processes: int):
    """torch.distributed, as one of so many processes sees it."""
    others = (processes - 1) / processes

    def noted(factor, whole):
        def collective(*tensors, async_op=False, **_):
            parts = tensors_in(tensors[whole])
            if len(parts) > 1 and factor == 1:  # NCCL takes them in one piece, to be copied there
                recorder.add("copies for a collective", [*parts, *parts])
            handle = recorder.collective(factor * others * sum(map(nbytes, parts)))
            return handle if async_op else handle.wait()
        return collective

    for name, factor, whole in (
            ("all_reduce", 2, 0), ("all_reduce_coalesced", 2, 0), ("reduce_scatter_single", 1, 1),
            ("reduce_scatter_tensor", 1, 1), ("reduce_scatter", 1, 1), ("all_gather", 1, 0),
            ("all_gather_single", 1, 0), ("all_gather_into_tensor", 1, 0),
            ("all_to_all_single", 1, 1)):
        setattr(dist, name, noted(factor, whole))
    for name in ("init_process_group", "barrier", "broadcast", "destroy_process_group"):
        setattr(dist, name, lambda *args, **kwargs: None)
    dist.get_rank = lambda *args: 0
    dist.get_world_size = lambda *args: processes
    torch.futures.collect_all = lambda handles: types.SimpleNamespace(
        wait=lambda: [handle.wait() for handle in handles])


class DistributedDataParallel(nn.Module):
    """Sums each gradient once autograd has it."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))

    def forward(self, *args):
        return self.module(*args)


def replace_machine(processes: int, capability: int):
    """The GPU, the other processes and the compiler. It cannot be undone."""
    pretend(capability)
    replace_collectives(processes)
    for name in ("synchronize", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *args: 0)
    torch.compile = compile_here
    nn.parallel.DistributedDataParallel = DistributedDataParallel
    sys.modules["torch.optim.optimizer"]._get_fused_kernels_supported_devices = lambda: ["meta"]
    torch._inductor.config.profile_bandwidth = True  # kernels then say what they read and write
    TritonKernel.estimate_kernel_num_bytes = touched_bytes
    CachingAutotuner.precompile = lambda self, *args, **kwargs: None
    CachingAutotuner.prepare_for_pickle = lambda self: (None,) * 10


# ---- Scripts -------------------------------------------------------------------------------------

EOT = 50256  # GPT-2's end-of-text token
MEAN_DOCUMENT = 690  # tokens: FineWeb's sample of 10B tokens has 14.9M documents
SPREAD = 1.1  # standard deviation of the logarithm of a document's length: assumed

def documents(tokens: int) -> Tensor:
    """Made-up tokens [T], in which documents begin as often as in FineWeb."""
    drawn = np.random.default_rng(0).lognormal(math.log(MEAN_DOCUMENT) - SPREAD**2 / 2, SPREAD,
                                               tokens // 100 + 10)
    begins = np.cumsum(drawn.astype(int) + 2)
    found = torch.zeros(tokens, dtype=torch.int32)
    found[begins[begins < tokens]] = EOT
    return found


def write_shard(path: Path, tokens: int):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, tokens
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + documents(tokens).numpy().astype(np.uint16).tobytes())


def run_published(path: Path):
    """Runs a published script from its first line to its last."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(num_iterations\s*(?:: *int *)?=\s*)\d+", rf"\g<1>{2 * SAMPLES}", text)
    text = re.sub(r"""(["'])cuda\1""", "'cpu'", text)  # where the compiler traces; else OnMeta's
    text = re.sub(r"""(["'])nvidia-smi\1""", "'true'", text)  # a program that prints nothing
    text = re.sub(r"(\w+)\.new_tensor\(([^,()]+), dtype=([\w.]+)\)",
                  r"torch.full((), \2, dtype=\3, device=\1.device)", text)  # for fake tensors
    for side in ("train", "val"):
        for i in range(2):
            write_shard(Path(f"data/fineweb10B/fineweb_{side}_{i:06}.bin"), 2**24)
    Path("logs").mkdir()
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="8")
    sys.argv = [str(path)]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    recorder.new_step_with_each_batch = True
    exec(compile(text, path, "exec"), vars(module))
    recorder.steps = recorder.steps[1::2]  # at the middle of equal parts of the run


def run_ours(path: Path, processes: int, flags: list[str]):
    """Calls train_step of a copy of train_gpt.py, in steps from all parts of its run."""
    script = load_script(str(path))
    try:
        hp, _ = script.parse_flags(["--preset=speedrun", *flags])
        script.check_settings(hp, processes)
    except script.UserError as error:
        raise UserError(error) from None
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    hp = replace(hp, dtype="bfloat16", use_fp8=hp.use_fp8 and has_fp8)
    world = script.World(0, processes, torch.device("cuda"))
    tokens = script.tokens_seen(hp.num_iterations + 3, hp)
    write_shard(Path("train.bin"), BLOCK)
    os.truncate("train.bin", 1024 + 2 * tokens)
    with open("train.bin", "r+b") as file:
        file.seek(8)
        file.write(np.int32(tokens).tobytes())
    shards = script.find_shards("train.bin")
    with META:
        model = script.GPT(hp, torch.bfloat16, flex=True)
    compile_as_main_does(script, model)
    optimizers = script.build_optimizers(model, hp, world)
    for i in range(SAMPLES):
        at = (i + 0.5) / SAMPLES
        step = int(at * hp.num_iterations)
        batches = script.train_batches(shards, hp, world, step)
        recorder.begin_step(at)
        script.train_step(model, next(batches), optimizers, step, hp, world)


def compile_as_main_does(script, model: nn.Module):
    """Runs the block of the script's `main` that begins with `if compiles:`."""
    for node in ast.walk(ast.parse(inspect.getsource(script.main))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "compiles":
            exec(ast.unparse(node.body), {"torch": torch, "model": model})
            return
    raise UserError(f"{script.__file__}: its main has no block `if compiles:`, which compiles the "
                    "model in train_gpt.py; keep it")


def notes_of(path: str, processes: int, capability: int, flags: list[str]) -> Notes:
    """The notes of a script's steps on so many GPUs. For a process of its own."""
    torch.set_num_threads(1)
    replace_machine(processes, capability)
    path = Path(path).resolve()
    ours = "\ndef train_step(" in path.read_text(encoding="utf-8")
    require(ours or processes == 8 and not flags, f"{path.name}: a published script runs on 8 GPUs "
            "and takes no flags")
    with (tempfile.TemporaryDirectory() as folder, OnMeta(), Operators(),
          open(os.devnull, "w") as nowhere, redirect_stdout(nowhere)):
        os.chdir(folder)
        try:
            if ours:
                run_ours(path, processes, flags)
            else:
                run_published(path)
        except ModuleNotFoundError as error:
            raise UserError(f"{path.name}: {error}; install it to predict this script") from None
    require(recorder.steps, f"{path.name}: trains no step with a compiled model")
    return Notes(recorder.steps, recorder.kept + recorder.peak)
