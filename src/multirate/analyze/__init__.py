"""Residual analysis: how a model's states move through its layers, and what reaches the last one."""
