"""Newton-Schulz, Muon and Adam against oracles, on one rank and on several; what is saved."""

import dataclasses
import re
from types import SimpleNamespace
from unittest.mock import Mock, call
import pytest
import torch
from conftest import ROOT, run_helper
from test_model import ALONE, WINDOW, sequence, tiny_model
from torch import nn
import train_gpt
from train_gpt import PRESETS, Adam, Muon, gather_training_state, newton_schulz, train_step

pytestmark = pytest.mark.quick
HP = dataclasses.replace(PRESETS["demo"], dtype="float32", cooldown_frac=0.0)

def take_step(optimizer, step=0):
    with torch.no_grad():
        optimizer.begin()
        optimizer.update(step)
        optimizer.finish(step)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, cols", [(64, 64), (256, 64), (64, 256)])
def test_singular_values_of_an_update_lie_in_the_band(rows, cols, dtype):
    x = torch.randn(3, rows, cols, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e-4  # the scale of a gradient does not matter
    x[2] *= torch.logspace(0, -1.5, cols)  # neither does an uneven one, much
    u = newton_schulz(x.to(dtype))
    assert u.shape == x.shape and u.dtype == dtype
    values = torch.linalg.svdvals(u.float())
    assert float(values.max()) < 1.3 and float(values[:2].median()) > 0.6
    assert float((values[:2] > 0.5).float().mean()) > 0.95
    assert not newton_schulz(torch.zeros_like(x)).any()

def test_agrees_with_the_muon_of_torch(monkeypatch):
    """On the same gradients for several steps, whose rate and momentum change; torch's own takes
    one matrix at a time, where ours may have a stack, and works in bfloat16."""
    torch.manual_seed(0)
    scales = [1.0, 1.0, 0.5, 0.25, 0.125, 0.1]
    monkeypatch.setattr(train_gpt, "lr_factor", lambda step, hp: scales[step])
    def matrices(tensors):
        return [matrix for x in tensors for matrix in x.view(-1, *x.shape[-2:])]
    shapes = (32, 16), (16, 32), (32, 16), (16, 16), (3, 16, 8), (3, 16, 8)
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(matrix.detach().clone()) for matrix in matrices(ours)]
    oracle = torch.optim.Muon(theirs, nesterov=True, weight_decay=0.0, ns_steps=5, eps=1e-7,
                              ns_coefficients=(3.4445, -4.775, 2.0315))
    hp = dataclasses.replace(HP, dtype="bfloat16", muon_momentum_start=0.8, muon_momentum_end=0.9,
                             muon_momentum_steps=4)
    muons = [Muon({str(i): ours[i] for i in same_shape}, hp, ALONE, 0.05)
             for same_shape in ((0, 2), (1,), (3,), (4, 5))]
    for step, scale in enumerate(scales):
        oracle.param_groups[0]["lr"] = 0.05 * scale
        oracle.param_groups[0]["momentum"] = min(0.9, 0.8 + 0.025 * step)
        for p in ours:
            p.grad = torch.randn_like(p)
        for q, gradient in zip(theirs, matrices([p.grad for p in ours]), strict=True):
            q.grad = gradient.clone()
        for muon in muons:
            take_step(muon, step)
        oracle.step()
        for matrix, q in zip(matrices(ours), theirs):
            # Updates of size 0.05 and less, each rounded to bfloat16
            torch.testing.assert_close(matrix, q, rtol=0, atol=0.005)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_is_torchs(dtype, monkeypatch):
    torch.manual_seed(0)
    scales = [1.0, 1.0, 0.5, 0.25]
    monkeypatch.setattr(train_gpt, "lr_factor", lambda step, hp: scales[step])
    ours = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((30, 8), (5,), ())]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    hp = dataclasses.replace(HP, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-7)
    adams = [Adam({"0": ours[0]}, hp, ALONE, lr=0.1),
             Adam({"1": ours[1], "2": ours[2]}, hp, ALONE, lr=0.02, betas=(0.5, 0.9))]
    shared = dict(eps=1e-7, weight_decay=0.0, fused=True)
    references = [torch.optim.AdamW(theirs[:1], lr=0.1, betas=(0.8, 0.95), **shared),
                  torch.optim.AdamW(theirs[1:], lr=0.02, betas=(0.5, 0.9), **shared)]
    for step, scale in enumerate(scales):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.clone()
        for adam, reference in zip(adams, references):
            reference.param_groups[0]["lr"] = adam.peak_lr * scale
            take_step(adam, step)
            reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    state = gather_training_state(nn.Module(), adams)
    for i, q in enumerate(theirs):
        moments = references[i > 0].state[q]
        assert torch.equal(state["Adam mean"][str(i)], moments["exp_avg"])
        assert torch.equal(state["Adam mean_square"][str(i)], moments["exp_avg_sq"])

def test_a_step_takes_the_mean_gradient_of_its_micro_batches():
    model, hp = tiny_model(micro_batches=3)
    batches = [sequence(seed=seed) for seed in range(3)]
    params = dict(model.named_parameters())
    mean = sum(model(*batch, WINDOW) for batch in batches) / (3 * 256)
    wanted = torch.autograd.grad(mean, list(params.values()))
    gradients = {}
    optimizer = Mock()
    optimizer.begin.side_effect = lambda: gradients.update((name, p.grad.clone())
                                                           for name, p in params.items())
    loss = train_step(model, batches, [optimizer], 4, hp, ALONE)
    assert optimizer.method_calls == [call.begin(), call.update(4), call.finish(4)]
    assert float(loss) == pytest.approx(float(mean.detach()), abs=1e-6)
    assert not loss.requires_grad, "it would keep the activations"
    for name, want in zip(params, wanted):
        torch.testing.assert_close(gradients[name], want, rtol=1e-5, atol=1e-6)
        assert params[name].grad is None and want.any(), name

@pytest.mark.parametrize("kind, state", [
    (Adam, [torch.zeros(4, 4)]),  # one for two parameters
    (Adam, [torch.zeros(4), torch.zeros(4)]),  # of a matrix's rows, but World shards no vector
    (Muon, torch.zeros(3, 4, 1))])  # a stack of another length than the parameters'
def test_a_state_that_would_not_be_saved_whole_is_refused(kind, state):
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})
    optimizer = kind(dict(model.named_parameters()), HP, ALONE, lr=0.1)
    optimizer.state["more"] = torch.zeros(2, 4, 1)  # a row of which is one parameter's
    saved = gather_training_state(model, [optimizer])
    assert saved[f"{kind.__name__} more"]["b.weight"].shape == (4, 1)
    optimizer.state["more"] = state
    with pytest.raises((AssertionError, ValueError)):
        gather_training_state(model, [optimizer])

@pytest.mark.method
@pytest.mark.parametrize("size, most", [(8, 691e6), (16, 691e6), (6, 655e6)])
def test_a_step_of_the_speedrun_exchanges_little(size, most, monkeypatch):
    """Each exchange takes some 20 microseconds of a step, however small it is."""
    reduced, gathered = [], []
    monkeypatch.setattr(train_gpt, "dist", SimpleNamespace(  # counts bytes, and exchanges nothing
        reduce_scatter_single=lambda local, whole, async_op: reduced.append(whole.nbytes),
        all_gather_single=lambda whole, local, async_op: gathered.append(whole.nbytes),
        all_reduce=lambda whole, async_op: reduced.append(whole.nbytes)))
    hp = dataclasses.replace(PRESETS["speedrun"], dtype="bfloat16")
    world = train_gpt.World(3, size, torch.device("meta"))
    with world.device:
        model = train_gpt.GPT(hp, torch.bfloat16, flex=True)
    optimizers = train_gpt.build_optimizers(model, hp, world)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    train_step(model, [], optimizers, 0, hp, world)
    assert len(reduced + gathered) <= 20
    assert max(sum(reduced), sum(gathered)) < most
    if size in (8, 16):
        page = (ROOT / "records" / "cluster.md").read_text()
        rows = re.findall(r"(?m)^\| .+ \| (\d+) \| ([\d.]+) \|$", page)
        told = sorted(float(each) for count, each in rows for _ in range(int(count)))
        assert told == pytest.approx(sorted(x / 1e6 for x in gathered), abs=0.051)
        assert "these are 690 MB each way" in page

def test_an_update_that_lacks_a_dimension_is_refused():
    """It would be broadcast."""
    class Norms(Muon):
        def compute_update(self, gradients, step):
            return gradients.norm(dim=-1, keepdim=True)
    p = nn.Parameter(torch.zeros(4, 4))
    p.grad = torch.ones(4, 4)
    with pytest.raises(AssertionError, match=r"\[1, 4, 1\].* for .*\[1, 4, 4\]"):
        take_step(Norms({"p": p}, HP, ALONE, lr=0.1), 0)

def test_distributed_optimizers_equal_a_single_rank():
    """Some have none of the matrices. Collectives come early or late, as NCCL's may."""
    assert run_helper("optimizer_worker.py", "float32", "bfloat16", ranks=3).count("equal") == 6
