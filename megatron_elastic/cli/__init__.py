"""The command line: one thin module per command; importing any of them does not import torch."""
