"""Distillation from the frozen parent: losses and the teacher's pass."""
