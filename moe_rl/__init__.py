"""Reinforcement learning of MoE language models."""
