"""What a CUDA GPU shows: `./run.sh test -m gpu -n 0` takes some minutes on one GPU, whose memory
the tests would not share. Where a test allows a tolerance, it prints what it has measured.
Without a GPU, the last test runs them in small on the one that helpers/on_fake_gpu.py pretends."""

import dataclasses
import os
import re
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, launch, log_of, log_path, losses, run_helper
from test_fp8 import relative_error
from test_interpreted import why_not
from test_model import sequence, tiny_model
from records.tools.bench import write_documents
from train_gpt import (GPT, INPUT_SCALE, WEIGHT_SCALE, CrossEntropy, FP8Linear, World, attend,
                       build_block_masks, build_optimizers, connect, dist, make_plan, parse_flags,
                       train_step)

needs_gpu = pytest.mark.gpu
NEEDS_FP8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs FP8 matrix units")
torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True  # as warm_up does
# Whether the GPU is one that on_fake_gpu.py pretends. There, what FlexAttention's graph runs on the
# CPU ignores the lists of blocks, so windows must not hide anything.
FAKED = torch.cuda.is_available() and not torch.backends.cuda.is_built()
SMALL = ["--model_dim=32", "--num_heads=2", "--head_dim=16", "--train_seq_len=128", "--windows=SL",
         "--val_seq_len=256", "--vocab_size=257", "--micro_batches=2", "--attention=x.",
         "--value_embeds=.."]

@pytest.fixture(autouse=True)
def fresh_compiler(runs_here):
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()

def say(capsys, text):
    with capsys.disabled():
        print(f"\n{text}")

def tokens_of(T, layout, eot=9):
    """T tokens in documents of as many as `layout` says, or of any length, among them none."""
    tokens = torch.zeros(T, dtype=torch.int32)
    if layout == "edges":  # of blocks, on both sides
        tokens[::640] = tokens[127::1280] = tokens[128::1280] = eot
    elif layout == "ragged":
        lengths = torch.empty(T // 8).log_normal_(5.0, 2.0, generator=torch.manual_seed(0))
        begins = lengths.long().clamp(min=1).cumsum(0)
        tokens[begins[begins < T]] = eot
    else:
        tokens[::layout] = eot
    return tokens.to("cuda")

@needs_gpu
@pytest.mark.parametrize("T, heads, kv_heads, layouts, windows", [
    (2048, 6, 2, (77, "ragged"), (128, 1792)),
    (2048, 6, 6, (2048, 77, "edges", "ragged"), (128, 384, 1024, 1792)),
    (49152, 6, 6, ("ragged", 5000), (128, 896, 1792)), (262144, 1, 1, ("ragged", 262144), (1792,))])
def test_compiled_flex_attention_equals_attention_in_bands(T, heads, kv_heads, layouts, windows,
                                                           capsys):
    """Long and short masks, forward and (up to 48K tokens) gradients, in bfloat16 against the plain
    path in float32. An error over all queries could hide a token that sees one key too many, so
    each query's output is compared by itself as well."""
    if FAKED:
        T, windows = 512, (1024,)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(1, n, T, 128, generator=generator).bfloat16().to("cuda")
                   .requires_grad_() for n in (heads, kv_heads, kv_heads, heads))
    @torch.compile(dynamic=False, fullgraph=True)
    def compiled(tokens, q, k, v, window):
        masks = build_block_masks(tokens, 9, window, flex=True)
        return [attend(q, k, v, mask, 0.12) for mask in masks]
    near = {"output": 0.01, "a query's output": 0.05, "gradients": 0.02}
    worst = dict.fromkeys(near, 0.0)
    with_gradients = T < 2**17
    for layout in layouts:
        tokens = tokens_of(T, layout)
        for window in (torch.tensor(w, device="cuda", dtype=torch.int32) for w in windows):
            with torch.set_grad_enabled(with_gradients):
                got = compiled(tokens, q, k, v, window)
                float32 = [x.detach().float().requires_grad_() for x in (q, k, v)]
                masks = build_block_masks(tokens, 9, window, flex=False)
                want = [attend(*float32, mask, 0.12) for mask in masks]
            errors = []
            for a, b in zip(got, want):
                of_queries = (a.float() - b).norm(dim=-1) / b.norm(dim=-1)
                errors += [("output", relative_error(a, b)),
                           ("a query's output", float(of_queries.max()))]
            if with_gradients:  # of both at once, because a compiled backward frees what it read
                dys = (dy, dy.flip(2))
                ours = torch.autograd.grad(got, (q, k, v), dys)
                theirs = torch.autograd.grad(want, float32, [x.float() for x in dys])
                errors += [("gradients", relative_error(*pair)) for pair in zip(ours, theirs)]
            for name, error in errors:
                assert error < near[name], (name, layout, window)
                worst[name] = max(worst[name], error)
            torch.compiler.set_stance("fail_on_recompile")  # for other layouts and windows
    say(capsys, f"FlexAttention at {T} tokens, {heads} on {kv_heads} heads: largest errors "
                f"{', '.join(f'{error:.4f} ({name})' for name, error in worst.items())}")

@needs_gpu
@NEEDS_FP8
def test_fp8_head_at_full_size_is_close_to_bf16(capsys):
    """And its written-out gradient, in two parts, to that of F.cross_entropy."""
    T, D, V = (512, 64, 1024) if FAKED else (49152, 768, 50304)
    scales = INPUT_SCALE, WEIGHT_SCALE, 2.0**19 * T / 49152  # of a mean loss over T tokens
    generator = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(T, D, generator=generator), (D,)).bfloat16()
    w = torch.randn(V, D, generator=generator) * 0.05
    x, w = (each.to("cuda").requires_grad_() for each in (x, w))
    targets = torch.randint(V, (T,), generator=generator).to("cuda")
    def capped(y):
        return 30 * torch.sigmoid(y.float() / 7.5)
    @torch.compile(fullgraph=True)
    def head(x, w):
        total = 0
        for part, target in zip(x.chunk(2), targets.chunk(2)):
            total += CrossEntropy.apply(capped(FP8Linear.apply(part, w, scales[2])), target)
        return total / T
    plain = F.linear(x, w.bfloat16())
    a = F.cross_entropy(capped(plain), targets)
    gx, gw, gy = torch.autograd.grad(a, (x, w, plain))
    del plain
    b = head(x, w)
    hx, hw = torch.autograd.grad(b, (x, w))
    for name, value, scale, dtype in (("x", x, scales[0], torch.float8_e4m3fn),
                                      ("w", w, scales[1], torch.float8_e4m3fn),
                                      ("gradient", gy[::12], scales[2], torch.float8_e5m2)):
        value = value.detach().float()
        flushed = value[(value * scale).to(dtype).float() == 0].abs().sum() / value.abs().sum()
        say(capsys, f"FP8 {name}: {flushed:.5f} of the absolute sum flushed to zero")
        assert flushed < 0.01 and value.abs().max() * scale <= torch.finfo(dtype).max, name
    errors = relative_error(b, a), relative_error(hx, gx), relative_error(hw, gw)
    say(capsys, f"FP8 head: relative errors of loss, x's and w's gradients {errors}")
    assert errors[0] < 0.001 and max(errors) < 0.12

@needs_gpu
@pytest.mark.parametrize("dtype, near", [
    (torch.float32, dict(loss=1e-4, gradients=2e-3, updates=0.05)),
    (torch.bfloat16, dict(loss=0.02, gradients=0.4, updates=0.8))])
def test_one_training_step_equals_the_cpus(dtype, near, capsys):
    """Compiled, with FlexAttention and in dtype, against the plain path in float32 on the CPU.
    Adam's first step is nearly the gradient's sign, so noise around zero counts in full. In
    bfloat16 the gradients of single mixing weights, sums that nearly cancel, are wrong by 0.2."""
    layers = dict(windows="LSSL")
    if FAKED:  # which compile sooner
        layers = dict(windows="LL", attention="xx", value_embeds="0.")
    plain, hp = tiny_model(num_heads=4, num_kv_heads=2, head_dim=32, micro_batches=2,
                           window_start=256, window_end=256, **layers)
    ours = GPT(hp, dtype, flex=True).to("cuda")
    ours.load_state_dict(plain.state_dict())
    ours.compile(dynamic=False, fullgraph=True)
    our_hp = dataclasses.replace(hp, dtype=str(dtype).removeprefix("torch."))
    batches = [sequence(seed=1), sequence(seed=2, eots=(0, 128, 255))]
    results = []
    for model, settings, device in ((plain, hp, "cpu"), (ours, our_hp, "cuda")):
        world = World(0, 1, torch.device(device))
        optimizers = build_optimizers(model, settings, world)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {}
        for name, p in model.named_parameters():  # the last call has the sum over micro-batches
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: gradients.update({name: p.grad.cpu().float()}))
        moved = [tuple(tokens.to(world.device) for tokens in batch) for batch in batches]
        loss = train_step(model, moved, optimizers, 0, settings, world)
        updates = {name: (p.detach() - before[name]).cpu().float()
                   for name, p in model.named_parameters()}
        assert gradients.keys() == updates.keys()
        results.append((float(loss), gradients, updates))
    (want, *wanted), (got, *gotten) = results
    errors = [{name: relative_error(b[name], a[name]) for name in a}
              for a, b in zip(wanted, gotten)]
    worst = [max(e.items(), key=lambda item: item[1]) for e in errors]
    say(capsys, f"one step in {dtype} against the CPU: loss {got:.6f} and {want:.6f}; largest "
                f"relative error of a gradient {worst[0]}, of an update {worst[1]}")
    assert got == pytest.approx(want, abs=near["loss"])
    assert worst[0][1] < near["gradients"] and worst[1][1] < near["updates"], errors

@needs_gpu
def test_nccl_takes_what_the_script_gives_it(shards, monkeypatch, request):
    for name, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0",
                            WORLD_SIZE="1").items():
        monkeypatch.setenv(name, value)
    world = World(0, 1, torch.device("cuda", torch.cuda.current_device()))
    plan = make_plan(*parse_flags([*TINY, *shards]), "text", world, None)
    assert connect(plan, "text", world) == plan
    request.addfinalizer(dist.destroy_process_group)
    assert dist.get_backend() == ("gloo" if FAKED else "nccl")
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.arange(64, device=world.device).to(dtype).view(8, 8)
        want = whole.clone()
        local = torch.empty_like(whole)
        dist.reduce_scatter_single(local, whole, async_op=True).wait()
        dist.all_gather_single(whole, whole.chunk(1)[0], async_op=True).wait()
        dist.all_reduce(whole, async_op=True).wait()
        dist.broadcast(whole, src=0)
        assert torch.equal(local, want) and torch.equal(whole, want)

@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_optimizers_on_two_gpus_equal_one_rank():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    said = run_helper("optimizer_worker.py", "float32", "bfloat16", ranks=2,
                      CUDA_VISIBLE_DEVICES=visible)
    assert said.count("equal") == 4

@needs_gpu
@NEEDS_FP8
def test_a_run_of_full_size_and_its_resume_by_a_second_start(tmp_path, capsys):
    """On made-up documents, where the script makes a recompile an error. The second start finds
    every program on the disk, and trains on as the first one did."""
    steps, first_loss, small = 20, 10.8258, []
    program = ["first_start.py"]
    if FAKED:
        steps, first_loss, small = 4, 5.7683, SMALL
        program = ["on_fake_gpu.py", ROOT / "tests" / "helpers" / "first_start.py"]
    hp, _ = parse_flags(["--preset=speedrun", *small])
    train_tokens = (steps + 2) // 3 * hp.micro_batches * hp.train_seq_len + 1
    for number in (1, 2, 3):  # of other lengths, so that their tokens differ
        write_documents(tmp_path / f"r_train_{number:06}.bin", train_tokens + number, hp.vocab_size)
    write_documents(tmp_path / "r_val_000000.bin", 2 * hp.val_seq_len + 1, hp.vocab_size)
    def start(*flags):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        return run_helper(*program, *flags, CUDA_VISIBLE_DEVICES=visible).splitlines()[-1]
    middle = steps // 2
    start("--preset=speedrun", *small, f"--train_files={tmp_path}/r_train_*.bin",
          f"--val_files={tmp_path}/r_val_*.bin", "--val_tokens=0", f"--num_iterations={steps}",
          "--seed=1", f"--save_every={middle}", f"--records={tmp_path}/whole")
    stopped = log_path(tmp_path / "whole").with_suffix("") / f"step{middle:08}.pt"
    found = start(f"--resume={stopped}", f"--records={tmp_path}/rest")
    logs = [log_of(tmp_path / "whole"), log_of(tmp_path / "rest")]
    whole, rest = (losses(log, "train_loss") for log in logs)
    far = max(abs(a - b) for a, b in zip(whole[middle:], rest, strict=True))
    warmups = [log.split("\nwarmup: ")[1].split(",")[0] for log in logs]
    say(capsys, f"losses {whole[0]:.4f} to {whole[-1]:.4f}; largest difference after a resume "
                f"{far:.5f}; warmup {' and '.join(warmups)}; {found}")
    assert len(whole) == steps and whole[0] == pytest.approx(first_loss, abs=1e-3)
    assert whole[-1] < whole[0] and far < 0.03
    if not FAKED:  # whose cache is not PyTorch's
        assert "autograd_cache_hit" in found and "bypass" not in found and "miss" not in found

TESTS = [name for name, test in list(globals().items())
         if name.startswith("test_") and any(m.name == "gpu" for m in test.pytestmark)]
@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("names", [TESTS[:2], TESTS[2:-1], TESTS[-1:]],
                         ids=["functions", "steps", "runs"])
def test_each_runs_here_as_well_up_to_the_launch(names, tmp_path):
    """Without the sizes at which the plain path takes long on a CPU."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = launch("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-m", "gpu",
                  "--tb=short", "--show-capture=no", "-k",
                  f"({' or '.join(names)}) and not 49152 and not 262144 and not 2048-6-6", __file__,
                  f"--basetemp={tmp_path}/pytest", f"--rootdir={ROOT}",
                  script=ROOT / "tests" / "helpers" / "on_fake_gpu.py", cwd=ROOT,
                  PYTHONPATH=paths, TORCHINDUCTOR_CACHE_DIR=f"{tmp_path}/cache", check=False)
    last = done.stdout.rstrip().splitlines()[-1]
    assert done.returncode == 0 and re.match(r"\d+ passed", last), done.stdout + done.stderr
