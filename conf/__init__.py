"""Hydra configuration groups of the recipes; Hydra finds them as pkg://lightning_afd.conf."""
