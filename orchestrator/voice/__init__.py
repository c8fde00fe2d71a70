"""Hearing and speaking: what the speech models run, and what is made of their answers."""
