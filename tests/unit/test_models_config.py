"""What ModelConfig and ParallelConfig refuse: the text names the key, its value and the constraint."""

from typing import Any

import pytest
from pydantic import ValidationError

from models.config import ModelConfig
from models.presets import PRESETS
from parallel.config import ParallelConfig
from parallel.errors import UsageError


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(**(PRESETS["tiny_moe"] | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(topk=9), r"model\.topk=9: must be at most model\.experts=8"),
        (dict(heads=5), r"model\.heads=5: must be a multiple of model\.kv_heads=2"),
        (dict(head_dim=31), r"model\.head_dim=31: must be even"),
        (dict(dense_layers=[1, 4, 7]), r"model\.dense_layers=\[4, 7\]: layers count from 0 and model\.layers=4"),
        (dict(load_balancing="expert_bias"), r"model\.load_balancing=expert_bias: needs model\.router_score=sigmoid"),
        (dict(topk=1), r"model\.topk=1: needs model\.router_pre_softmax=true"),
        (dict(router_groups=2), r"model\.router_groups and model\.router_group_topk: set both or neither"),
        (dict(router_group_topk=2), r"model\.router_groups and model\.router_group_topk: set both or neither"),
        (dict(router_groups=3, router_group_topk=2), r"model\.experts=8: must be a multiple of model\.router_groups=3"),
        (dict(router_groups=2, router_group_topk=3, topk=4), r"model\.router_group_topk=3: must be at most 2.*router_groups=2"),
        (dict(router_groups=4, router_group_topk=3, topk=2), r"model\.router_group_topk=3: must be at most 2.*model\.topk=2"),
        (dict(router_groups=4, router_group_topk=1, topk=3), r"model\.topk=3: must be at most 2, the experts in .*=1 of .*=4"),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        model(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(topk=8),
        dict(topk=1, router_pre_softmax=True),
        dict(topk=1, router_score="sigmoid"),
        dict(router_groups=4, router_group_topk=2, topk=4),
        dict(router_groups=8, router_group_topk=2),
        dict(dense_layers=[0, 3]),
        dict(load_balancing="expert_bias", router_score="sigmoid"),
    ],
)
def test_what_is_just_allowed_is_allowed(changes: dict[str, Any]) -> None:
    made = model(**changes)
    assert {key: getattr(made, key) for key in changes} == changes


def test_the_vocabulary_is_padded_alike_in_every_layout() -> None:
    assert [model(vocab_size=n).padded_vocab_size for n in (1, 64, 65, 259)] == [64, 64, 128, 320]


def test_moe_layers_are_those_that_are_not_dense() -> None:
    assert model(dense_layers=[0, 2]).moe_layers == (1, 3)


@pytest.mark.parametrize(
    ("layout", "changes", "text"),
    [
        (dict(tensor=8), {}, r"parallel\.tensor=8: must divide model\.heads=4; choose a divisor of 4"),
        (dict(tensor=4), {}, r"parallel\.tensor=4: must divide model\.kv_heads=2"),
        (dict(tensor=2), dict(ffn=97), r"parallel\.tensor=2: must divide model\.ffn=97"),
        (dict(tensor=2), dict(shared_ffn=33), r"parallel\.tensor=2: must divide model\.shared_ffn=33"),
        (dict(tensor=3), dict(heads=3, kv_heads=3, ffn=99), r"parallel\.tensor=3: must divide padded model\.vocab_size=320"),
        (dict(expert=3), {}, r"parallel\.expert=3: must divide model\.experts=8"),
        (dict(expert_tensor=3), {}, r"parallel\.expert_tensor=3: must divide model\.moe_ffn=128"),
        (dict(pipeline=3), {}, r"parallel\.pipeline=3: must divide model\.layers=4"),
        (dict(pipeline=2, virtual_pipeline=4), {}, r"virtual_pipeline=8: must divide model\.layers=4; choose a divisor of 4"),
    ],
)
def test_a_layout_that_cannot_split_the_model_is_refused(layout: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        model(**changes).check_layout(ParallelConfig(**layout))


def test_a_layout_that_splits_the_model_is_accepted() -> None:
    layout = ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2, expert=8, expert_tensor=2, dispatcher="allgather")  # pyright: ignore[reportCallIssue]
    model(kv_heads=4, shared_ffn=64).check_layout(layout)


@pytest.mark.parametrize(
    ("layout", "fewest"),
    [
        ({}, 1),
        (dict(tensor=2, expert=2), 2),
        (dict(tensor=4, expert=2), 4),
        (dict(tensor=2, expert=3), 6),
        (dict(expert=2, expert_tensor=2), 4),
        (dict(tensor=2, pipeline=2, expert=4), 8),
        (dict(pipeline=2, virtual_pipeline=2), 2),
    ],
)
def test_the_fewest_processes_are_what_both_kinds_of_groups_tile(layout: dict[str, Any], fewest: int) -> None:
    config = ParallelConfig(**layout)
    assert config.fewest_processes == fewest
    config.check_world(fewest)
    config.check_world(3 * fewest)


def test_a_world_that_the_groups_do_not_tile_is_refused_with_the_next_that_they_do() -> None:
    with pytest.raises(UsageError, match=r"run\.processes=6: must be a multiple of 4.*tensor=2.*pipeline=2.*run\.processes=8"):
        ParallelConfig(tensor=2, pipeline=2, expert=2).check_world(6)  # pyright: ignore[reportCallIssue]


def test_virtual_stages_need_stages() -> None:
    with pytest.raises(ValidationError, match=r"parallel\.virtual_pipeline=2: needs parallel\.pipeline > 1"):
        ParallelConfig(virtual_pipeline=2)  # pyright: ignore[reportCallIssue]


def test_what_gloo_or_torch_cannot_do_is_refused_with_the_remedy() -> None:
    split = ParallelConfig(expert_tensor=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UsageError, match=r"parallel\.expert_tensor=2: .*gloo.*set parallel\.dispatcher=allgather"):
        split.check_backend("gloo", transformer_engine=False)
    split.check_backend("nccl", transformer_engine=False)
    split.model_copy(update=dict(dispatcher="allgather")).check_backend("gloo", transformer_engine=False)
    context = ParallelConfig(context=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UsageError, match=r"parallel\.context=2: .*Transformer Engine.*set parallel\.context=1"):
        context.check_backend("nccl", transformer_engine=False)
    with pytest.raises(UsageError, match=r"parallel\.context=2: the packed stream is not split.*set\s+parallel\.context=1"):
        context.check_backend("nccl", transformer_engine=True)
