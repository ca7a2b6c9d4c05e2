"""Run by torchrun: some steps of Muon and Adam on this rank's share of the gradients against one process with all."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt import Adam, Muon, start_ranks  # noqa: E402

ranks = start_ranks()


def build(rank, world_size):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s)) for s in [(24, 8)] * 5 + [(8, 24)] * 2 + [(16, 8), (50, 8), (3,)]]
    params[0].row_split = params[1].row_split = (12, 6, 6)
    groups = [dict(params=[p], peak_lr=0.01, betas=(0.8, 0.95), eps=1e-10) for p in params[8:]]
    return params, Muon(params[:8], rank, world_size, torch.float32), Adam(groups, world_size)


def steps(params, muon, adam, mine):
    for step in range(4):
        for micro_batch in range(24):
            generator = torch.Generator().manual_seed(100 * step + micro_batch)
            for p in params:
                grad = torch.randn(p.shape, generator=generator)
                if micro_batch in mine:
                    p.grad += grad
        for grads in (g["grads"] for g in muon.groups + adam.groups):
            grads.div_(24)
        muon.reduce_gradients()
        adam.reduce_gradients()
        muon.step(0.05, 0.9, 0.8)
        adam.step(0.5 ** step)
    return params


share = 24 // ranks.world_size
got = steps(*build(ranks.rank, ranks.world_size), range(ranks.rank * share, (ranks.rank + 1) * share))
want = steps(*build(0, 1), range(24))
for p, q in zip(got, want):
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
for p in got:  # and every rank has the very same bits
    first = p.detach().clone()
    if ranks.world_size > 1:
        dist.broadcast(first, src=0)
    assert torch.equal(first, p)
print(f"rank {ranks.rank}: equal", flush=True)
dist.barrier()
os._exit(0)
