"""Compiling a function of fake tensors that the caller has made."""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextlib.contextmanager
def mode_of(inputs):
    """Around a backend of torch.compile: lets it compile in the mode of the fake tensors among its
    inputs. Before 2.11, torch makes a mode of its own, and refuses tensors of another one."""
    modes = {x.fake_mode for x in inputs if isinstance(x, FakeTensor)}
    context = torch._guards.TracingContext.try_get()
    if not modes or context is None:
        yield
        return
    (mode,) = modes
    before = context.fake_mode
    context.fake_mode = mode
    try:
        yield
    finally:
        context.fake_mode = before
