"""Simulated results beside those of the papers: one module per group of figures."""
