"""Sub-models as checkpoints of their own, and the proof that they compute what the family computes."""
