"""Compares train_gpt.py of this folder with the record's own source, on a CPU, in float64:

    OMP_NUM_THREADS=1 python records/2026-04-04_85s/equal.py record.txt

record.txt is a log of the record, which begins with its source (README.md links to it). The exit
status is 1 if a difference is larger than its row of the table allows."""

import ast
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

# torch.compile returns what it is given, and Triton's kernels run on a CPU.
os.environ.update(TORCHDYNAMO_DISABLE="1", TRITON_INTERPRET="1", RANK="0", WORLD_SIZE="1")
import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
FOLDER = Path(tempfile.mkdtemp())
sys.path[:0] = map(str, (HERE, HERE.parents[1], FOLDER))
import train_gpt
from data.common import write_shards
from train_gpt import PRESETS, World

CPU = torch.device("cpu")

# All that is changed in the record's source, so that it runs on a CPU and in float64.
CHANGES = [
    (r"\b(torch|tl)\.(bfloat16|float32|float8_\w+)", r"\1.float64"),
    (r"\.(bfloat16|float)\(\)", ".double()"),
    (r", accumulator\)", ", accumulator, out_dtype=tl.float64)"),
    (r'device=f?"cuda[^"]*"', 'device="cpu"'),
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
    (r"#include .*|__(device|global)__|__(align|launch_bounds)__\(.*\)|__b?float\w*2\w+", ""),
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
        tensors = *arguments[:5], torch.tensor(arguments[7:])
        *pointers, numbers = (ctypes.c_void_p(x.data_ptr()) for x in tensors)
        launch(*pointers, *arguments[5:7], numbers)
    kernel.set_shared_memory_config = lambda size: None
    return kernel

def attention(q, k, v, cu_seqlens_q, window_size, softmax_scale, **others):
    """FlashAttention is a binary. This is what its documentation says, for x [T, heads, width]."""
    position = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens_q, position, right=True)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance <= window_size[0]) & (document[:, None] == document)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale)
    return y.transpose(0, 1).contiguous()

# Triton's interpreter would take half an hour for these in twelve steps.
STAND_INS = dict(
    XXT=lambda A, out: out.copy_(A @ A.mT), XTX=lambda A, out: out.copy_(A.mT @ A),
    ba_plus_cAA=lambda A, alpha, beta, out: out.copy_(beta * A + alpha * A @ A.mT),
    linear_relu_square=lambda a, b, aux=None: 2 * (a @ b.T) * aux.relu() if aux is not None else (
        a @ b.T, (a @ b.T).relu().square()))

def between(text: str, first: str, last: str) -> str:
    """The text from the end of the one to the next of the other."""
    start = text.index(first) + len(first)
    return text[start:text.index(last, start)]

ONE_RANK = SimpleNamespace(get_world_size=lambda: 1, is_initialized=lambda: False)

def load_record(path: str):
    """The record's functions and classes as a module, with its kernels. The lines of its main
    program that compute the gradients of a step, and that validate, are two functions of it."""
    source = Path(path).read_text().split("\n" + "=" * 100)[0]
    main, kernels = re.split("\n-{40}\n# triton_kernels.py\n-{40}\n", changed(source, CHANGES))
    functions = "import os, sys, copy\n" + between(main, "import copy\n", "# int main")
    (FOLDER / "record_2026.py").write_text(functions)  # Triton reads its kernels in their file
    (FOLDER / "triton_kernels.py").write_text(kernels)
    flash = SimpleNamespace(flash_attn_varlen_func=attention)
    sys.modules["kernels"] = SimpleNamespace(
        get_kernel=lambda name: SimpleNamespace(flash_attn_interface=flash))
    torch.cuda._compile_kernel = compile_kernel
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    torch._scaled_mm = lambda a, b, scale_a, scale_b, **options: a @ b * scale_a * scale_b
    import record_2026
    record_2026.dist = ONE_RANK
    for name, first, last in (
            ("compute_gradients", "TRAINING SECTION -----------------", "training_manager.step_"),
            ("validate", "ms += 1000 * (time.perf_counter() - t0)\n", "del val_loader")):
        code = compile(textwrap.dedent(between(main, first, last)), name, "exec")
        setattr(record_2026, name, partial(exec, code, vars(record_2026)))
    record_2026.source = source
    return record_2026

def small_manager(record, packs=(), cuts=()):
    """A TrainingManager with a small model. With packs, each stage has three steps."""
    for stage, pack, cut in zip(record.TRAINING_STAGES, packs, cuts):
        stage.batch_size, stage.train_max_seq_len = 8 * pack, cut
    if packs:
        record.training_schedule = record.TrainingSchedule(record.TRAINING_STAGES, 9, 3, 0.6)
    return record.TrainingManager(record.GPT(636, 11, 6, 16, 96, max_seq_len=512))

def eight_ranks(record, *arguments):
    """The record's training loader, as its eight ranks call it one after another."""
    loaders, new = [record.distributed_data_generator(*arguments) for _ in range(8)], None
    while True:
        for rank, loader in enumerate(loaders):
            record.dist = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 8,
                                          is_initialized=lambda: True)
            batch = loader.send(new and (*new[:2], 1))
            record.dist = ONE_RANK
            new = yield batch

worst = {}  # {(part, what was compared): [largest difference, the most that is allowed]}

def differ(part: str, what: str, ours, theirs, most=0.0):
    """Notes a difference, if `most` is not 0 relative to theirs, or to 0.01 if they are smaller."""
    ours, theirs = (torch.as_tensor(x).detach().double() for x in (ours, theirs))
    error = (ours - theirs).norm().item() if ours.shape == theirs.shape else torch.inf
    error /= max(theirs.norm().item(), 0.01) if most else 1
    row = worst.setdefault((part, what), [0.0, most])
    if not error <= row[0]:  # also where it is not a number
        row[0] = error

def compare_kernels(record):
    import triton_kernels as kernels
    square, tall = torch.randn(2, 160, 160), torch.randn(3, 200, 96)
    a, b, empty = torch.randn(300, 96), torch.randn(400, 96), torch.empty
    for name, *arguments in (
            ("XXT", tall.mT, empty(3, 96, 96)), ("XXT", a, empty(300, 300)),
            ("XTX", tall, empty(3, 96, 96)), ("XTX", a, empty(96, 96)),
            ("ba_plus_cAA", square + square.mT, 0.7, -0.3, empty(2, 160, 160)),
            ("linear_relu_square", a, b), ("linear_relu_square", a, b, torch.randn(300, 400))):
        theirs = torch.cat(tuple(getattr(kernels, name)(*arguments)))  # a copy
        differ("stand-ins for kernels", f"{name}, in Triton's interpreter",
               torch.cat(tuple(STAND_INS[name](*arguments))), theirs, 1e-12)
    for name, function in STAND_INS.items():
        vars(kernels)[name] = vars(record)[name] = function

def compare_mantissa(record):
    """In float32, before main replaces Tensor.float. The record keeps the upper and the lower 16
    bits of a weight apart, and the model knows only the upper ones."""
    text = between(record.source, "    def _cautious_wd_and_update_inplace", "    @staticmethod")
    text = text.replace("torch.uint32", "torch.int32")  # CPUs cannot shift uint32
    exec(textwrap.dedent("    def update" + text), space := {"torch": torch})
    p, rest = torch.randn(200, 100).bfloat16(), torch.zeros(200, 100, dtype=torch.uint16)
    ours, lr, decay = p.float(), *torch.tensor((0.0123, 0.0321), dtype=torch.float32)
    for _ in range(100):
        x = (torch.randn(200, 100) * (torch.rand(200, 100) > 0.1)).bfloat16()
        space["update"](p.view(torch.uint16), rest, x, decay, lr)
        train_gpt.apply_updates([ours], [x], lr, decay * lr)
    whole = (p.view(torch.uint16).int() << 16 | rest.int()).view(torch.float32)
    differ("NorMuon's float32 matrices", "after 100 updates", ours, whole, 1e-6)

def compare_schedules(record):
    part, hp, manager = "schedules, steps 0 to 1490", PRESETS["speedrun"], small_manager(record)
    schedule = record.training_schedule
    yarns = record.Yarn(128, 4), record.Yarn(128, 4, paired=True)
    manager.model = SimpleNamespace(yarn=yarns[0], yarn_paired_head=yarns[1])
    adam = SimpleNamespace(hp=hp, every=2)
    tied = [step for step in range(1, 1490, 2) if train_gpt.TiedAdam.is_tied(adam, step)]
    differ(part, "number of steps, and the untying", (hp.num_iterations, tied[-1]),
           (schedule.total_steps, manager.split_step))
    for step in range(1491):
        manager.advance_schedule(step)
        if step == 1490:
            manager.apply_final_ws_ext()
        theirs = manager.get_forward_args()
        weights = [*theirs.mtp_weights.tolist(), 0.0, 0.0][:3]
        stage = train_gpt.stage_at(step, hp)
        frequencies, scale = train_gpt.rotary_state(stage.number, hp)
        for what, mine, its in (
                ("windows", train_gpt.window_sizes(step, hp), (theirs.ws_short, theirs.ws_long)),
                ("tokens of a step", 8 * stage.pack_len, manager.batch_size),
                ("cut of documents", stage.doc_len, theirs.train_max_seq_len),
                ("weights of the targets", train_gpt.target_weights(step, hp), weights),
                ("learning rates", train_gpt.lr_factor(step, hp), schedule.get_lr(step)),
                ("momentum", train_gpt.muon_momentum(step, hp), record.get_muon_momentum(step)),
                ("YaRN's frequencies", frequencies.expand(2, -1),
                 torch.stack([yarn.angular_freq[:64:2] for yarn in yarns])),
                ("scale of attention", 2 * [scale], [yarn.attn_scale for yarn in yarns])):
            differ(part, what, mine, its)

def write_text(name: str, bos: int, shard_size: int, *distribution) -> str:
    """Shards of random documents, divided anywhere. Returns their pattern."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(*distribution)).astype(int)
    lengths[:40] = 512  # so that 32 documents end where a pack of 16,384 tokens does
    tokens = rng.integers(bos, size=lengths.sum())
    tokens[np.cumsum([0, *lengths[:-1]])] = bos
    write_shards([tokens.astype("<u2")], FOLDER / name, 0, shard_size)
    return f"{FOLDER}/{name}_*.bin"

def compare_loader(record):
    """Packs of full size across all stages, as eight ranks read them."""
    files = write_text("full", 50256, 1_200_000, 6, 1.04, 12000)
    hp = replace(PRESETS["speedrun"], num_iterations=12, extension_frac=0.25, train_files=files)
    manager = small_manager(record, (16384, 32768, 49152, 49152), (896, 2048, 2048, 2048))
    shards, theirs = train_gpt.find_shards(files), eight_ranks(record, files, 8 * 16384, 896)
    ours = [train_gpt.train_batches(shards, hp, World(rank, 8, CPU), 0) for rank in range(8)]
    read = {shard.path for (shard, _), _ in zip(train_gpt.step_starts(shards, hp), range(12))}
    part = f"loader, 12 steps of full size in {len(read)} shards"
    for step in range(12):
        manager.advance_schedule(step)
        for ((mine, wanted),) in map(next, ours):
            inputs, targets, ends, bigrams, _ = theirs.send(manager.train_loader_send_args)
            differ(part, "inputs", mine, inputs)
            differ(part, "targets", wanted, targets)
            differ(part, "where documents begin", (mine == 50256).nonzero()[:, 0],
                   ends[ends < len(inputs)].unique())
            differ(part, "pairs", train_gpt.bigram_rows(mine, hp.bigram_rows), bigrams)

def by_our_names(x: dict) -> dict:
    """Tensors of the record, by its labels, as views by our names."""
    ours = {name: x[name] for name in ("smear_gate", "skip_gate")}
    ours |= {f"{name}.weight": x[name] for name in ("embed", "bigram_embed")}
    ours |= {"lm_head.weight": x["lm_head"].T, "x0_add": x["x0_lambdas"]}
    ours |= zip(("attn_keep", "mlp_keep"), x["resid_lambdas"].T)
    ours |= zip(("attn_add", "mlp_add", "bigram_add"), (*x["post_lambdas"].T, x["bigram_lambdas"]))
    ours |= zip(("smear_scale", "back_scale", "skip_scale"), x["scalars"][22:])
    for number, i in enumerate((1, 2, 8, 9, 10)):
        ours[f"value_tables.{number}.weight"] = x["value_embeds"].chunk(5)[number]
        ours[f"layers.{i}.attn.value_gate"] = x["ve_gate_bank"][number]
    for i in range(11):
        ours |= zip((f"layers.{i}.mlp.fc", f"layers.{i}.mlp.proj"), x["mlp_bank"][i])
    for row, i in enumerate((0, 1, 2, 3, 4, 5, 7, 8, 9, 10)):
        ours |= zip((f"layers.{i}.attn.{name}" for name in ("q", "k", "v", "proj")),
                    x["attn_bank"][row].chunk(4))
        ours[f"layers.{i}.attn.gate"] = x["attn_gate_bank"][row]
        ours[f"layers.{i}.attn.scales"] = x["scalars"][2 * i:2 * i + 2]
    return ours

def compare_training(record):
    """Twelve steps of small models from the record's start, each with its own loader. Then the loss
    of a validation, and the gradient of one of its sequences."""
    part, args, world = "training, 12 steps", record.args, World(0, 1, CPU)
    record.BOS_ID, args.bigram_vocab_size = 635, 5 * 640
    args.val_tokens = args.val_batch_size = 8 * 256
    files = args.train_files = args.val_files = write_text("small", 635, 30000, 3.4, 0.9, 2000)
    hp = replace(
        PRESETS["speedrun"], dtype="float64", use_fp8=False, model_dim=96, head_dim=16,
        vocab_size=636, bigram_rows=5 * 640, train_seq_len=384, final_window=160,
        stages="1/3 56 8 24 1 0.5 0.25:0, 2/3 100 24 56 1.52 0.5:0 0, 1 100 40 88 1.73 0 0, "
               "1 100 48 104 1 0 0",
        num_iterations=12, extension_frac=0.25, val_seq_len=256, val_tokens=2048)
    manager = small_manager(record, (128, 256, 384, 384), (56, 100, 100, 100))
    record.training_manager, manager.block_size = manager, 8
    record.train_loader = eight_ranks(record, files, 8 * 128, 56)
    theirs = record.model = manager.model
    ours, losses = train_gpt.GPT(hp, torch.float64, flex=False).double(), []
    def pairs(of) -> list:
        """Ours and theirs, for each parameter or its gradient."""
        wanted = by_our_names({p.label: of(p) for p in theirs.parameters()})
        assert wanted.keys() == dict(ours.named_parameters()).keys()
        return [(of(p), wanted[name].view(p.shape)) for name, p in ours.named_parameters()]
    def compare(what, of):
        for pair in pairs(of):
            differ(part, what, *pair, 1e-9)
    for x, y in pairs(torch.detach):
        x.copy_(y)
    theirs.register_forward_hook(lambda model, inputs, loss: losses.append(loss.detach().sum()))
    optimizers = train_gpt.build_optimizers(ours, hp, world)
    shards = train_gpt.find_shards(files)
    batches = train_gpt.train_batches(shards, hp, world, 0)
    for step in range(12):
        loss = train_gpt.train_step(ours, next(batches), [], step, hp, world)  # only gradients
        manager.advance_schedule(step)
        record.step = step
        record.compute_gradients()
        tokens = 8 * train_gpt.stage_at(step, hp).pack_len
        differ(part, "loss", loss * tokens, sum(losses[-8:]), 1e-9)
        compare("each gradient", lambda p: p.grad)
        train_gpt.train_step(ours, [], optimizers, step, hp, world)
        manager.step_optimizers(step)
        compare("each weight", torch.detach)
    part = "validation after them, at the last windows"
    manager.advance_schedule(12)
    manager.apply_final_ws_ext()
    record.validate()
    sequences = train_gpt.load_validation(shards, hp, world)
    differ(part, "loss", train_gpt.evaluate(ours, sequences, 12, hp, world), record.val_loss, 1e-9)
    inputs, targets, *others = next(record.distributed_data_generator(
        files, args.val_batch_size, -1, 8, align_to_bos=False))
    theirs.eval()(inputs, targets, *others[:2], manager.get_forward_args()).sum().backward()
    ours.eval()(inputs, targets, train_gpt.schedule_tensors(12, hp, CPU)).backward()
    compare("each gradient", lambda p: p.grad)

def compare_definitions():
    commit = re.search(r"commit `(\w+)`", (HERE / "README.md").read_text())[1]
    theirs = subprocess.run(["git", "-C", HERE, "show", f"{commit}:train_gpt.py"], check=True,
                            capture_output=True, text=True).stdout
    ours, theirs = ({node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body
                     if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
                    for text in ((HERE / "train_gpt.py").read_text(), theirs))
    kinds = {"equal": [], "changed": [], "new": [], "gone": []}
    for name in ours | theirs:
        kind = "gone" if name not in ours else "new" if name not in theirs else "changed"
        kinds["equal" if ours.get(name) == theirs.get(name) else kind].append(f"`{name}`")
    print(f"\n| against train_gpt.py of {commit} | functions and classes |\n|---|---|")
    for kind, names in kinds.items():
        print(f"| {kind}: {len(names)} | {', '.join(names)} |")

def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    record = load_record(sys.argv[1])
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
