"""What only a CUDA GPU can show: `./run.sh test -m gpu -n 0`, some minutes on one GPU (-n 0: one test at a time, since they share its
memory). Skipped elsewhere. What was measured is printed where a test allows a tolerance."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from bench_gpu import cast_shares, write_documents
from conftest import TINY, losses
from test_bench_gpu import SCRIPT, SMALL
from test_fp8 import relative_error
from test_model import sequence, tiny_model
from test_reliability import stop_at
from test_training import log_of

from train_gpt import (GPT, PRESETS, Adam, Muon, UserError, block_sparse, build_block_masks, flex, fp8_linear, optimizer_groups, run,
                       train_step)

pytestmark = pytest.mark.gpu
SCALES = (2.0, 2.0**9, 2.0**19)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def say(capsys, text):
    with capsys.disabled():
        print(f"\n{text}")


def gpu_run(*flags):
    """A whole run of the script; the one before it has left the compiler refusing to compile."""
    torch.compiler.set_stance("default")
    run([*flags])


def tokens_of(T, layout, eot=9):
    """T tokens: one document; documents of a number of tokens; borders at both edges of blocks; documents of any length, empty ones too."""
    tokens = torch.zeros(T, dtype=torch.int32)
    if layout == "edges":
        tokens[::640] = tokens[127::1280] = tokens[128::1280] = eot
    elif layout == "ragged":
        lengths = torch.empty(T // 8).log_normal_(5.0, 2.0, generator=torch.Generator().manual_seed(0)).long().clamp(min=1)
        begins = lengths.cumsum(0)
        tokens[begins[begins < T]] = eot
    elif layout != "one":
        tokens[::layout] = eot
    return tokens.to("cuda")


@pytest.mark.parametrize("T, heads, kv_heads, layouts, windows", [
    (2048, 6, 6, ("one", 77, "edges", "ragged"), (128, 384, 1024, 1792)),
    (2048, 6, 2, ("edges", "ragged"), (256, 1792)),
    (49152, 6, 6, ("ragged", 5000), (128, 896, 1792)),
    (49152, 6, 2, ("ragged",), (1792,)),
    (262144, 1, 1, ("ragged", "one"), (1792,)),
])
def test_compiled_flex_attention_equals_the_block_sparse_path(T, heads, kv_heads, layouts, windows, capsys):
    """Long and short masks, forward and (to 48K) gradients, in bfloat16 against the plain path in float32. An error of the whole could
    hide a token that sees one key too many; so each query's output is compared by itself."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dy = (torch.randn(1, h, T, 128, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True)
                   for h in (heads, kv_heads, kv_heads, heads))

    @torch.compile(dynamic=False, fullgraph=True)
    def compiled(tokens, q, k, v, window):
        return [flex(mask, 0.12)(q, k, v) for mask in build_block_masks(tokens, 9, window)]

    near = {"output": 0.01, "a query's output": 0.05, "gradients": 0.02}
    worst, gradients = dict.fromkeys(near, 0.0), T < 2**17
    for layout in layouts:
        tokens = tokens_of(T, layout)
        for window in (torch.tensor(w, device="cuda", dtype=torch.int32) for w in windows):
            with torch.set_grad_enabled(gradients):
                got = compiled(tokens, q, k, v, window)
                float32 = [x.detach().float().requires_grad_() for x in (q, k, v)]
                want = [block_sparse(mask, 0.12)(*float32) for mask in build_block_masks(tokens, 9, window)]
            pairs = [(a.detach().float(), b.detach()) for a, b in zip(got, want)]
            errors = {"output": max(relative_error(a, b) for a, b in pairs),
                      "a query's output": max(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for a, b in pairs)}
            if gradients:  # of both at once: a compiled backward frees what it has read
                ours = torch.autograd.grad(got, (q, k, v), (dy, dy.flip(2)))
                errors["gradients"] = max(map(relative_error, ours, torch.autograd.grad(want, float32, (dy.float(), dy.flip(2).float()))))
            for name, error in errors.items():
                assert error < near[name], (name, layout, window)
                worst[name] = max(worst[name], error)
            torch.compiler.set_stance("fail_on_recompile")  # layouts and windows are no other kernels
    say(capsys, f"FlexAttention at {T} tokens, {heads} heads on {kv_heads}: largest relative errors "
                f"{', '.join(f'{error:.4f} ({name})' for name, error in worst.items())}")


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 matrix units")
def test_fp8_head_at_full_size_is_close_to_bf16(capsys):
    T, D, V = 49152, 768, 50304
    generator = torch.Generator("cuda").manual_seed(0)
    x = F.rms_norm(torch.randn(T, D, device="cuda", generator=generator), (D,)).bfloat16().requires_grad_()
    w = (torch.randn(V, D, device="cuda", generator=generator) * 0.05).requires_grad_()
    targets = torch.randint(V, (T,), device="cuda", generator=generator)

    def loss(y):
        return F.cross_entropy(30 * torch.sigmoid(y.float() / 7.5), targets)

    plain = F.linear(x, w.bfloat16())
    plain.retain_grad()
    a, gx, gw, gy = (t.detach() for t in (loss(plain), *torch.autograd.grad(loss(plain), (x, w, plain))))
    b = loss(torch.compile(lambda x, w: fp8_linear(x, w, *SCALES)[0], fullgraph=True)(x, w))
    hx, hw = torch.autograd.grad(b, (x, w))
    shares = {}
    for name, value, scale, dtype in (("x", x, SCALES[0], torch.float8_e4m3fn), ("w", w, SCALES[1], torch.float8_e4m3fn),
                                      ("gradient", gy[::12], SCALES[2], torch.float8_e5m2)):
        shares[name] = cast_shares(value.detach(), scale, dtype)
        say(capsys, f"FP8 {name}: saturated {100 * shares[name][0]:.5f} %, flushed to zero {100 * shares[name][1]:.3f} % of the "
                    f"values with {100 * shares[name][2]:.3f} % of the absolute sum")
    say(capsys, f"FP8 head: loss {b.item():.5f} against {a.item():.5f}; relative error of the gradients {relative_error(hx, gx):.4f} (x), "
                f"{relative_error(hw, gw):.4f} (w)")
    assert b.item() == pytest.approx(a.item(), abs=0.01)
    assert relative_error(hx, gx) < 0.12 and relative_error(hw, gw) < 0.12
    assert all(saturated == 0 and mass < 0.01 for saturated, _, mass in shares.values())


@pytest.mark.parametrize("dtype, near", [
    (torch.float32, dict(loss=1e-4, gradients=2e-3, updates=0.05)), (torch.bfloat16, dict(loss=0.02, gradients=0.4, updates=0.8))])
def test_one_training_step_equals_the_cpus(dtype, near, capsys):
    """Compiled, FlexAttention and Newton-Schulz in dtype against the plain path in float32 on the CPU: the loss, each parameter's gradient
    and its update, by relative error. Adam's first step is nearly the gradient's sign, so that noise around zero counts in full.
    float32 shows that the computation is the same; in bfloat16 gradients of single weights, sums that nearly cancel, are 0.2 off."""
    plain, hp = tiny_model(num_heads=2, num_kv_heads=2, head_dim=32, micro_batches=2, window_end=256)
    ours = GPT(hp, flex, dtype).to("cuda")
    ours.load_state_dict(plain.state_dict())
    results = []
    for model, called in ((plain, plain), (ours, torch.compile(ours, dynamic=False, fullgraph=True))):
        device, matrices_and_groups = model.embed.weight.device, optimizer_groups(model, hp)
        window = torch.tensor(256, dtype=torch.int32).to(device)
        muon, adam = Muon(matrices_and_groups[0], 0, 1, model.embed.weight.dtype), Adam(matrices_and_groups[1], 1)
        before, loss = {name: p.detach().clone() for name, p in model.named_parameters()}, 0.0
        for batch in (sequence(seed=1), sequence(seed=2, eots=(0, 128, 255))):
            loss_of_batch = called(*(t.to(device) for t in batch), window)
            loss_of_batch.backward()
            loss += loss_of_batch.item() / 2
        gradients = {name: p.grad.cpu().float() / 2 for name, p in model.named_parameters()}
        train_step(called, [], window, muon, adam, 0, hp)  # what remains of a step after its micro-batches
        results.append((loss, gradients, {name: (p.detach() - before[name]).cpu().float() for name, p in model.named_parameters()}))
    (want, *wanted), (got, *gotten) = results
    errors = [{name: relative_error(b[name], a[name]) for name in a} for a, b in zip(wanted, gotten)]
    worst = [max(e.items(), key=lambda item: item[1]) for e in errors]
    say(capsys, f"one step in {dtype} against the CPU: loss {got:.6f} and {want:.6f}; largest relative error of a gradient "
                f"{worst[0][1]:.5f} ({worst[0][0]}), of an update {worst[1][1]:.5f} ({worst[1][0]})")
    assert got == pytest.approx(want, abs=near["loss"])
    assert worst[0][1] < near["gradients"] and worst[1][1] < near["updates"], errors


def test_ten_training_steps_equal_the_cpus(tmp_path, shards):
    """Through the whole script: compiled, FlexAttention, bfloat16 against the CPU's float32."""
    settings = [*TINY, *shards, "--num_iterations=10", "--val_loss_every=5", "--val_tokens=0", "--use_fp8=false"]
    gpu_run(*settings, "--dtype=bfloat16", f"--records={tmp_path}/gpu")
    gpu = log_of(tmp_path / "gpu")
    assert "\ngpus: " in gpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        gpu_run(*settings, f"--records={tmp_path}/cpu")
    cpu = log_of(tmp_path / "cpu")
    assert losses(gpu) == pytest.approx(losses(cpu), abs=0.05)
    assert losses(gpu, "train_loss") == pytest.approx(losses(cpu, "train_loss"), abs=0.08)


def test_a_stopped_and_resumed_run_equals_one_that_was_not(tmp_path, shards, monkeypatch, capsys):
    settings = [*TINY, *shards, "--num_iterations=12", "--val_loss_every=4", "--use_fp8=false", "--dtype=bfloat16"]
    for folder in ("whole", "again"):
        gpu_run(*settings, f"--records={tmp_path}/{folder}")
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        with pytest.raises(UserError, match="stopped by SIGTERM; step 6 is saved"):
            gpu_run(*settings, f"--records={tmp_path}/parts")
    gpu_run(*settings, f"--records={tmp_path}/parts", "--resume")
    logs = {folder: log_of(tmp_path / folder) for folder in ("whole", "again", "parts")}
    assert "\nresumed: step 6 at " in logs["parts"]
    curves = {folder: losses(log, "train_loss") + losses(log) for folder, log in logs.items()}
    far = {folder: max(abs(a - b) for a, b in zip(curve, curves["whole"], strict=True)) for folder, curve in curves.items()}
    say(capsys, f"largest difference of a loss in 12 steps: {far['parts']:.5f} after a stop and a resume, "
                f"{far['again']:.5f} between two whole runs")
    assert far["parts"] < 0.03


def test_twenty_full_size_steps_without_a_recompile_or_a_wait_for_data(tmp_path, capsys):
    """The speedrun preset on random tokens: the stance makes a recompile an error; data must not stall the step, not at a shard's end."""
    hp = PRESETS["speedrun"]
    step_tokens = hp.micro_batches * hp.train_seq_len
    for name, count in (("train_000001", 7 * step_tokens + 1), ("train_000002", 7 * step_tokens + 1), ("train_000003", 7 * step_tokens + 1),
                        ("val_000000", 2 * hp.val_seq_len + 1)):
        write_documents(tmp_path / f"r_{name}.bin", count, hp.vocab_size)
    gpu_run("--preset=speedrun", f"--train_files={tmp_path}/r_train_*.bin", f"--val_files={tmp_path}/r_val_*.bin", "--val_tokens=0",
            "--num_iterations=20", "--val_loss_every=10", "--save=false", f"--records={tmp_path}/records")
    log = log_of(tmp_path / "records")
    curve = losses(log, "train_loss")
    wait = float(log.split("data_wait: ")[1].split(" ms")[0])
    say(capsys, f"20 steps: losses {curve[0]:.4f} to {curve[-1]:.4f}, {wait} ms a step spent waiting for data\n" + "\n".join(
        line for line in log.splitlines() if line.startswith(("warmup: ", "peak_memory: ", "throughput: ", "hardware: "))))
    assert len(curve) == 20 and curve[0] == pytest.approx(10.8258, abs=1e-3) and curve[-1] < curve[0]
    assert log.count("\ndata: pass 1") == 3 and wait < 1


def test_window_growth_does_not_recompile_the_full_model():
    hp = dataclasses.replace(PRESETS["speedrun"], num_kv_heads=6, train_seq_len=8192, val_seq_len=8192)
    model = torch.compile(GPT(hp, flex, torch.bfloat16).cuda(), dynamic=False, fullgraph=True)
    tokens = tokens_of(8192, 700, hp.vocab_size - 1)
    for window in (128, 256, 1024, 1792):
        model(tokens, tokens.long(), torch.tensor(window, device="cuda", dtype=torch.int32)).backward()
        torch.compiler.set_stance("fail_on_recompile")


def test_the_benchmark_sees_the_kernels(tmp_path):
    """Small settings: each part of the step has kernels of its own, and they leave a gap."""
    path = tmp_path / "bench.json"
    done = subprocess.run([sys.executable, SCRIPT, "--repeat=2", f"--json={path}", *SMALL], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {name: figure["value"] for name, figure in json.loads(path.read_text())["figures"].items()}
    parts = {name: milliseconds for name, milliseconds in figures.items() if name.startswith("part: ")}
    assert len(parts) == 9 and all(milliseconds > 0 for milliseconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(figures["parts: step, window 256"])
    assert figures["peak memory reserved, training"] >= figures["peak memory allocated, training"] > 1
