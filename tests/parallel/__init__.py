"""Training steps on every parallel layout."""
