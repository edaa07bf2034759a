"""How many microbatches the frozen parent runs ahead of the student."""

from __future__ import annotations


def windows(microbatches: int, state_bytes: int, bound: float, multiple: int = 1) -> list[int]:
    """Sizes of the fewest, most equal windows over a step's microbatches whose final hidden states fit in `bound` bytes.

    state_bytes: of one microbatch on a rank of the last stage. multiple: what every window must be a multiple of (the interleaved schedule
    runs whole rounds of the pipeline); it divides `microbatches`. A window has at least that many, however tight the bound.
    """
    rounds = microbatches // multiple
    fit = max(1, int(bound // (state_bytes * multiple)))
    count = -(-rounds // fit)
    return [(rounds // count + (number < rounds % count)) * multiple for number in range(count)]
