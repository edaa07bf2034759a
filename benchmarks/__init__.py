"""Measurements that are run by hand; see benchmarks/README.md."""
