"""Normalization beyond the golden numbers: zero ranges, widths, no clipping."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_vla.data.normalization import Normalizer

STATISTICS = {
    "q01": np.array([0.0, 2.0]),
    "q99": np.array([4.0, 2.0]),
    "mean": np.array([1.0, 2.0]),
    "std": np.array([2.0, 0.0]),
}


def test_nothing_is_clipped() -> None:
    for variant in ("openpi", "lerobot"):
        normalized = Normalizer("quantile", variant, STATISTICS).normalize(np.array([40.0, 2.0]))  # type: ignore[arg-type]
        assert normalized[0] == pytest.approx(19.0, rel=1e-5)
        assert normalized[1] == -1.0


def test_zero_ranges_as_each_code_base_has_them() -> None:
    x = np.array([1.0, 2.5])
    assert Normalizer("quantile", "openpi", STATISTICS).normalize(x)[1] == pytest.approx(0.5 / 1e-6 * 2 - 1)
    assert Normalizer("quantile", "lerobot", STATISTICS).normalize(x)[1] == pytest.approx(0.5 / 1e-8 * 2 - 1)
    assert Normalizer("mean_std", "openpi", STATISTICS).normalize(x)[1] == pytest.approx(0.5 / 1e-6)
    assert Normalizer("mean_std", "lerobot", STATISTICS).normalize(x)[1] == pytest.approx(0.5 / 1e-8)


def test_openpi_works_in_double_precision() -> None:
    """A float32 state is digitized from float64: the last bits decide the bin."""
    normalized = Normalizer("quantile", "openpi", STATISTICS).normalize(np.array([1.3, 2.0], dtype=np.float32))
    assert normalized.dtype == np.float64
    assert normalized[0] == float(np.float32(1.3)) / (4.0 + 1e-6) * 2.0 - 1.0


def test_identity_returns_the_values() -> None:
    normalizer = Normalizer("identity", "openpi", STATISTICS)
    x = np.array([7.0, 8.0, 9.0])
    assert normalizer.unnormalize(normalizer.normalize(x)) is x


def test_values_wider_than_the_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match="3 dimensions, the statistics 2"):
        Normalizer("quantile", "openpi", STATISTICS).normalize(np.zeros(3))
    with pytest.raises(ValueError, match="slice the model's padding off"):
        Normalizer("quantile", "lerobot", STATISTICS).unnormalize(np.zeros(3))
