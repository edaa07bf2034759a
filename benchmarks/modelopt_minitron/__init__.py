"""NVIDIA Model-Optimizer's own Minitron scores, to compare with: `scores.py` asks for them, `score_directory.py` computes them elsewhere."""
