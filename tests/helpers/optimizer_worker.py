"""Run by torchrun, with dtypes as its arguments: some steps of several optimizers on this rank's
part of the micro-batches, with a save and a restore in the middle, against one rank that has all
micro-batches. The ranks exchange by gloo, and by collectives that are as early or as late as NCCL's
may be, with the same bits. On GPUs they exchange by NCCL."""

import dataclasses
import functools
import os
import sys
from unittest import mock
import torch
import torch.distributed as dist
from helpers.collectives import Collectives
from torch.utils._pytree import tree_map
import train_gpt
from train_gpt import (PRESETS, Adam, Muon, World, gather_training_state, load_training_state,
                       train_step, world_of_this_process)

MICRO_BATCHES = 24
HP = dataclasses.replace(PRESETS["demo"], num_iterations=8, cooldown_frac=1.0, lr_floor=0.1,
                         micro_batches=MICRO_BATCHES, muon_momentum_start=0.9,
                         muon_momentum_end=0.9, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-10)
SHAPES = [(3, 8, 8)] * 5 + [(8, 24)] * 2 + [(16, 8), (60, 8), (24,), (5,), (), (50, 2)]
SHAPES += 3 * [(6, 4)]

class Whitened(Muon):
    """Preconditioned as in Shampoo, so with state in shapes that are not the parameters'."""
    def __init__(self, params, hp, world, lr):
        super().__init__(params, hp, world, lr)
        del self.state["momentum"]
        n, rows, _ = self.gradients.shape
        self.state["left"] = torch.zeros(n, rows, rows, device=world.device)
    def compute_update(self, gradients, step):
        left = self.world.shard(self.state["left"]).lerp_(gradients @ gradients.mT, 0.1)
        return torch.linalg.solve(left + 0.1 * torch.eye(len(left[0])).to(left.device), gradients)

def build(hp, world, seed):
    torch.manual_seed(seed)
    model = torch.nn.ParameterDict({f"p{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)})
    model.to(world.device)
    def of(kind, numbers, *options, **more):
        return kind({f"p{i}": model[f"p{i}"] for i in numbers}, hp, world, *options, **more)
    return model, [
        of(Muon, range(5), 0.05), of(Muon, (5, 6), 0.03), of(Muon, (7,), 0.04),
        of(Adam, (8,), 0.01, betas=(0.7, 0.9)),
        of(Adam, (9, 10, 11), 0.02), of(Whitened, (13, 14, 15), 0.02),
        of(Adam, (12,), 0.01)]  # whose 50 rows cannot be divided among 3

def take_steps(model, optimizers, steps, mine=range(MICRO_BATCHES)):
    """Steps on the gradients of those micro-batches that are this rank's. The state after them."""
    for step in steps:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for micro_batch in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(100 * step + micro_batch)
            for p in model.parameters():
                gradient = torch.randn(p.shape, generator=generator)
                if micro_batch in mine:
                    p.grad += (gradient / MICRO_BATCHES).to(p.device)
        # What train_step does after its micro-batches, of which it gets none here.
        train_step(model, [], optimizers, step, HP, optimizers[0].world)
    with mock.patch.object(train_gpt, "dist", dist):
        state = gather_training_state(model, optimizers)
    return tree_map(lambda x: x.to("cpu", copy=True), state)

assert_same = functools.partial(torch.testing.assert_close, rtol=0.0, atol=0.0)

def check(hp, world):
    # In bfloat16 each rank rounds its gradients.
    close = (dict(rtol=1e-4, atol=1e-5) if hp.dtype == "float32" else dict(rtol=0.01, atol=0.02))
    share = MICRO_BATCHES // world.size
    mine = range(world.rank * share, (world.rank + 1) * share)
    # Four steps, by one rank and by all together, whatever their collectives are like.
    want = take_steps(*build(hp, ALONE, seed=0), range(4))
    got = None
    stand_ins = [Collectives(world, late) for late in (True, False) if world.device.type == "cpu"]
    for collectives in (*stand_ins, dist):
        train_gpt.dist = collectives
        ranks = build(hp, world, seed=0)
        saved = take_steps(*ranks, range(2), mine)
        before, got = got, take_steps(*ranks, range(2, 4), mine)
        assert_same(got, before or want, **({} if before else close))
        if collectives is not dist:
            assert collectives.started > 30 and not collectives.unwaited, "one was not waited for"
    owned = {kind: {int(name[1:]) for name in tensors} for kind, tensors in got.items()}
    adam = set(range(8, 13))
    assert owned == {
        "model": set(range(len(SHAPES))), "Muon momentum": set(range(8)), "Adam mean": adam,
        "Adam mean_square": adam, "Whitened left": {13, 14, 15}}, owned
    # Every rank has the very same bits.
    everywhere = [None] * world.size
    dist.all_gather_object(everywhere, got)
    for others in everywhere:
        assert_same(others, got)
    # From what was saved in the middle, others go on to the same bits. Rank 0 alone has it.
    ranks = build(hp, world, seed=1 + world.rank)
    take_steps(*ranks, range(1), mine)  # leaves a state of its own to be overwritten
    load_training_state(saved if world.rank == 0 else None, *ranks, world)
    assert_same(take_steps(*ranks, ()), saved)
    assert_same(take_steps(*ranks, range(2, 4), mine), got)
    # And so does one rank from what several have saved.
    alone = build(hp, ALONE, seed=9)
    load_training_state(saved, *alone, ALONE)
    assert_same(take_steps(*alone, range(2, 4)), want, **close)

world = world_of_this_process()
gpu = world.device if world.device.type == "cuda" else None
dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu)
ALONE = World(0, 1, world.device)
for dtype in sys.argv[1:]:
    check(dataclasses.replace(HP, dtype=dtype), world)
    print(f"rank {world.rank}: equal", flush=True)
dist.barrier()
os._exit(0)
