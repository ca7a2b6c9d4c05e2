"""Compares train_gpt.py of this folder with the record's own source, on a CPU, in float64:

    OMP_NUM_THREADS=1 python records/2026-04-04_85s/equal.py record.txt

record.txt is a log of the record, which begins with its source (README.md links to it). Prints the
tables of the README. The exit status is 1 if a difference is larger than its row allows."""

import ast
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile returns what it is given
os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on a CPU
import numpy as np
import torch

HERE = Path(__file__).resolve().parent
FOLDER = Path(tempfile.mkdtemp())
sys.path[:0] = map(str, (HERE, HERE.parents[1], FOLDER))
import train_gpt
from data.common import write_shards
from train_gpt import PRESETS, World

CPU = torch.device("cpu")

# ---- The record ---------------------------------------------------------------------------------

# All that is changed in the record's source, so that it runs on a CPU and in float64.
CHANGES = [
    (r"torch\.(bfloat16|float32|float8_\w+)", "torch.float64"),
    (r"\.(bfloat16|float)\(\)", ".double()"),
    (r"tl\.(bfloat16|float32)", "tl.float64"),
    (r", accumulator\)", ", accumulator, out_dtype=tl.float64)"),
    (r"f\"cuda:\{.*\}\"", '"cpu"'),
    (r'device="cuda"', 'device="cpu"'),
    (r"pin_memory=True", "pin_memory=False"),
    (r"(?s)assert torch\.cuda\.is_available.*?dist\.barrier\(\)", 'device = torch.device("cpu")'),
    (r"(CE_KERNEL_BLOCK_SIZE) = 256", r"\1 = 64"),
    (r"(CE_KERNEL_VOCAB_SIZE) = 50304", r"\1 = 640"),
    # Compiled, this is a shift by one token. As it stands, it would copy what it has just written.
    (r"(= k\[:, :-1, .*\])", r"\1.clone()"),
    # Of eight arguments this returns seven gradients, which only torch.compile accepts.
    (r"return grad_x, None, None, grad_w,", r"\g<0> None,"),
    # A float64 matrix is not split into bfloat16 and a rest. compare_mantissa looks at that.
    (r"\.view\(torch\.uint16\)", ""),
    (r"p_precise_raw\.view\(.*\)", "p"),
    (r"\n +(assert p\.dtype ==|p_precise_raw =|p\.copy_\(\(p_p|mantissa\.copy_).*", "")]

# And in its CUDA kernel of the loss, so that it is C++.
CUDA_CHANGES = [
    (r"#include .*|__device__|__global__|__(align|launch_bounds)__\(.*\)", ""),
    (r"__(bfloat162float|float2bfloat16)\b", ""),
    (r"\b(float|__nv_bfloat16)\b|(?<=__nv_fp8_e5m2 )char\b", "double"),
    (r"(?s)uint16_t packed;.*?return result;", "return x;"),
    (r"extern __shared__ .* smem\[\];", "double *smem = shared_memory;"),
    (r"__shared__", "static"),
    (r"__forceinline__", "inline"),
    (r"\b(__)?(exp|log|tanh)f(?=\()", r"std::\2"),
    (r"\bf?maxf?(?=\()", "std::fmax"),
    (r"CUDART_INF_F", "INFINITY")]

def changed(text: str, changes: list) -> str:
    for old, new in changes:
        text, times = re.subn(old, new, text)
        assert times, f"the record has no {old}"
    return text

def compile_kernel(source: str, name: str, **options):
    """In place of torch.cuda._compile_kernel."""
    (FOLDER / "kernel.h").write_text(changed(source, CUDA_CHANGES))
    subprocess.run(["g++", "-O2", "-w", "-shared", "-fPIC", f"-I{FOLDER}",
                    HERE / "loss_on_a_cpu.cc", "-o", FOLDER / "kernel.so"], check=True)
    launch = ctypes.CDLL(str(FOLDER / "kernel.so")).launch

    def kernel(grid, block, arguments, shared_mem):
        tensors, (rows, predict, *numbers) = arguments[:5], arguments[5:]
        launch(rows, predict, *(ctypes.c_void_p(x.data_ptr()) for x in tensors),
               *map(ctypes.c_double, numbers))
    kernel.set_shared_memory_config = lambda size: None
    return kernel

def attention(q, k, v, cu_seqlens_q, window_size, softmax_scale, **others):
    """FlashAttention is a binary. This is what its documentation says, for x [T, heads, width]."""
    position = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens_q, position, right=True)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance <= window_size[0]) & (document[:, None] == document)
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).contiguous()

def scaled_mm(a, b, scale_a, scale_b, **options):
    return a @ b * scale_a * scale_b

def linear_relu_square(a, b, aux=None):
    c = a @ b.T
    return (c, c.relu().square()) if aux is None else 2 * c * aux.relu()

# Triton's interpreter would take half an hour for these.
STAND_INS = dict(
    linear_relu_square=linear_relu_square, XXT=lambda A, out: out.copy_(A @ A.mT),
    XTX=lambda A, out: out.copy_(A.mT @ A),
    ba_plus_cAA=lambda A, alpha, beta, out: out.copy_(beta * A + alpha * A @ A.mT))

def between(text: str, first: str, last: str) -> str:
    """The text from the end of the one to the next of the other."""
    start = text.index(first) + len(first)
    return text[start:text.index(last, start)]

ONE_RANK = SimpleNamespace(get_world_size=lambda: 1, is_initialized=lambda: False)

class Record:
    """The record's functions and classes, as `module`, and the lines of its main program that train
    a step and that validate, as `train` and `validate`."""

    def __init__(self, path: str):
        source = Path(path).read_text().split("\n" + "=" * 100)[0]
        self.main, kernels = re.split("\n-{40}\n# triton_kernels.py\n-{40}\n", source)
        texts = "import os, sys, copy\n" + between(self.main, "import copy\n", "# int main"), kernels
        functions, kernels = changed("\0".join(texts), CHANGES).split("\0")
        # Triton reads its kernels in their file.
        (FOLDER / "record_2026.py").write_text(functions)
        (FOLDER / "triton_kernels.py").write_text(kernels)
        flash = SimpleNamespace(flash_attn_varlen_func=attention)
        sys.modules["kernels"] = SimpleNamespace(
            get_kernel=lambda name: SimpleNamespace(flash_attn_interface=flash))
        torch.cuda._compile_kernel = compile_kernel
        torch.cuda.get_device_properties = lambda d: SimpleNamespace(multi_processor_count=132)
        torch._scaled_mm = scaled_mm
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        import record_2026
        import triton_kernels
        self.module, self.kernels = record_2026, triton_kernels
        self.module.dist = ONE_RANK
        self.train = self.lines("# --------------- TRAINING SECTION -----------------", "# logging")
        self.validate = self.lines("ms += 1000 * (time.perf_counter() - t0)\n", "del val_loader")

    def lines(self, first: str, last: str):
        code = textwrap.dedent(between(self.main, first, last))
        return lambda: exec(code, vars(self.module))

    def manager(self, packs=(), cuts=()):
        """A TrainingManager with a small model. With packs, each stage has three steps."""
        module = self.module
        for stage, pack, cut in zip(module.TRAINING_STAGES, packs, cuts):
            stage.batch_size, stage.train_max_seq_len = 8 * pack, cut
        if packs:
            module.training_schedule = module.TrainingSchedule(module.TRAINING_STAGES, 9, 3,
                                                               cooldown_frac=0.6)
        return module.TrainingManager(module.GPT(636, 11, 6, 16, 96, max_seq_len=512))

class EightRanks:
    """The record's training loader, as its eight ranks call it one after another."""

    def __init__(self, module, *arguments):
        self.module, self.turn = module, 0
        self.loaders = [module.distributed_data_generator(*arguments) for _ in range(8)]

    def send(self, new):
        rank, self.turn = self.turn % 8, self.turn + 1
        self.module.dist = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 8,
                                           is_initialized=lambda: True)
        batch = self.loaders[rank].send(new and (*new[:2], 1))
        self.module.dist = ONE_RANK
        return batch

# ---- What is compared ---------------------------------------------------------------------------

worst = {}  # {(part, what was compared): [largest difference, the most that is allowed]}

def differ(part: str, what: str, ours, theirs, most=0.0):
    """Notes a difference, relative to the size of theirs if `most` is not 0."""
    ours, theirs = (torch.as_tensor(x).detach().double() for x in (ours, theirs))
    error = (ours - theirs).norm().item() if ours.shape == theirs.shape else torch.inf
    if most and theirs.norm():
        error /= theirs.norm().item()
    row = worst.setdefault((part, what), [0.0, most])
    if not error <= row[0]:  # also where it is not a number
        row[0] = error

def compare_kernels(record: Record):
    square, tall = torch.randn(2, 160, 160), torch.randn(3, 200, 96)
    a, b = torch.randn(300, 96), torch.randn(400, 96)
    for name, *arguments, shape in (
            ("XXT", tall.mT, (3, 96, 96)), ("XXT", a, (300, 300)), ("XTX", tall, (3, 96, 96)),
            ("XTX", a, (96, 96)), ("ba_plus_cAA", square + square.mT, 0.7, -0.3, square.shape),
            ("linear_relu_square", a, b, None),
            ("linear_relu_square", a, b, torch.randn(300, 400), None)):
        results = []
        for function in (STAND_INS[name], getattr(record.kernels, name)):
            out = [torch.empty(shape)] if shape else []
            returned = function(*arguments, *out)
            results.append(returned if isinstance(returned, tuple) else (returned,))
        for ours, theirs in zip(*results):
            differ("stand-ins for kernels", f"{name}, in Triton's interpreter", ours, theirs, 1e-12)
        vars(record.kernels)[name] = vars(record.module)[name] = STAND_INS[name]

def compare_mantissa(record: Record):
    """In float32, before main replaces Tensor.float. The record keeps the upper 16 bits of a weight
    apart from the lower ones, and computes with the upper ones only."""
    name = "_cautious_wd_and_update_inplace"
    text = textwrap.dedent(between(record.main, "dynamic=False, fullgraph=True)\n    def " + name,
                                   "    @staticmethod"))
    # CPUs cannot shift uint32. The bits are the same.
    exec("def update" + text.replace("torch.uint32", "torch.int32"), space := {"torch": torch})
    p, rest = torch.randn(200, 100).bfloat16(), torch.zeros(200, 100, dtype=torch.uint16)
    ours, lr, decay = p.float(), *torch.tensor((0.0123, 0.0321), dtype=torch.float32)
    for step in range(100):
        x = (torch.randn(200, 100) * (torch.rand(200, 100) > 0.1)).bfloat16()
        space["update"](p.view(torch.uint16), rest, x, decay, lr)
        train_gpt.apply_updates([ours], [x], lr, decay * lr)
    whole = (p.view(torch.uint16).int() << 16 | rest.int()).view(torch.float32)
    part = "a matrix after 100 updates"
    differ(part, "float32", ours, whole, 1e-6)
    differ(part, "bfloat16, rounded here and truncated there", ours.bfloat16(), p, 2**-7)

def compare_schedules(record: Record):
    part, hp, module = "schedules, steps 0 to 1490", PRESETS["speedrun"], record.module
    manager = record.manager()
    yarns = module.Yarn(128, 4), module.Yarn(128, 4, paired=True)
    manager.model = SimpleNamespace(yarn=yarns[0], yarn_paired_head=yarns[1])
    differ(part, "number of steps", hp.num_iterations, module.training_schedule.total_steps)
    differ(part, "step of the untying", train_gpt.untie_step(hp), manager.split_step)
    for step in range(1491):
        manager.advance_schedule(step)
        if step == 1490:
            manager.apply_final_ws_ext()
        else:
            differ(part, "learning rates", train_gpt.lr_factor(step, hp),
                   module.training_schedule.get_lr(step))
            differ(part, "Muon's momentum", train_gpt.muon_momentum(step, hp),
                   module.get_muon_momentum(step))
        theirs = manager.get_forward_args()
        differ(part, "windows", train_gpt.window_sizes(step, hp), (theirs.ws_short, theirs.ws_long))
        differ(part, "tokens of a step", 8 * train_gpt.pack_len(step, hp), manager.batch_size)
        differ(part, "cut of documents", train_gpt.doc_len(step, hp), theirs.train_max_seq_len)
        differ(part, "weights of the targets", train_gpt.target_weights(step, hp),
               [*theirs.mtp_weights.tolist(), 0.0, 0.0][:3])
        frequencies, scale = train_gpt.rotary_state(train_gpt.stage_of(step, hp)[0], hp)
        for yarn in yarns:
            differ(part, "YaRN's frequencies", frequencies, yarn.angular_freq[:64:2])
            differ(part, "scale of attention", scale, yarn.attn_scale)

def write_text(name: str, lengths, bos: int, shard_size: int) -> str:
    """Shards of documents of these lengths, divided anywhere. Returns their pattern."""
    lengths = np.maximum(1, lengths).astype(int)
    tokens = np.random.default_rng(0).integers(bos, size=lengths.sum())
    tokens[np.cumsum([0, *lengths[:-1]])] = bos
    write_shards([tokens.astype("<u2")], FOLDER / name, 0, shard_size)
    return f"{FOLDER}/{name}_*.bin"

def compare_loader(record: Record):
    """Packs of full size across all stages, by our loader on one rank and on each of eight."""
    lengths = np.random.default_rng(0).lognormal(6, 1.04, size=12000)
    lengths[:40] = 512  # so that 32 documents end where a pack does
    files = write_text("full", lengths, 50256, 1_200_000)
    hp = replace(PRESETS["speedrun"], num_iterations=12, extension_frac=0.25, train_files=files)
    manager = record.manager((16384, 32768, 49152, 49152), (896, 2048, 2048, 2048))
    shards, theirs = train_gpt.find_shards(files), EightRanks(record.module, files, 8 * 16384, 896)
    ours = [train_gpt.train_batches(shards, hp, World(rank, size, CPU), 0)
            for rank, size in ((0, 1), *((rank, 8) for rank in range(8)))]
    read = {shard.path for (shard, _), _ in zip(train_gpt.step_starts(shards, hp), range(12))}
    part = f"loader, 12 steps of full size in {len(read)} shards"
    for step in range(12):
        manager.advance_schedule(step)
        whole, *parts = (next(batches) for batches in ours)
        for rank in range(8):
            inputs, targets, ends, bigrams, _ = theirs.send(manager.train_loader_send_args)
            for mine, wanted in (whole[rank], *parts[rank]):
                differ(part, "inputs", mine, inputs)
                differ(part, "targets", wanted, targets)
                differ(part, "where documents begin", (mine == 50256).nonzero()[:, 0],
                       ends[ends < len(inputs)].unique())
                differ(part, "pairs", train_gpt.bigram_rows(mine, hp.bigram_rows), bigrams)

def by_our_names(x: dict) -> dict:
    """Tensors of the record, by its labels, as views by our names."""
    scalars = x["scalars"]
    ours = {"embed.weight": x["embed"], "lm_head.weight": x["lm_head"].T,
            "bigram_embed.weight": x["bigram_embed"], "smear_gate": x["smear_gate"],
            "skip_gate": x["skip_gate"], "x0_add": x["x0_lambdas"],
            "bigram_add": x["bigram_lambdas"], "attn_keep": x["resid_lambdas"][:, 0],
            "mlp_keep": x["resid_lambdas"][:, 1], "attn_add": x["post_lambdas"][:, 0],
            "mlp_add": x["post_lambdas"][:, 1], "smear_scale": scalars[22],
            "back_scale": scalars[23], "skip_scale": scalars[24]}
    for number, i in enumerate((1, 2, 8, 9, 10)):
        ours[f"value_tables.{number}.weight"] = x["value_embeds"].chunk(5)[number]
        ours[f"layers.{i}.attn.value_gate"] = x["ve_gate_bank"][number]
    for i in range(11):
        ours |= zip((f"layers.{i}.mlp.fc", f"layers.{i}.mlp.proj"), x["mlp_bank"][i])
        if i != 6:
            names = (f"layers.{i}.attn.{name}" for name in ("q", "k", "v", "proj"))
            ours |= zip(names, x["attn_bank"][i - (i > 6)].chunk(4))
            ours[f"layers.{i}.attn.gate"] = x["attn_gate_bank"][i - (i > 6)]
            ours[f"layers.{i}.attn.scales"] = scalars[2 * i:2 * i + 2]
    return ours

def compare_training(record: Record):
    """Twelve steps of small models from the record's start, each with its own loader. Then the loss
    of a validation, and the gradient of one of its sequences."""
    part, module, args = "training, 12 steps", record.module, record.module.args
    module.BOS_ID, args.bigram_vocab_size = 635, 5 * 640
    args.val_tokens = args.val_batch_size = 8 * 256
    lengths = np.random.default_rng(0).lognormal(3.4, 0.9, size=2000)
    args.train_files, args.val_files = (write_text(name, lengths, 635, 30000)
                                        for name in ("train", "val"))
    hp = replace(
        PRESETS["speedrun"], dtype="float64", use_fp8=False, model_dim=96, head_dim=16,
        vocab_size=636, bigram_rows=5 * 640, train_seq_len=384, doc_lens="56,100,100,100",
        short_windows="8,24,40,48", long_windows="24,56,88,104", final_window=160,
        num_iterations=12, extension_frac=0.25, val_seq_len=256, val_tokens=2048,
        train_files=args.train_files, val_files=args.val_files)
    manager = module.training_manager = record.manager((128, 256, 384, 384), (56, 100, 100, 100))
    manager.block_size = 8
    module.train_loader = EightRanks(module, args.train_files, 8 * 128, 56)
    theirs, ours = manager.model, train_gpt.GPT(hp, torch.float64, flex=False).double()
    module.model, parameters = theirs, dict(ours.named_parameters())

    def recorded(of) -> dict:
        return by_our_names({p.label: of(p) for p in theirs.parameters()})

    def gradient(p):
        return torch.zeros_like(p) if p.grad is None else p.grad.clone()

    def compare(part, what, found, wanted):
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        scales = [name for name in found if "scale" in name]  # one tensor in the record
        for names in (scales, *([name] for name in found if name not in scales)):
            differ(part, what, *(torch.cat([x[name].flatten() for name in names])
                                 for x in (found, wanted)), 1e-9)

    with torch.no_grad():
        for name, p in recorded(torch.clone).items():
            parameters[name].copy_(p.view(parameters[name].shape))
    start, gradients, losses = {name: p.clone() for name, p in parameters.items()}, {}, []
    theirs.register_forward_hook(lambda module, inputs, loss: losses.append(loss.detach().sum()))
    note = SimpleNamespace(update=abs, finish=abs, begin=lambda step: gradients.update(
        {name: gradient(p) for name, p in parameters.items()}))
    plain_step = manager.optimizer.step

    def step_after_comparing(do_adam):
        compare(part, "each gradient", gradients, recorded(gradient))
        plain_step(do_adam)
    manager.optimizer.step = step_after_comparing
    world = World(0, 1, CPU)
    optimizers = [note, *train_gpt.build_optimizers(ours, hp, world)]
    batches = train_gpt.train_batches(train_gpt.find_shards(hp.train_files), hp, world, 0)
    for module.step in range(12):
        loss = train_gpt.train_step(ours, next(batches), optimizers, module.step, hp, world)
        losses.clear()
        manager.advance_schedule(module.step)
        record.train()
        tokens = 8 * train_gpt.pack_len(module.step, hp)
        differ(part, "loss", loss * tokens, sum(losses), 1e-9)
        compare(part, "each weight", parameters, recorded(torch.clone))
    still = [name for name, p in parameters.items() if torch.equal(p, start[name])]
    assert not still, f"{still} have not moved"

    part = "validation after them, at the last windows"
    manager.advance_schedule(12)
    manager.apply_final_ws_ext()
    record.validate()
    sequences = train_gpt.load_validation(train_gpt.find_shards(hp.val_files), hp, world)
    differ(part, "loss", train_gpt.evaluate(ours, sequences, 12, hp, world), module.val_loss, 1e-9)
    inputs, targets, *others = next(module.distributed_data_generator(
        args.val_files, args.val_batch_size, -1, 8, align_to_bos=False))
    theirs.eval()(inputs, targets, *others[:2], manager.get_forward_args()).sum().backward()
    ours.zero_grad()
    ours.eval()(inputs, targets, train_gpt.schedule_tensors(12, hp, CPU)).backward()
    compare(part, "each gradient", {name: gradient(p) for name, p in parameters.items()},
            recorded(gradient))

def definitions(text: str) -> dict:
    """{name of a function or class: its text}"""
    return {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

def compare_definitions():
    commit = re.search(r"commit `(\w+)`", (HERE / "README.md").read_text())[1]
    theirs = definitions(subprocess.run(["git", "-C", HERE, "show", f"{commit}:train_gpt.py"],
                                        check=True, capture_output=True, text=True).stdout)
    ours = definitions((HERE / "train_gpt.py").read_text())
    kinds = {"equal": [], "changed": [], "new": [], "gone": sorted(theirs.keys() - ours.keys())}
    for name, text in ours.items():
        kind = "new" if name not in theirs else "equal" if text == theirs[name] else "changed"
        kinds[kind].append(name)
    print(f"\n| against train_gpt.py of {commit} | functions and classes |\n|---|---|")
    for kind, names in kinds.items():
        print(f"| {kind}: {len(names)} | {', '.join(f'`{name}`' for name in names)} |")

def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    record = Record(sys.argv[1])
    compare_mantissa(record)
    torch.Tensor.float = torch.Tensor.double  # what both compute in float32
    for compare in (compare_kernels, compare_schedules, compare_loader, compare_training):
        compare(record)
    print("| part | what was compared | largest difference |\n|---|---|---|")
    for (part, what), (error, most) in worst.items():
        print(f"| {part} | {what} | {error:.1e}{' WRONG' * (not error <= most)} |")
    compare_definitions()
    sys.exit(any(not error <= most for error, most in worst.values()))

if __name__ == "__main__":
    main()
