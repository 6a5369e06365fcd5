"""The MoE transformer on Megatron-Core; knows nothing of RL."""

import logging
import warnings

# What Megatron-Core and torch say of parts that are absent here or renamed: `moe-rl doctor` says what matters, once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
logging.getLogger("megatron.core.distributed.distributed_data_parallel").setLevel(logging.ERROR)
