"""What ranks.py imports once for all ranks."""

from parallel.cpu import let_megatron_run_without_cuda

let_megatron_run_without_cuda()  # comes before megatron.core is imported

import megatron.core.models.gpt.gpt_model  # noqa: E402, F401

import moe_rl.trainer  # noqa: E402, F401
