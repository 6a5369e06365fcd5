"""A checkpoint's log-probabilities, expert choices and gradients are transformers' in every layout; ranks read their part.

Tolerances as in one process (tests/unit/test_convert_parity.py, test_convert_gradients.py): measured here, log-probabilities
differ by at most 1.3e-5, a gradient by 1.1e-5 of its norm.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from models.convert.safetensors_reader import Reader
from tests.distributed.converted import compare
from tests.distributed.ranks import run_on_ranks
from tests.hf_checkpoints import FAMILIES
from tests.hf_variants import VARIANTS
from tests.parity_passes import LENGTHS, prepare

pytestmark = pytest.mark.distributed

TARGETS = sum(LENGTHS) - len(LENGTHS)
MOE = [family for family in FAMILIES if family != "qwen3"]
PADDED = "qwen3_moe, 65 words, all experts"  # of whose 128 rows the second tensor rank has one word and 63 rows of padding
OTHERS = ["deepseek_v2, lite", "deepseek_v3, halves, full queries", "glm4_moe, yarn, tied", "gpt_oss, tied", PADDED]
TENSOR, EXPERT, PIPELINE = {"tensor": 2}, {"expert": 2}, {"pipeline": 2}
SOME = ["qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss"]  # where layouts only differ in how they combine what others split
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "TP2": (2, TENSOR, [*FAMILIES, *OTHERS]),
    "EP2": (2, EXPERT, MOE),
    "PP2": (2, PIPELINE, [*FAMILIES, "gpt_oss, tied"]),
    "DP2": (2, {}, SOME),
    "TP2, EP2": (2, TENSOR | EXPERT, SOME),
    "PP2, virtual": (2, PIPELINE | {"virtual_pipeline": 2}, ["qwen3", "glm4_moe", "deepseek_v2", "gpt_oss"]),
    "PP2, uneven": (2, PIPELINE | {"first_stage_layers": 1}, ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"]),
    "ETP2": (2, {"expert_tensor": 2, "dispatcher": "allgather"}, ["mixtral", "qwen2_moe", "deepseek_v3"]),
    "TP2, EP2, DP2": (4, TENSOR | EXPERT, ["olmoe", "deepseek_v3", "gpt_oss"]),
    "TP2, PP2": (4, TENSOR | PIPELINE, ["qwen2_moe", "deepseek_v2, lite"]),
}
Results = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in [*FAMILIES, *OTHERS]:
        family, changes = VARIANTS[name]
        prepare(folder / name, family, **changes)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """(layout, checkpoint) -> what each rank said; the ranks are started once a layout."""
    found: Results = {}
    for layout, (ranks, split, names) in LAYOUTS.items():
        said = run_on_ranks(compare, ranks, split, [folder / name for name in names])
        found |= {(layout, name): list(each) for name, *each in zip(names, *said, strict=True)}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_what_transformers_says(layout: str, results: Results) -> None:
    ranks, split, names = LAYOUTS[layout]
    copies = split.get("tensor", 1)  # of log-probabilities: every tensor rank has them
    for name in names:
        said = results[layout, name]
        assert sum(each["scored"] for each in said) == copies * TARGETS, name
        assert max(each["logprobs"] for each in said) < 5e-5, name
        moe_layers = len({key for each in said for key in each["gradients"] if key.endswith("router.weight")})
        assert sum(each["routes"] for each in said) == moe_layers * TARGETS, name
        assert sum(each["wrong_routes"] for each in said) == 0, name
        for each in said:
            assert {key: off for key, off in each["gradients"].items() if not off < 3e-5} == {}, name
    assert len(results[layout, names[0]]) == ranks


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of each tensor."""
    return {name: math.prod(e.shape) * e.dtype.itemsize for name, e in Reader(directory).names.items()}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt_oss"])
def test_each_rank_reads_its_own_part_and_no_more(name: str, folder: Path, results: Results) -> None:
    """GPT-OSS apart, whose gates and ups alternate within a run of bytes, so that both are read for either."""
    tensors = sizes(folder / name)
    whole, experts = sum(tensors.values()), sum(size for key, size in tensors.items() if ".experts." in key)
    if name in SOME:
        assert [each["bytes"] for each in results["DP2", name]] == [whole, whole]
    if experts:
        assert [each["bytes"] for each in results["EP2", name]] == [whole - experts // 2] * 2
    # tied embeddings are on the first stage and on the last
    twice = tensors["model.embed_tokens.weight"] if "lm_head.weight" not in tensors else 0
    assert sum(each["bytes"] for each in results["PP2", name]) == whole + twice
    # rows are split; columns are read whole where a row's half is a few bytes, as here
    rows = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
    split = sum(size for key, size in tensors.items() if key.split(".")[-2] in rows and ".experts." not in key)
    assert max(each["bytes"] for each in results["TP2", name]) <= whole - split // 2


def test_gpt_oss_reads_half_of_its_experts(folder: Path, results: Results) -> None:
    experts = sum(size for key, size in sizes(folder / "gpt_oss").items() if ".experts." in key)
    for alone, split in zip(results["DP2", "gpt_oss"], results["EP2", "gpt_oss"], strict=True):
        assert split["bytes"] <= alone["bytes"] - experts // 2
