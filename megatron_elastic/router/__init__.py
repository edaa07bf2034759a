"""The learned router over sizes: network, draws, objective, schedules, and from its probabilities to plans.

`search` and `finalize` do not import torch, so that a recipe can be checked without it.
"""
