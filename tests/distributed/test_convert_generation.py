"""The embedded engine's greedy responses are those of transformers' `generate`, in one process and in layouts.

The tokens must be equal one by one. What could part them is a near tie: at every step here the best token is ahead of the
second by at least MARGIN logits, over ten times what logits differ by (4e-5). Prompts are of unequal length, responses longer
than every window. `generate` takes one prompt at a time, the engine four.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.model import MoEModel
from moe_rl.rollouts.embedded import EmbeddedEngine
from moe_rl.rollouts.engine import Request
from moe_rl.types import Sampling
from parallel.config import ParallelConfig
from parallel.groups import process_groups
from parallel.runtime import Runtime
from tests.distributed.ranks import run_on_ranks
from tests.hf_checkpoints import FAMILIES, make
from tests.hf_variants import VARIANTS
from tests.parity import load, sequences

pytestmark = pytest.mark.distributed

MARGIN = 5e-4
PROMPTS, NEW = (9, 2, 17, 30, 5), 40
OTHERS = ["qwen2_moe, window", "mixtral, window", "deepseek_v2, lite", "gpt_oss, tied"]
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "TP2": ({"tensor": 2}, ["deepseek_v3", "gpt_oss", "qwen3_moe", "olmoe"]),
    "PP2": ({"pipeline": 2}, ["deepseek_v2", "gpt_oss", "qwen3_moe", "qwen3"]),
    "EP2": ({"expert": 2}, ["deepseek_v3", "gpt_oss", "glm4_moe"]),
}
EXPECTED = "generated.pt"


@torch.no_grad()
def prepare(directory: Path, name: str) -> None:
    """A checkpoint, and what transformers generates from it."""
    family, changes = VARIANTS[name]
    theirs = make(family, directory, **changes)
    theirs.set_attn_implementation("eager")
    theirs.generation_config.eos_token_id = None  # all responses are of full length
    for seed in range(10):  # the first prompts that lead to no near tie
        prompts = sequences(theirs.config.vocab_size, PROMPTS, seed)
        told = [_greedy(theirs, prompt) for prompt in prompts]
        if min(margin for _, margin in told) > MARGIN:
            break
    else:
        raise AssertionError(f"{name}: near ties from every seed")
    torch.save((prompts, [response for response, _ in told]), directory / EXPECTED)


def _greedy(theirs: Any, prompt: list[int]) -> tuple[list[int], float]:
    """The response, and by how many logits its tokens were ahead of the second best at least."""
    whole = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(whole.logits)[:, 0].topk(2).values
    return whole.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def generated(runtime: Runtime, layout: dict[str, Any], directories: list[Path]) -> list[dict[int, list[int]]]:
    """By prompt, the responses of this rank's data-parallel part."""
    with process_groups(ParallelConfig(**layout)) as groups:
        return [_generated(load(directory, groups, runtime.device), directory) for directory in directories]


def _generated(model: MoEModel, directory: Path) -> dict[int, list[int]]:
    prompts, _ = torch.load(directory / EXPECTED)
    mine = range(model.groups.data.rank, len(prompts), model.groups.data.size)
    engine = EmbeddedEngine(model, max_batch=4)  # so that one prompt comes in a second batch
    requests = [Request(prompts[i], seed=0) for i in mine]
    responses = engine.generate(requests, Sampling(NEW, 0.0), routes=False)
    return {i: response.token_ids for i, response in zip(mine, responses, strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    for name in [*FAMILIES, *OTHERS]:
        prepare(folder / name, name)
    return folder


def check(name: str, folder: Path, said: list[dict[int, list[int]]]) -> None:
    _, responses = torch.load(folder / name / EXPECTED)
    assert {i for part in said for i in part} == set(range(len(responses)))
    for part in said:
        for i, tokens in part.items():
            assert tokens == responses[i], (name, i)


def test_one_process(folder: Path) -> None:
    names = [*FAMILIES, *OTHERS]
    (said,) = run_on_ranks(generated, 1, {}, [folder / name for name in names])
    for name, part in zip(names, said, strict=True):
        check(name, folder, [part])
        _, responses = torch.load(folder / name / EXPECTED)
        assert len({tuple(r) for r in responses}) == len(responses)
        assert len({token for response in responses for token in response}) >= 8  # no repetition of one word


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, folder: Path) -> None:
    split, names = LAYOUTS[layout]
    ranks = run_on_ranks(generated, 2, split, [folder / name for name in names])
    for name, *said in zip(names, *ranks, strict=True):
        check(name, folder, said)
