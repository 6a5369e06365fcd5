"""Shape and type checks of the pure modules, switched on before anything imports them; small inputs for the losses."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from jaxtyping import install_import_hook
from torch import Tensor

if TYPE_CHECKING:
    from moe_rl.algorithms import LossInputs

install_import_hook(
    [
        "moe_rl.metrics",
        "moe_rl.algorithms",
        "moe_rl.advantages",
        "moe_rl.batching",
        "moe_rl.drift.metrics",
        "moe_rl.drift.sums",
        "models.routes",
    ],
    "beartype.beartype",
)
torch.set_num_threads(1)

MakeInputs = Callable[..., "LossInputs"]


@pytest.fixture(scope="session")
def make_inputs() -> MakeInputs:
    """Loss inputs from each sequence's token log-ratios (train - old); train_logprobs is a leaf with gradient.

    masked: places in the packed stream. optional: ref_logprobs, rollout_logprobs, entropy, as lists over the stream.
    """
    from moe_rl.algorithms import LossInputs

    def make(
        log_ratios: Sequence[Sequence[float]],
        advantages: Sequence[float],
        masked: Sequence[int] = (),
        dtype: torch.dtype = torch.float64,
        **optional: Sequence[float],
    ) -> "LossInputs":
        flat = [value for sequence in log_ratios for value in sequence]
        old = torch.full((len(flat),), -1.5, dtype=dtype)
        train = (old + torch.tensor(flat, dtype=dtype)).requires_grad_()
        mask = torch.ones(len(flat), dtype=torch.bool)
        mask[list(masked)] = False
        belongs = [i for i, sequence in enumerate(log_ratios) for _ in sequence]
        tensors: dict[str, Tensor] = {name: torch.tensor(values, dtype=dtype) for name, values in optional.items()}
        return LossInputs(
            train_logprobs=train,
            old_logprobs=old,
            advantages=torch.tensor(advantages, dtype=dtype),
            sequence=torch.tensor(belongs, dtype=torch.int64),
            mask=mask,
            **tensors,
        )

    return make
