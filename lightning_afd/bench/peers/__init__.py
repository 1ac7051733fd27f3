"""Other systems as they would be used, in the same run as our own: each module has `make(job)`, see bench.registry."""
