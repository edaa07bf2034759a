"""Hugging Face formats: directories that `transformers` reads, to and from named tensors of ours."""
