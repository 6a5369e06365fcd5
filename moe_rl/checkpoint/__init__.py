"""Checkpoints in Megatron's sharded format: complete or absent, and loadable in another layout.

A checkpoint is a directory step_NNNNNN. It is written beside its place, with a manifest of all its files, and renamed when
every rank is done, so a directory of that name is complete. In it lies the policy, and where a run trains a critic, that one in
critic/, by itself and in the same format: what reads a policy's weights need not know of it.
"""

from moe_rl.checkpoint.begun_step import load as load_begun
from moe_rl.checkpoint.contents import CriticState, Progress
from moe_rl.checkpoint.reading import intact, load, load_critic_weights, load_weights
from moe_rl.checkpoint.saving import Saver, remove, save, save_weights

__all__ = [
    "CriticState",
    "Progress",
    "Saver",
    "intact",
    "load",
    "load_begun",
    "load_critic_weights",
    "load_weights",
    "remove",
    "save",
    "save_weights",
]
