"""Hugging Face checkpoints <-> Megatron's global tensors. Declared once a family (families.py), inverted mechanically."""
