"""What a plan assumes: the machine, and the lengths that a configuration does not say."""

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True)
class Cluster:
    """memory: of a GPU, in bytes. overhead: bytes a GPU for the CUDA context, NCCL's buffers, kernels' workspaces and what the
    allocator cannot use. imbalance: tokens of the rank whose experts get most, over the mean."""

    nodes: int
    gpus: int
    memory: float = 80 * GIB
    overhead: float = 6 * GIB
    imbalance: float = 1.5
    prompt_tokens: int = 1024

    @property
    def world(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Speeds:
    """What the estimate of a step's time is made with: an H100's published figures, times a share that such runs are usually
    seen to reach. Only their ratios matter to a ranking. Bytes and operations a second and GPU; seconds."""

    compute: float = 990e12 * 0.4  # dense bfloat16
    memory: float = 3.35e12 * 0.7
    inside_node: float = 450e9 * 0.7  # NVLink, one direction
    between_nodes: float = 50e9 * 0.7  # one 400 Gb/s adapter a GPU
    collective: float = 20e-6  # latency of one inside a node
    collective_between: float = 60e-6  # more of it, for each doubling of the nodes that take part
    layer: float = 1e-3  # launching a layer's kernels from Python, once a decoding step
