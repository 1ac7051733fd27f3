"""Who gets how many ranks, and is it worth it: from a model and a cluster to a plan (no torch)."""
