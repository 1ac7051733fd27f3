"""Checkpoints that do not depend on the layout: a directory in the format of torch.distributed.checkpoint.

`CheckpointReader` reads one tensor by tensor; `read_whole` gives the plain dict that Lightning saves on one device.
"""

from lightning_afd.checkpoint.saved import CheckpointReader, open_checkpoint, read_whole

__all__ = ["CheckpointReader", "open_checkpoint", "read_whole"]
