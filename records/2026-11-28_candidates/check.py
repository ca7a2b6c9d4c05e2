"""Checks the loss kernel of loss_kernel.patch without a GPU:

    python records/2026-11-28_candidates/check.py equal     # to today's head and loss, on a CPU
    python records/2026-11-28_candidates/check.py compiled  # the whole model, as for an H100
    python records/2026-11-28_candidates/check.py counts    # instructions, registers and spills

`equal` runs the kernels in Triton's interpreter. `counts` compiles them for sm_90a, and runs what
comes with Triton: ptxas and nvdisasm. Needs torch 2.13 for a CPU and triton 3.7.1."""

import copy
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
os.environ["TRITON_INTERPRET"] = "1" if "equal" in sys.argv else "0"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import torch
import torch.nn.functional as F

from records.tools.load import load_script

def patched(folder):
    """The script with the patch."""
    path = Path(folder, "loss_kernel.py")
    subprocess.run(["patch", "--quiet", "--fuzz=3", f"--output={path}", ROOT / "train_gpt.py",
                    HERE / "loss_kernel.patch"], check=True)
    return load_script(path, "loss_kernel")

def error(got, want) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())

def equal(script):
    """Loss and gradients of a small head: today's, the kernel's, and exact ones in float64. Some
    targets are -1, and the sizes are no multiples of the tiles."""
    from helpers import interpreted  # which changes Triton's interpreter
    assert interpreted.launches is not None
    torch.manual_seed(0)
    T, D, V, cap, tokens = 208, 64, 336, 15.0, 208 * 8
    x = F.rms_norm(torch.randn(T, D), (D,)).bfloat16().requires_grad_()
    w = (torch.randn(V, D) * 0.2).requires_grad_()
    target = torch.randint(V, (T,))
    target[::50] = -1

    def capped(z):
        return 2 * cap * torch.sigmoid(z * (2 / cap))

    z = script.FP8Linear.apply(x, w, script.TOKEN_GRADIENT_SCALE * tokens)
    plain = script.CrossEntropy.apply(capped(z.float()), target)
    z_exact = F.linear(x.double(), w.double())
    exact = F.cross_entropy(capped(z_exact), target, ignore_index=-1, reduction="sum")
    kernel = script.FP8HeadLoss.apply(x, w, target, cap)
    (x_plain, w_plain), (x_exact, w_exact), (x_kernel, w_kernel) = (
        torch.autograd.grad(loss / tokens, (x, w)) for loss in (plain, exact, kernel))
    print(f"loss: today {plain:.6f}, kernel {kernel:.6f}, without FP8 {exact:.6f}")
    assert abs(float((kernel - plain).detach())) < 1e-6 * float(plain.detach())
    for name, got, old, want in (("x", x_kernel, x_plain, x_exact),
                                 ("w", w_kernel, w_plain, w_exact)):
        print(f"gradient of {name}: kernel from today's {error(got, old):.5f}; from the exact one "
              f"{error(got, want):.5f}, today's {error(old, want):.5f}")
        assert error(got, old) < 0.02 and error(got, want) < 1.02 * error(old, want)

def compiled(script):
    """The model compiles in one graph, forward and backward, with the kernels in it."""
    from functorch.compile import make_boxed_func
    from helpers import fake_gpu
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses.fake_tensor import FakeTensorMode
    fake_gpu.pretend(90)
    CachingAutotuner.precompile = lambda self, *args, **kwargs: None
    CachingAutotuner.prepare_for_pickle = lambda self: (None,) * 10

    def compile_only(graph, inputs, **options):
        plain = copy.deepcopy(graph)
        fake_gpu.compile_as_cuda(graph, inputs, **options)
        return make_boxed_func(plain.forward)

    hp = dataclasses.replace(script.PRESETS["speedrun"], dtype="bfloat16", windows="SL",
                             attention="x.", value_embeds="..", train_seq_len=1024)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = script.GPT(hp, torch.bfloat16, flex=True)
        tokens = torch.zeros(1024, dtype=torch.int32)
        window = torch.full((), 128, dtype=torch.int32)
        fake_gpu.gpu_program(model, compile_only)(tokens, tokens.long(), window).backward()
    for name, source in zip(("loss_of_row", "transpose_bytes"), fake_gpu.sources, strict=True):
        assert f"{name}_0.run(" in source, name
        print(f"{name} is in the generated program")

def count(kernel, types, constants, block, warps):
    """Compiles a kernel for sm_90a, and counts the instructions an element in its loops."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    names = kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
    source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in names},
                       {(names.index(name),): value for name, value in constants.items()}, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                         options=dict(num_warps=warps)).asm["ptx"]
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "k.ptx").write_text(ptx)
        said = subprocess.run([tools / "ptxas", "-v", "-arch=sm_90a", "k.ptx", "-o", "k.cubin"],
                              cwd=folder, capture_output=True, text=True, check=True).stderr
        code = subprocess.run([tools / "nvdisasm", "-c", "k.cubin"], cwd=folder,
                              capture_output=True, text=True, check=True).stdout
    labels, loops, instructions = {}, [], []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", line):
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if back and labels.get(back[1], len(instructions)) < len(instructions):
                loops.append((labels[back[1]], len(instructions)))
            instructions.append(found[1])
    registers = re.search(r"Used (\d+) registers", said)[1]
    spilled = re.search(r"(\d+) bytes spill", said)[1]
    share = block / (32 * warps)  # elements of a thread
    print(f"{kernel.__name__}, {constants}, {warps} warps: {registers} registers, {spilled} bytes "
          "spilled")
    for begin, end in loops or [(0, len(instructions))]:
        kinds = Counter(instructions[begin:end])
        print(f"    {(end - begin) / share:.1f} instructions an element, of them "
              f"{kinds['MUFU'] / share:.1f} of the special functions")

def counts(script):
    sizes = dict(V=50304)
    types = dict(z_ptr="*bf16", target_ptr="*i64", loss_ptr="*fp32", g8_ptr="*fp8e5", cap="fp32",
                 scale="fp32")
    for N, warps in ((4096, 8), (2048, 8), (8192, 16)):
        count(script.loss_of_row, types, sizes | dict(N=N), N, warps)
    for N, warps in ((64, 4), (128, 8)):
        count(script.transpose_bytes, dict(x_ptr="*u8", y_ptr="*u8"),
              sizes | dict(T=24576, N=N), N * N, warps)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        globals()[sys.argv[1]](patched(folder))
