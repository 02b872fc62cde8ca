"""What a device could do at most, and the share of it that training uses.

The table is pinned, by the exact names that `torch.cuda.get_device_name` gives: a device that is not in it, such as a
slice of a GPU or any CPU, has no peak rather than a wrong one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class TensorPeaks(NamedTuple):
    """Peak TFLOP/s without sparsity, accumulated in fp32."""

    bf16: float
    tf32: float
    fp32: float
    """Outside the tensor cores: what products in fp32 use unless torch is told that TF32 will do."""


# Source: NVIDIA A100 Tensor Core GPU datasheet (2022).
A100 = TensorPeaks(312, 156, 19.5)
# Source: NVIDIA H100 Tensor Core GPU Architecture whitepaper (2022), table 2, of SXM5 and PCIe; H100 NVL datasheet
# (2024), whose 1,671 and 835 are with sparsity.
H100_SXM = TensorPeaks(989.4, 494.7, 66.9)
H100_PCIE = TensorPeaks(756, 378, 51.2)
H100_NVL = TensorPeaks(835.5, 417.5, 60)
# Source: NVIDIA Blackwell datasheet (2025), HGX B200, an eighth each: 36 and 18 PFLOP/s with sparsity, 600 TFLOP/s.
B200 = TensorPeaks(2250, 1125, 75)
# Source: NVIDIA L4 datasheet (2023), whose 242 and 120 are with sparsity.
L4 = TensorPeaks(121, 60, 30.3)
# Source: NVIDIA L40S datasheet (2023).
L40S = TensorPeaks(362.05, 183, 91.6)
# Source: NVIDIA A10G datasheet (2021), whose 140 and 70 are with sparsity.
A10G = TensorPeaks(70, 35, 35)

PEAKS = {
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H100 NVL": H100_NVL,
    # Source: NVIDIA H200 datasheet (2024): the arithmetic of H100, with more memory.
    "NVIDIA H200": H100_SXM,
    "NVIDIA H200 NVL": H100_NVL,
    "NVIDIA B200": B200,
    "NVIDIA L4": L4,
    "NVIDIA L40S": L40S,
    "NVIDIA A10G": A10G,
}


@dataclass(frozen=True)
class Peak:
    """An entry of the table."""

    device: str
    precision: str
    flops_per_second: float


def find_peak(device: str, dtype: torch.dtype) -> Peak | None:
    """The peak of a device, by torch's name of it, for products in `dtype`; None where the table does not tell."""
    if dtype == torch.bfloat16:
        precision = "bf16"
    elif dtype == torch.float32:
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    else:
        return None
    peaks = PEAKS.get(device)
    return Peak(device, precision, getattr(peaks, precision) * 1e12) if peaks else None


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """The peak of one of this machine's devices."""
    return find_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def model_flops_utilization(flops_per_second: float, ranks: int, peak: Peak) -> float:
    """MFU: the model's FLOP/s, all ranks together, as a share of what that many devices could do.

    Raises:
        RuntimeError: it is above 1, so the table or the count of operations is wrong.

    Source: Chowdhery et al. 2022 (PaLM), section 4.1.
    """
    utilization = flops_per_second / (ranks * peak.flops_per_second)
    if utilization > 1:
        raise RuntimeError(
            f"MFU is {utilization:.3g}, more than 1: {flops_per_second / ranks / 1e12:.4g} TFLOP/s a rank, but the "
            f"table of peaks (model/peaks.py) gives {peak.device!r} {peak.flops_per_second / 1e12:g} in "
            f"{peak.precision}; correct that entry"
        )
    return utilization
