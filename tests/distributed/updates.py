"""Optimizer steps on random sequences."""

import torch
from torch import Tensor

from models.model import MoEModel, Scores
from models.optimizer import Optimizer
from models.stream import pack_sequences


def update(model: MoEModel, optimizer: Optimizer, seed: int) -> float:
    """One step on one sequence, the same on every data-parallel rank. Returns its gradient norm."""
    sequence = torch.randint(0, 259, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    stream = pack_sequences([sequence], [2], 8, model.device)

    def loss(scores: Scores) -> tuple[Tensor, None]:
        return -scores.logprobs.sum() / 7, None

    optimizer.zero_grad()
    model.accumulate_gradients([stream], [loss], stream.real)
    return optimizer.step()
