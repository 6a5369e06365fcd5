"""Peak memory of whole imports and exports: less than one layer of a model of 280 MB, whose layers take 100 MB."""

from pathlib import Path

import pytest

from tests.unit.test_convert_memory import in_a_process

FAMILIES = {
    "qwen3_moe": dict(num_experts=16, moe_intermediate_size=1024),
    "gpt_oss": dict(num_local_experts=16, intermediate_size=1024),  # a tensor of 64 MB holds all experts of a layer
}
WRITE = """
    from transformers import AutoConfig
    from models.convert.huggingface import describe, piece_map

    common = dict(vocab_size=20000, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4)
    common |= dict(head_dim=64, num_experts_per_tok=2, max_position_embeddings=131072, dtype="bfloat16")
    AutoConfig.for_model("FAMILY", **common, **dict(MODEL)).save_pretrained(folder / "hf")
    description = describe(folder / "hf")
    kinds = {name: (torch.bfloat16, shape) for name, shape in piece_map(description, description.model()).hf_shapes().items()}
    with Writer(folder / "weights", kinds) as writer:
        for i, (name, (_, shape)) in enumerate(kinds.items()):
            writer.add(name, torch.full(shape, i / 7, dtype=torch.bfloat16))
    for path in (folder / "weights").iterdir():
        path.rename(folder / "hf" / path.name)
    print(sum(2 * torch.Size(shape).numel() for _, shape in kinds.values()))
"""
CONVERT = """
    from transformers import AutoConfig
    from models.convert.exporting import export_directory
    from models.convert.importing import import_directory

    AutoConfig.from_pretrained(folder / "hf")
    before = start()
    limit(120_000_000)
    import_directory(folder / "hf", folder / "ckpt")
    print((resident("VmHWM") - before) // 1000)
    export_directory(folder / "ckpt", folder / "out")
    print((resident("VmHWM") - before) // 1000)
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_of_a_part_of_a_layer(family: str, tmp_path: Path) -> None:
    """Above that of the libraries: 75 MB, and 120 MB of address space. A layer's experts, read at once, would take 96 MB and
    the tensor that they go into as much again; an embedding is 41 MB."""
    size = int(in_a_process(WRITE.replace("FAMILY", family).replace("MODEL", str(FAMILIES[family])), tmp_path))
    assert size > 270_000_000
    imported, exported = map(int, in_a_process(CONVERT, tmp_path).split())
    print(f"{family}: {imported} KB to import, {exported} KB to export")
    assert imported < 75_000 and exported < 75_000
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1_000_000:
            path.unlink()  # pytest keeps what tests leave
