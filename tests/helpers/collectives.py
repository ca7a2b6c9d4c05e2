"""Collectives that behave as NCCL's may, on gloo.

NCCL reads and writes at any time between the start of a collective and the wait for it, and gloo
right away. Here each collective runs either at its start or, in the order of their starts, not
before one is waited for; meanwhile what it will write is NaN."""

from types import SimpleNamespace
import torch
import torch.distributed as dist

class Collectives:
    def __init__(self, world, late):
        self.world = world
        self.late = late
        self.pending = []  # collectives that have been started, in their order
        self.started = 0
        self.unwaited = set()  # those that nobody has waited for, even if they have run
    def start(self, run, poison):
        self.started += 1
        self.unwaited.add(run)
        if self.late:
            poison()
            self.pending.append(run)
        else:
            run()
        def wait():
            self.unwaited.discard(run)
            while run in self.pending:
                self.pending.pop(0)()
        return SimpleNamespace(wait=wait)
    def check(self, whole, local):
        """NCCL's rules on layouts. A part inside the whole lies where this process's part is."""
        assert whole.is_contiguous() and local.is_contiguous() and whole.dtype == local.dtype
        assert whole.numel() == local.numel() * self.world.size
        if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
            offset = local.data_ptr() - whole.data_ptr()
            assert offset == self.world.rank * local.numel() * local.element_size(), "another part"
    def reduce_scatter_single(self, local, whole, async_op):
        self.check(whole, local)
        return self.start(lambda: dist.reduce_scatter_single(local, whole),
                          lambda: local.fill_(torch.nan))
    def all_gather_single(self, whole, local, async_op):
        self.check(whole, local)
        mine = local.clone()
        def poison():
            whole.fill_(torch.nan)
            local.copy_(mine)  # which may be a part of it
        return self.start(lambda: dist.all_gather_single(whole, local), poison)
    def all_reduce(self, whole, async_op):
        assert whole.is_contiguous()
        mine = whole.clone()
        def run():
            whole.copy_(mine)
            dist.all_reduce(whole)
        return self.start(run, lambda: whole.fill_(torch.nan))
