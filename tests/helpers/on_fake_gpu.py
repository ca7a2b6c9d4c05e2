"""Runs a program, or with -m a module, as on an H100, on a machine without a GPU:

    PYTHONPATH=.:tests python tests/helpers/on_fake_gpu.py PROGRAM.py [arguments]

Tensors that it puts on the GPU stay on the CPU. What it compiles, Inductor generates for the GPU;
but where kernels would be launched, the graph itself runs on the CPU. Events are the host's clock,
memory is made up, a kernel takes a millisecond. This changes torch and triton for the process."""

import copy
import os
import re
import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # whose keys cannot tell a relabelled graph
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import torch
from functorch.compile import make_boxed_func
from helpers.fake_gpu import compile_as_cuda, gpu_program, pretend, sources
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

launched = []  # names of kernels, since a profiler was started
chosen = [0]  # the GPU of this process, and then those that it has set

def generate_and_run_plain(graph, inputs, **options):
    with unset_fake_temporarily():
        plain = copy.deepcopy(graph)
    described = [(node.format_node(), str(node.meta.get("val"))) for module in graph.modules()
                 if isinstance(module, torch.fx.GraphModule) for node in module.graph.nodes]
    compiled = Path(cache_dir(), sha256(repr(described).encode()).hexdigest())
    if not compiled.exists():
        compile_as_cuda(graph, inputs, **options)
        compiled.parent.mkdir(exist_ok=True)
        compiled.write_text("\n".join(re.findall(r"\b(triton_\w+)\.run\(", sources[-1])))
    kernels = compiled.read_text().split()
    assert kernels, "a program without kernels"
    def program(*args):
        launched.extend(kernels)
        return plain.forward(*args)
    return make_boxed_func(program)

plain_compile = torch.compile

def compile_here(function=None, *, backend=None, **options):
    if backend is not None:
        return plain_compile(function, backend=backend, **options)
    if function is None:
        return compile_here
    if isinstance(function, torch.nn.Module):
        function.forward = compile_here(function.forward, **options)
        return function
    program = gpu_program(function, generate_and_run_plain, check_cacheable)
    def without_redirection(*args, **kwargs):
        outside = _get_current_function_mode()  # of other programs; the compiler would trace it
        with _pop_mode_temporarily() if outside else nullcontext():
            return program(*args, **kwargs)
    return without_redirection

class OnTheCpu(TorchFunctionMode):
    """Keeps on the CPU what a program puts on a CUDA device."""
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to:
            args = ["cpu" if isinstance(x, (str, torch.device)) and str(x).startswith("cuda")
                    else x for x in args]
        if "all_gather" in getattr(function, "__name__", ""):  # Gloo is stricter than NCCL
            args = [x.flatten() if isinstance(x, torch.Tensor) else x for x in args]
        return function(*args, **kwargs)

class Event:
    def __init__(self, enable_timing=False):
        self.timed = enable_timing
    def record(self, stream=None):
        self.at = time.perf_counter()
        return self
    def synchronize(self):
        pass
    def elapsed_time(self, other) -> float:
        assert self.timed and other.timed, "an event without timing"
        return 1000 * (other.at - self.at)

class Profile:
    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
    def start(self):
        launched.clear()
    def stop(self):
        took = SimpleNamespace(elapsed_us=lambda: 1000.0)
        others = ["Memcpy HtoD (Pinned -> Device)", "Context Sync", "Stream Wait Event", "a mark"]
        self.seen = [SimpleNamespace(name=name, is_user_annotation=name == "a mark",
                                     time_range=took, device_type=torch.autograd.DeviceType.CUDA)
                     for name in launched + others]
    def events(self):
        return self.seen

def backward(loss, plain=torch.Tensor.backward):
    """In another thread, as on a GPU. A recompile there would be an error that nobody sees."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(plain, loss).result()

def connect(backend, plain=torch.distributed.init_process_group, **options):
    """NCCL takes the GPU that a process has chosen, and fails where two have chosen the same."""
    assert backend == "nccl" and str(chosen[-1])[-1] == os.environ["RANK"], chosen
    plain("gloo")

def pretend_to_run():
    pretend(90)
    CachingAutotuner.precompile = lambda self, *args, **kwargs: None  # of the Triton kernels
    CachingAutotuner.prepare_for_pickle = lambda self: (None,) * 10
    stream = SimpleNamespace(record_event=lambda event=None: (event or Event()).record())
    answers = dict(Event=Event, current_stream=lambda device=None: stream,
                   synchronize=lambda device=None: None, is_bf16_supported=lambda **options: True,
                   get_device_name=lambda device=None: "NVIDIA H100 80GB HBM3",
                   max_memory_allocated=lambda device=None: 3 * 2**30,
                   max_memory_reserved=lambda device=None: 4 * 2**30,
                   reset_peak_memory_stats=lambda device=None: None,
                   mem_get_info=lambda device=None: (80 * 2**30, 85 * 2**30))
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.set_device = chosen.append
    torch.distributed.init_process_group = connect
    torch.compile = compile_here
    torch.Tensor.backward = backward
    torch.profiler.profile = Profile

if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend_to_run()
    start = runpy.run_module if sys.argv[1] == "-m" else runpy.run_path
    sys.argv = sys.argv[2 if sys.argv[1] == "-m" else 1:]
    with OnTheCpu():
        start(sys.argv[0], run_name="__main__")
