from collections.abc import Iterator

import pytest
import torch

from model.config import ModelConfig
from model.flops import training_flops_per_token
from model.peaks import PEAKS, Peak, find_peak, model_flops_utilization, peak_of


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        # Dense, from NVIDIA's datasheets, where H100's 1,979, L4's 242 and B200's 4.5 PFLOP/s are with sparsity.
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-SXM4-40GB", torch.float32, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA L4", torch.bfloat16, 121),
    ],
)
def test_peaks_are_those_of_the_datasheets(device: str, dtype: torch.dtype, tflops: float) -> None:
    peak = find_peak(device, dtype)
    assert peak is not None
    assert peak.flops_per_second == pytest.approx(tflops * 1e12, rel=1e-12)
    assert peak.device == device


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32_allowed")
def test_tensor_cores_serve_fp32_where_tf32_is_allowed() -> None:
    assert find_peak("NVIDIA A100-SXM4-40GB", torch.float32) == Peak("NVIDIA A100-SXM4-40GB", "tf32", 156e12)


def test_and_nowhere_else() -> None:
    assert find_peak("NVIDIA A100-SXM4-40GB", torch.float32) == Peak("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12)


def test_a_device_computes_faster_the_less_exact() -> None:
    assert all(peaks.bf16 > peaks.tf32 >= peaks.fp32 > 0 for peaks in PEAKS.values())


@pytest.mark.parametrize(  # case R10
    "device", ["NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H100", "NVIDIA GeForce RTX 4090", "cpu", "", "H200"]
)
def test_an_unknown_device_has_no_peak(device: str) -> None:
    assert find_peak(device, torch.bfloat16) is None


def test_a_cpu_has_no_peak_and_fp64_none_either() -> None:  # case R10
    assert peak_of(torch.device("cpu"), torch.bfloat16) is None
    assert find_peak("NVIDIA H200", torch.float64) is None


def test_mfu_of_a_published_run() -> None:
    """J1-Jumbo's 1.0933e12 operations a token (6 a weight, and attention), at 140 tokens/s a
    rank."""
    jumbo = ModelConfig(n_layer=76, n_head=96, d_model=13824, seq_len=2048)
    a100 = find_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16)
    assert a100 is not None
    flops = training_flops_per_token(jumbo, 262_144)
    assert model_flops_utilization(128 * 140 * flops, 128, a100) == pytest.approx(0.4906, abs=1e-4)
    assert model_flops_utilization(2 * 156e12, 2, a100) == 0.5
    assert model_flops_utilization(2 * 312e12, 2, a100) == 1.0


def test_mfu_above_one_names_the_entry() -> None:  # case R10
    h200 = find_peak("NVIDIA H200", torch.bfloat16)
    assert h200 is not None
    with pytest.raises(RuntimeError, match=r"MFU is 1\.5, .* 1484 TFLOP/s a rank, .* 'NVIDIA H200' 989\.4 in bf16; "):
        model_flops_utilization(8 * 1.5 * 989.4e12, 8, h200)
