"""The memory of a run on GPUs, told before it runs: what is kept from step to step, and the most
that a compiled program takes, as Inductor estimates it when it generates the program."""

import contextlib

import torch
from torch import Tensor
from torch._inductor import memory
from torch._inductor.codegen import wrapper
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from train_gpt import GPT, Hyperparameters, World, build_optimizers


def kept_bytes(hp: Hyperparameters, processes: int) -> int:
    """What one process keeps from step to step: weights, tables, optimizers, and the gradients,
    which accumulate where it has several micro-batches. (With one, they come and go within what is
    estimated for the backward pass.)"""
    nowhere = torch.device("meta")
    with nowhere:
        model = GPT(hp, getattr(torch, hp.dtype), flex=True)
    optimizers = build_optimizers(model, hp, World(0, processes, nowhere))
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    for optimizer in optimizers:
        tensors += [x for x in tree_leaves(list(vars(optimizer).values())) if isinstance(x, Tensor)]
        tensors += [x for x in tree_leaves(optimizer.state) if isinstance(x, Tensor)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    total = sum(storages.values())
    if hp.micro_batches > processes:
        total += sum(p.nbytes for p in parameters)
    return total


@contextlib.contextmanager
def estimated_peaks():
    """A list to which Inductor's estimate is added, in bytes, for each program that it generates
    meanwhile: its inputs and outputs, without the weights, and what it allocates.

    Inductor estimates before it knows what stays within a kernel. It counts the float32 gradient of
    all logits, 9.2 GiB at full size, which a kernel turns into FP8 in its registers. Here such
    buffers count nothing."""
    peaks = []
    plain = wrapper.EfficientPeakEstimate.__init__

    def noted(self):
        plain(self)
        graph = wrapper.V.graph
        nodes = graph.scheduler.nodes
        for buffer in (buffer for node in nodes for buffer in node.get_outputs()):
            if buffer.get_name() in graph.removed_buffers:
                buffer.mpi_buffer.size_alloc = buffer.mpi_buffer.size_free = 0
        inputs = memory.get_freeable_input_buf(nodes, OrderedSet(graph.graph_inputs))
        outputs = OrderedSet(graph.get_output_names())
        peaks.append(memory.estimate_peak_memory(nodes, inputs, outputs)[0])

    wrapper.EfficientPeakEstimate.__init__ = noted
    try:
        yield peaks
    finally:
        wrapper.EfficientPeakEstimate.__init__ = plain
