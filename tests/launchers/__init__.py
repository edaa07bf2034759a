"""Tests of what starts runs."""
