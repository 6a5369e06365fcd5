"""Ranks, devices, process groups and schedules; knows nothing of models or RL."""
