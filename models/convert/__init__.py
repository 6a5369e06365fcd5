"""Weights between Hugging Face's directories and Megatron's checkpoints, tensor by tensor."""
