"""Shape and type checks of the pure modules, switched on before anything imports them."""

import importlib
import sys
from pathlib import Path

import torch
from jaxtyping import install_import_hook

ALGORITHMS = Path(__file__).parents[1] / "moe_rl" / "algorithms"
install_import_hook(
    [
        # beartype cannot check the settings' validators, which return Self
        *(f"moe_rl.algorithms.{path.stem}" for path in ALGORITHMS.glob("*.py") if path.stem not in ("__init__", "config")),
        "moe_rl.metrics",
        "moe_rl.advantages",
        "moe_rl.token_advantages",
        "moe_rl.alignment",
        "moe_rl.corrections",
        "moe_rl.shaping",
        "moe_rl.batching",
        "moe_rl.drift.metrics",
        "moe_rl.drift.sums",
        "models.routes",
    ],
    "beartype.beartype",
)
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Where tests build models: see there."""
    if "models.build" in sys.modules:
        importlib.import_module("tests.distributed.imported")
