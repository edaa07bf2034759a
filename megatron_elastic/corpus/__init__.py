"""Text into tokens: sources, tokenizers, and the directory that training reads. Nothing here imports torch at import time."""
