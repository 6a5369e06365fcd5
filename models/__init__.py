"""The MoE transformer on Megatron-Core; knows nothing of RL."""

import logging
import warnings

# What Megatron-Core and torch say of parts that are absent here or renamed: `moe-rl doctor` says what matters, once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
for category in (UserWarning, FutureWarning):
    warnings.filterwarnings("ignore", category=category, module=r"torch\.distributed\.(c10d_logger|checkpoint\.)")
for name in (
    "torch.utils.cpp_extension",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing.strategies.torch",
):
    logging.getLogger(name).setLevel(logging.ERROR)
