"""What ranks.py imports once for all ranks; the garbage collector looks at it no more.

Half a million objects: to go through them takes 0.4 s, and each run, which begins and ends with groups, has it done.
"""

import gc

from parallel.cpu import let_megatron_run_without_cuda

let_megatron_run_without_cuda()  # comes before megatron.core is imported

import megatron.core.models.gpt.gpt_model  # noqa: E402, F401

import moe_rl.trainer  # noqa: E402, F401

gc.collect()
gc.freeze()
