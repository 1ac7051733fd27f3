"""Command line recipes: each module is one Hydra main, also run as `lightning-afd <name>`."""
