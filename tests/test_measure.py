"""Measuring a device: the figures are figures, and the cost model can use them."""

import torch

from lightning_afd.cost.model import Linear
from lightning_afd.measure import measured_device
from lightning_afd.recipes.shapes import named_cluster


def test_this_device_in_numbers() -> None:
    base = named_cluster("local").device
    found = measured_device(base, torch.device("cpu"), torch.float32, size=64)
    rates = (found.efficiency.grouped_gemm, found.efficiency.attention_forward, found.efficiency.attention_backward)
    assert all(0 < rate < 100 for rate in rates)
    assert found.efficiency.half_rows >= 0 and found.hbm_gb_per_s > 0 and found.host_us > 0
    assert found.peak_tflops["float32"] != base.peak_tflops["float32"]
    assert found.peak_tflops["bfloat16"] == base.peak_tflops["bfloat16"]  # not measured here
    assert (found.memory_gb, found.usable_memory) == (base.memory_gb, base.usable_memory)
    assert found.gemm_seconds(Linear(64, 64), 1000, "float32") > 0
