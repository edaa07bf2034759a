"""How important every component of a parent is, and its weights in that order: rankings, dealing over groups, sorting."""
