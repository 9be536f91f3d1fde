"""Configs: dataclasses that validate themselves. Imports nothing else of multirate."""
