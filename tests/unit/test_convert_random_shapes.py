"""Log-probabilities of checkpoints in random shapes are transformers'.

Both are compared with transformers in float64. How far float32 lies from it differs by shape (5e-7 to 2e-5 for transformers
itself, over 300 shapes), so ours is allowed a multiple of theirs, and no less than what small sums differ by.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.convert import huggingface, live
from models.model import MoEModel
from models.stream import pack_sequences
from parallel.config import ParallelConfig
from parallel.groups import Groups, process_groups
from parallel.runtime import started
from tests.hf_checkpoints import make
from tests.random_shapes import draw

FLOOR, MULTIPLE = 2e-5, 8


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with started(seed=0, threads=1, timeout_seconds=60), process_groups(ParallelConfig()) as groups:
        yield groups


@torch.no_grad()
def transformers_says(theirs: Any, rows: list[list[int]]) -> Tensor:
    theirs.set_attn_implementation("eager")
    theirs.config._experts_implementation = "eager"  # its grouped product refuses narrow experts
    scored = []
    for row in rows:
        logprobs = theirs(torch.tensor([row])).logits[0].log_softmax(-1)[:-1]
        scored.append(logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    return torch.cat(scored)


@pytest.mark.parametrize("seed", range(18))
def test_log_probabilities(seed: int, groups: Groups, tmp_path: Path) -> None:
    family, changes = draw(seed)
    theirs = make(family, tmp_path, seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, changes["vocab_size"], (n,), generator=generator).tolist() for n in (29, 12)]
    model = MoEModel(ModelConfig(**huggingface.describe(tmp_path).values), groups, torch.device("cpu"), 0)
    live.load(tmp_path, model)
    (scores,) = model.score([pack_sequences(rows, [1, 1], 39, torch.device("cpu"))])
    single = transformers_says(theirs, rows)
    exact = transformers_says(theirs.double(), rows)
    noise = float((single - exact).abs().max())
    assert float((scores.logprobs - exact).abs().max()) < FLOOR + MULTIPLE * noise, (family, changes)
