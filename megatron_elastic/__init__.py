"""Elastic models for megatron-core: one training run of one parent that holds a family of nested sub-models.

Importing this package imports nothing else; `megatron_elastic.elastic` changes a model, `megatron_elastic.cli` is the command line.
"""

__version__ = "0.1.0"
