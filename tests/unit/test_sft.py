"""Supervised steps on conversations: loss and gradient are transformers' own on the same batch; what is too long."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import OptimizerConfig
from models.model import MoEModel
from moe_rl import sft
from moe_rl.config import RunConfig
from moe_rl.session import Session
from moe_rl.tasks import HFTokenizer, ProblemSet, fitting
from moe_rl.types import Problem
from parallel.errors import UsageError
from parallel.runtime import Runtime, started
from tests.chat_tokenizers import MARKED, reference, save_tokenizer
from tests.distributed.passes import Case, built
from tests.unit.test_models_forward import qwen3_of, shake_norms, weights_of

CASE = Case(model={"vocab_size": 352, "topk": 3})  # more rows than the tokenizer has ids
# In float32, over seeds 0 to 4 and the four cases below: the loss (6) differs by at most 9e-7, the norm by 2.2e-7 of itself
LOSS, NORM = 5e-6, 5e-6
ROWS: list[list[str]] = [
    ["What is 2+3?", "It is 5.", "And 4?", "24"],
    ["Reverse the word stone, then say why.", "enots"],
    ["You", "are", "terse", "then", "say", "48 72"],
    ["24", "stone written backward."],
    ["And 4?", "48", "And 4?", "72"],
]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "marked", MARKED)


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(row)] for row in ROWS]


def problems() -> list[Problem]:
    return [
        Problem.of_messages(f"row {i}", turns[:-1], turns[-1]["content"], turns[-1]) for i, turns in enumerate(conversations())
    ]


def session_of(runtime: Runtime, model: MoEModel, tokenizer: Path, **sections: Any) -> Session:
    config = RunConfig.model_validate({"model": CASE.config.model_dump(exclude={"preset"}), **sections})
    task = ProblemSet(problems(), problems()[:1], lambda text, problem: 0.0)
    engine: Any = None
    return Session(config, runtime, model.groups, model, task, HFTokenizer(tokenizer), engine, None)


def transformers_step(model: MoEModel, tokenizer: Path, train_on: str) -> tuple[float, float]:
    """Loss and gradient norm of Qwen3-MoE with our weights on the batch, padded on the right, labels -100 where
    transformers' own mask does not say that the assistant wrote it."""
    theirs, reading = qwen3_of(CASE.config, weights_of(model)), reference(tokenizer)
    rows: list[tuple[list[int], list[int]]] = []
    for turns in conversations():
        out = reading.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = out["input_ids"], out["assistant_masks"]
        if train_on == "last":
            before = reading.apply_chat_template(turns[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
            mask = [0] * len(before) + mask[len(before) :]
        rows.append((ids, [token if flag else -100 for token, flag in zip(ids, mask, strict=True)]))
    longest = max(len(ids) for ids, _ in rows)
    theirs.zero_grad()
    loss = theirs(
        input_ids=torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
        attention_mask=torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        labels=torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
    ).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in theirs.parameters() if p.grad is not None]).norm()
    return float(loss.detach()), float(norm)


@pytest.mark.parametrize("train_on", ["last", "all"])
@pytest.mark.parametrize("budget", [4096, 40])  # one stream, several
def test_loss_and_gradient_norm_are_those_of_transformers(
    runtime: Runtime, tokenizer: Path, train_on: str, budget: int
) -> None:
    with built(CASE, runtime) as model:
        shake_norms(model, 0)
        loss, norm = transformers_step(model, tokenizer, train_on)
        session = session_of(runtime, model, tokenizer, sft={"train_on": train_on}, algorithm={"microbatch_tokens": budget})
        optimizer = model.optimizer(OptimizerConfig(lr=0.0), 1)
        metrics = sft._step(session, optimizer, problems())
        assert metrics["sft/loss"] == pytest.approx(loss, abs=LOSS)
        assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=NORM)
    assert loss > 1 and norm > 0.1


def test_last_and_all_are_not_the_same(runtime: Runtime, tokenizer: Path) -> None:
    with built(CASE, runtime) as model:
        losses = {
            train_on: sft._step(
                session_of(runtime, model, tokenizer, sft={"train_on": train_on}),
                model.optimizer(OptimizerConfig(lr=0.0), 1),
                problems(),
            )["sft/loss"]
            for train_on in ("last", "all")
        }
    assert abs(losses["last"] - losses["all"]) > 100 * LOSS


def test_an_example_that_is_too_long_is_named_or_left_out(runtime: Runtime, tokenizer: Path) -> None:
    with built(CASE, runtime) as model:
        encoder = session_of(runtime, model, tokenizer).encoder
    lengths = [len(encoder.example(problem).ids) for problem in problems()]
    longest = sorted(lengths)[-2]
    where = lengths.index(max(lengths))
    kept = fitting(problems(), encoder, longest, "last", "skip")
    assert [p.id for p in kept] == [f"row {i}" for i in range(5) if i != where]
    with pytest.raises(UsageError) as caught:
        fitting(problems(), encoder, longest, "last", "error")
    assert str(caught.value) == (
        f"problem row {where}: its prompt and answer of {max(lengths)} tokens exceed model.max_positions={longest}; "
        "raise that, leave long examples out, or set sft.too_long=skip"
    )
    with pytest.raises(UsageError, match="sft.too_long=skip: all 5 examples exceed model.max_positions=3; raise it"):
        fitting(problems(), encoder, 3, "last", "skip")
