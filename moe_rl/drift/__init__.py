"""Routing drift: how expert choice changes between two passes over the same tokens."""
