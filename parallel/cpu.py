"""Everything that lets Megatron-Core 0.19 run without CUDA. Never applied where CUDA is present.

Megatron names torch.cuda in places where only the device is meant. Each patch below gives its reason; all of them can go
when Megatron-Core asks for the accelerator by `torch.accelerator` or takes the device from its inputs.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")


class _Stream:
    """The one stream of a CPU: work is done when the call returns."""

    device = CPU

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> "_Stream":
        return self


class _TorchOnCpu(ModuleType):
    """The torch module, with `device="cuda"` read as "cpu" in the two factories that Megatron calls so."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device=CPU, **kwargs)

    @staticmethod
    def tensor(data: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, device=CPU, **kwargs)


def let_megatron_run_without_cuda() -> None:
    """Applies the patches once; does nothing where CUDA is present. Call it before megatron.core is imported."""
    if torch.cuda.is_available() or torch.cuda.Stream is _Stream:
        return
    _patch_torch_cuda()
    _patch_megatron()
    # Megatron fuses small functions with torch.compile, which on a CPU calls a C++ compiler that may not be there
    torch._dynamo.config.disable = True


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    # rotary embedding, router, dispatchers, pipeline and DDP buffers allocate on "the current device"
    cuda.current_device = lambda: CPU
    # the all-to-all dispatcher copies its counts on a side stream
    cuda.Stream = _Stream
    cuda.current_stream = lambda device=None: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    # pipeline communication waits for the device
    cuda.synchronize = lambda device=None: None
    # the random-number tracker and activation recompute save, fork and restore the device's generator
    cuda.manual_seed = lambda seed: None
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()


def _patch_megatron() -> None:
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.utils as utils

    patched: Any = (clip_grads, optimizer, schedules, utils)
    for module in patched:  # literal device="cuda" for counters, norms and flags
        module.torch = _TorchOnCpu()
    setter: Any = random
    setter._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    setter._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # the all-to-all dispatcher wants its split sizes as numpy; Megatron converts them only when they lie on a GPU
    move: Any = dispatcher
    move.maybe_move_tensor_to_cpu = _as_split_sizes


def _as_split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


@contextlib.contextmanager
def tensors_answer_as_cuda() -> Iterator[None]:
    """Within it CPU tensors say 'torch.cuda.FloatTensor' of themselves, by which Megatron's optimizers sort parameters, and
    `.cuda()` gives the tensor back, to which they move state before gathering it."""
    if torch.cuda.is_available():
        yield
        return
    tensor: Any = torch.Tensor
    plain_type, plain_cuda = tensor.type, tensor.cuda

    def named_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain_type(self, dtype, *args, **kwargs)
        return "torch.cuda." + plain_type(self).rsplit(".", 1)[1]

    tensor.type, tensor.cuda = named_type, lambda self, *args, **kwargs: self
    try:
        yield
    finally:
        tensor.type, tensor.cuda = plain_type, plain_cuda
