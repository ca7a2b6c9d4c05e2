"""Newton-Schulz, Muon and Adam: against oracles, in one process and (with gloo, by torchrun) in
several."""

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from test_model import ALONE, WINDOW, sequence, tiny_model

import train_gpt
from train_gpt import (PRESETS, Adam, Muon, Optimizer, Ranks, UserError, build_optimizers,
                       load_training_state, newton_schulz, orthogonalize, train_step,
                       training_state)

HP = dataclasses.replace(PRESETS["demo"], dtype="float32", cooldown_frac=0.0, muon_beta2=0.0)


def update(optimizer, step=0):
    """One step of one optimizer, on the gradients that its parameters have."""
    with torch.no_grad():
        optimizer.send_gradients()
        optimizer.compute(step)
        optimizer.apply(step)


def with_momentum(momentum, **changes):
    return dataclasses.replace(HP, muon_momentum_start=momentum, muon_momentum_end=momentum,
                               **changes)


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
    before = torch.linalg.svdvals(x[2])
    assert float(before.max() / before.min()) > 5  # what went in was far from flat


def test_zero_matrices_stay_zero():
    assert not newton_schulz(torch.zeros(2, 8, 8)).any()


def test_a_batch_is_its_matrices_one_by_one():
    x = torch.randn(12, 32, 16)
    together = newton_schulz(x)
    for i in range(12):
        alone = newton_schulz(x[i:i + 1])[0]
        torch.testing.assert_close(together[i], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts, cols", [(1, 32), (3, 32), (3, 16), (2, 64)])
def test_parts_of_a_merged_matrix_are_orthogonalized_by_themselves(parts, cols):
    x = torch.randn(2, 96, cols)
    got = orthogonalize(x, parts)
    assert got.shape == x.shape
    for part, want in zip(got.chunk(parts, dim=1), x.chunk(parts, dim=1)):
        scale = max(1, part.size(1) / cols) ** 0.5
        torch.testing.assert_close(part, newton_schulz(want) * scale, rtol=1e-4, atol=1e-5)


def test_agrees_with_the_muon_of_torch():
    """Same gradients for several steps; torch's own takes one 2-D tensor at a time and works in
    bfloat16."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(s)) for s in ((32, 16), (16, 32), (32, 16), (16, 16))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    oracle = torch.optim.Muon(theirs, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0,
                              ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5, eps=1e-7)
    hp = with_momentum(0.9, dtype="bfloat16")
    table = [Muon({str(i): ours[i] for i in same_shape}, 0.05, hp, ALONE)
             for same_shape in ((0, 2), (1,), (3,))]
    for _ in range(6):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        before = [p.detach().clone() for p in ours]
        for muon in table:
            update(muon)
        oracle.step()
    for p, q, old in zip(ours, theirs, before):
        assert not torch.equal(p, old)
        # 6 updates of size 0.05, each rounded to bfloat16
        torch.testing.assert_close(p, q, rtol=0, atol=0.01)


def test_nesterov_momentum_by_hand(monkeypatch):
    monkeypatch.setattr(train_gpt, "orthogonalize", lambda x, parts: x)
    p = torch.nn.Parameter(torch.zeros(2, 2))
    hp = dataclasses.replace(HP, muon_momentum_start=0.85, muon_momentum_end=0.95,
                             muon_momentum_steps=2)
    muon = Muon({"p": p}, 0.1, hp, ALONE)
    average, want = 0.0, 0.0
    for step, g in enumerate([1.0, -2.0, 3.0]):
        momentum = 0.85 + 0.05 * step
        p.grad = torch.full((2, 2), g)
        update(muon, step)
        average = momentum * average + (1 - momentum) * g
        want -= 0.1 * (momentum * average + (1 - momentum) * g)
    torch.testing.assert_close(p.detach(), torch.full((2, 2), want))


def test_normuon_evens_out_rows_and_keeps_norms():
    x = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1, 2, 4, 0.1, 1, 0])[:, None]
    squares = torch.zeros(2, 6, 1)
    even = train_gpt.even_rows(x, squares, 0.9)
    rows = even.norm(dim=2)
    torch.testing.assert_close(rows[:, :5], rows[:, :1].expand(2, 5))
    assert not rows[:, 5].any()  # no gradient, no update
    torch.testing.assert_close(even.norm(dim=(1, 2)), x.norm(dim=(1, 2)))
    torch.testing.assert_close(F.normalize(even[:, :5], dim=2), F.normalize(x[:, :5], dim=2))
    assert not train_gpt.even_rows(torch.zeros(2, 6, 40), torch.zeros(2, 6, 1), 0.9).any()


def test_normuon_takes_q_k_and_v_as_one():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(48, 16))
    muon = Muon({"p": p}, 1.0, with_momentum(0.0, muon_beta2=0.9), ALONE, 3)
    p.grad = torch.randn(48, 16)
    p.grad[16:32, 2:] = 0  # a K whose update has two directions only
    plain = orthogonalize(p.grad[None].clone(), 3)[0]
    update(muon)
    torch.testing.assert_close(p.detach().norm(), plain.norm())
    torch.testing.assert_close(p.detach().norm(dim=1), (plain.norm() / 48**0.5).expand(48))


def test_normuon_by_the_papers_formulas(monkeypatch):
    """Algorithm 1 of arXiv:2510.05491 for one matrix, with the norm of the orthogonalized update in
    place of 0.2 sqrt(rows x cols)."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(16, 8))
    muon = Muon({"p": p}, 0.1, with_momentum(0.9, muon_beta2=0.8), ALONE)
    plain = []

    def seen(x, parts):
        plain.append(orthogonalize(x, parts))
        return plain[-1]

    monkeypatch.setattr(train_gpt, "orthogonalize", seen)
    v, want = torch.zeros(16), torch.zeros(16, 8)
    for _ in range(5):
        p.grad = torch.randn(16, 8) * torch.arange(1, 17)[:, None]
        update(muon)
        o = plain[-1][0]
        v = 0.8 * v + 0.2 * o.square().mean(1)
        even = o / v.sqrt()[:, None]
        want -= 0.1 * o.norm() * even / even.norm()
    torch.testing.assert_close(p.detach(), want)


@pytest.mark.parametrize("shapes", [((4, 8), (8, 4)), ((4,), (4,)), ((2, 4, 8),)],
                         ids=["two shapes", "vectors", "a batch"])
def test_muon_refuses_what_is_not_matrices_of_one_shape(shapes):
    params = {f"p{i}": torch.nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    with pytest.raises(UserError, match="matrices of one shape") as caught:
        Muon(params, 0.1, HP, ALONE)
    assert all(name in str(caught.value) for name in params) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_is_torchs(dtype, monkeypatch):
    torch.manual_seed(0)
    scales = [1.0, 1.0, 0.5, 0.25]
    monkeypatch.setattr(train_gpt, "lr_scale", lambda step, hp: scales[step])
    values = [torch.randn(shape, dtype=dtype) for shape in ((30, 8), (5,), (2, 2))]
    ours = [torch.nn.Parameter(value.clone()) for value in values]
    theirs = [torch.nn.Parameter(value.clone()) for value in values]
    hp = dataclasses.replace(HP, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-7)
    table = [Adam({"0": ours[0], "1": ours[1]}, 0.1, hp, ALONE),
             Adam({"2": ours[2]}, 0.02, hp, ALONE)]
    groups = [dict(params=theirs[:2], lr=0.1), dict(params=theirs[2:], lr=0.02)]
    reference = torch.optim.Adam(groups, fused=True, betas=(0.8, 0.95), eps=1e-7)
    for step, scale in enumerate(scales):
        for group, peak in zip(reference.param_groups, (0.1, 0.02)):
            group["lr"] = peak * scale
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.clone()
        for adam in table:
            update(adam, step)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    state = training_state(torch.nn.Module(), table)
    for kind in ("exp_avg", "exp_avg_sq"):
        for i, q in enumerate(theirs):
            assert torch.equal(state[kind][str(i)], reference.state[q][kind]), kind


class Descent(Optimizer):
    """Plain gradient descent: no state, and not one line for ranks."""

    def update(self, grads, step):
        for p, grad in zip(self.mine, grads):
            p.sub_(self.lr * grad)


def test_a_step_follows_the_mean_gradient_of_its_micro_batches():
    """... and leaves no gradient to the next one."""
    model, hp = tiny_model(micro_batches=3, window_start=256)
    batches = [sequence(seed=seed) for seed in range(3)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = torch.stack([model(*batch, WINDOW) for batch in batches]).mean()
    gradients = dict(zip(before, torch.autograd.grad(mean, list(model.parameters()))))
    loss = train_step(model, batches, [Descent(dict(model.named_parameters()), 0.5, hp, ALONE)], 0,
                      hp, ALONE)
    assert float(loss) == pytest.approx(float(mean.detach()), abs=1e-6)
    for name, p in model.named_parameters():
        want = before[name] - 0.5 * gradients[name]
        torch.testing.assert_close(p.detach(), want, rtol=1e-5, atol=1e-6)
        assert p.grad is None and not torch.equal(p, before[name]), name


def test_the_models_table_has_a_batch_for_each_shape_of_matrices():
    model, hp = tiny_model()
    table = build_optimizers(model, hp, ALONE)
    muons = [row for row in table if isinstance(row, Muon)]
    assert [(len(row.params), row.parts) for row in muons] == [(3, 3), (3, 1), (4, 1), (4, 1)]
    assert {row.lr for row in muons} == {hp.muon_lr}
    adams = {frozenset(row.params): row.lr for row in table if isinstance(row, Adam)}
    assert adams == {
        frozenset({"lm_head.weight"}): hp.head_lr,
        frozenset({"embed.weight", "pair_embed.weight", "value_embeds.0.weight"}): hp.embed_lr,
        frozenset({"smear", "residual_mix", "value_mix", "skip_weights"}): hp.scalar_lr}


def test_a_state_that_is_restored_goes_on_to_the_same_bits():
    """From one model's table to another's, which has gone elsewhere."""
    (ours, hp), (theirs, _) = tiny_model(seed=1), tiny_model(seed=2)
    a, b = build_optimizers(ours, hp, ALONE), build_optimizers(theirs, hp, ALONE)
    for step in range(2):
        train_step(ours, [sequence(seed=step)], a, step, hp, ALONE)
        train_step(theirs, [sequence(seed=9)], b, step, hp, ALONE)
    state = training_state(ours, a)
    names = set(state["model"])
    assert set(state["exp_avg"]) | set(state["momentum"]) == names
    assert not set(state["exp_avg"]) & set(state["momentum"])
    load_training_state(state, theirs, b, ALONE)
    for step in range(2, 4):
        for model, table in ((ours, a), (theirs, b)):
            train_step(model, [sequence(seed=step)], table, step, hp, ALONE)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert torch.equal(p, q), name


def test_a_state_that_lacks_a_tensor_is_refused_by_its_name():
    model, hp = tiny_model()
    table = build_optimizers(model, hp, ALONE)
    for kind, name, found in (("momentum", "blocks.0.mlp.fc.weight", None),
                              ("exp_avg", "lm_head.weight", torch.zeros(3, 2))):
        state = training_state(model, table)
        if found is None:
            del state[kind][name]
        else:
            state[kind][name] = found
        with pytest.raises(UserError, match=f"{kind} of {name}") as caught:
            load_training_state(state, model, table, ALONE)
        assert "\n" not in str(caught.value)


class Traced:
    """A collective's handle that writes down when it is awaited."""

    def __init__(self, events, name):
        self.events = events
        self.name = name

    def wait(self):
        self.events.append(f"await {self.name}")


def test_what_one_row_sends_travels_while_another_computes(monkeypatch):
    """All gradients are on their way before the first update; what a row has updated is on its way
    before the next row computes, and awaited after the last one has."""
    events = []

    def traced(kind):
        def launch(*args, **kwargs):
            number = sum(event.startswith(f"launch {kind}") for event in events)
            events.append(f"launch {kind} {number}")
            return Traced(events, f"{kind} {number}")
        return launch

    monkeypatch.setattr(train_gpt.dist, "all_gather_single", traced("gather"))
    monkeypatch.setattr(train_gpt.dist, "reduce_scatter_single", traced("scatter"))
    monkeypatch.setattr(train_gpt.dist, "all_reduce", traced("reduce"))
    model, hp = tiny_model()
    ranks = Ranks(1, 4, torch.device("cpu"))
    optimizers = build_optimizers(model, hp, ranks)
    for i, optimizer in enumerate(optimizers):
        compute = optimizer.compute

        def traced_compute(step, i=i, compute=compute):
            events.append(f"begin {i}")
            compute(step)
            events.append(f"end {i}")
        monkeypatch.setattr(optimizer, "compute", traced_compute)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    train_step(model, [], optimizers, 0, hp, ranks)  # what follows the micro-batches
    assert len(set(events)) == len(events), "something is launched or awaited twice"
    launches = [event for event in events if event.startswith("launch")]
    assert {f"await{event[6:]}" for event in launches} <= set(events)
    first = events.index("begin 0")
    last = events.index(f"end {len(optimizers) - 1}")
    divided = {name for row in optimizers if not isinstance(row, Muon)
               for name, p in row.params.items() if len(p) % 4 == 0}
    assert "lm_head.weight" in divided and "skip_weights" not in divided
    muons = sum(isinstance(row, Muon) for row in optimizers)
    for kind in ("scatter", "gather"):
        assert sum(f"launch {kind}" in event for event in events) == muons + len(divided)
    for i, event in enumerate(events[:-2]):  # the last two are the loss, once all is launched
        if event.startswith(("launch scatter", "launch reduce", "await gather")):
            assert i < first if "launch" in event else i > last
        elif event.startswith(("await scatter", "await reduce", "launch gather")):
            assert first < i < last
    assert events[-1].startswith("await reduce")


@pytest.mark.parametrize("ranks, dtype", [(3, "float32"), (8, "float32"), (2, "bfloat16")])
def test_distributed_optimizers_equal_a_single_process(ranks, dtype):
    """5, 2 and 1 parameters of a shape: on 3 ranks a share is not full, on 8 most ranks own nothing
    of a shape. Saved in the middle, restored, and with an optimizer of another kind."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         str(ROOT / "tests" / "optimizer_worker.py"), dtype], capture_output=True, text=True,
        timeout=200)
    assert done.returncode == 0 and done.stdout.count("equal") == ranks, done.stdout + done.stderr
