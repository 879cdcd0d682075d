"""Statistics of the transformed stream: exactness, merging, fingerprints, range checks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from preprocess_fixtures import MemoryDataset, statistics_of, stream

from megatron_vla.data.statistics import QUANTILES, Statistics, StatisticsAccumulator, range_table
from megatron_vla.data.statistics_pass import StreamTransform, compute_statistics, load_statistics, windows_with_nonfinite

DATA = MemoryDataset()
EVERYTHING = np.arange(len(DATA))


def brute_force_stream(delta_dims: tuple[int, ...]) -> np.ndarray:
    """Every action of every chunk, made sample by sample."""
    rows = []
    for index in range(len(DATA)):
        sample = DATA[index]
        for action in sample.actions_TD:
            row = action.copy()
            for dim in delta_dims:
                row[dim] -= sample.state_D[dim]
            rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("delta_dims", [(), (0, 1)])
def test_statistics_are_those_of_the_transformed_chunks(delta_dims: tuple[int, ...]) -> None:
    result = statistics_of(DATA, delta_dims).features
    rows = brute_force_stream(delta_dims).astype(np.float64)
    assert result["actions"].count == len(DATA) * 4
    for name, q in QUANTILES.items():
        np.testing.assert_allclose(result["actions"].values[name], np.quantile(rows, q, axis=0), rtol=1e-12)
        np.testing.assert_allclose(
            result["state"].values[name], np.quantile(DATA.state_ND.astype(float), q, axis=0), rtol=1e-12
        )
    np.testing.assert_allclose(result["actions"].values["mean"], rows.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(result["actions"].values["std"], rows.std(axis=0), rtol=1e-10)


def test_left_out_samples_do_not_count() -> None:
    samples = EVERYTHING[DATA.episode_of_N != 1]
    result = compute_statistics(DATA, stream(DATA), samples, "exact").features["state"]
    np.testing.assert_allclose(result.values["mean"], DATA.state_ND[samples].astype(float).mean(axis=0), rtol=1e-12)


def test_std_survives_a_large_offset() -> None:
    values = (1e6 + np.random.default_rng(0).normal(size=(4000, 1))).astype(np.float64)
    accumulator = StatisticsAccumulator("exact")
    for part in np.array_split(values, 7):
        accumulator.update(part)
    np.testing.assert_allclose(accumulator.result().values["std"], values.std(axis=0), rtol=1e-9)


@pytest.mark.parametrize("method", ["exact", "histogram"])
def test_merged_accumulators_equal_one(method: str) -> None:
    values = np.random.default_rng(3).normal(size=(3000, 2)) * [1, 30]
    whole, left, right = (StatisticsAccumulator(method) for _ in range(3))  # type: ignore[arg-type]
    whole.update(values)
    left.update(values[:1000])
    right.update(values[1000:])
    left.merge(right)
    left.merge(StatisticsAccumulator(method))  # type: ignore[arg-type]
    merged, expected = left.result(), whole.result()
    assert merged.count == expected.count == 3000
    for name, value in expected.values.items():
        if method == "histogram" and name in QUANTILES:
            # Joining ranges moves counts by a bin and may lose one: the quantile's rank moves by two or three rows.
            share = (values <= merged.values[name]).mean(axis=0)
            np.testing.assert_allclose(share, QUANTILES[name], atol=3 / 3000)
        else:
            np.testing.assert_allclose(merged.values[name], value, rtol=1e-9)


def test_save_and_load_keep_every_bit(tmp_path: Path) -> None:
    statistics = statistics_of(DATA, (0,))
    statistics.save(tmp_path / "statistics.json")
    again = Statistics.load(tmp_path / "statistics.json")
    for name, feature in statistics.features.items():
        for key, value in feature.values.items():
            np.testing.assert_array_equal(again.features[name].values[key], value)
    assert again.transform_hash == statistics.transform_hash


def test_N06_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    content = statistics_of(DATA).to_dict()
    for spoil, text in (
        (lambda c: c["features"].pop("actions"), "actions missing"),
        (lambda c: c["features"]["state"].pop("q99"), "state: q99 missing"),
        (lambda c: c["features"]["state"].update(mean=[float("nan")] * 5), "mean not finite"),
        (lambda c: c.pop("transform_hash"), "transform_hash missing"),
    ):
        import copy
        import json

        spoiled = copy.deepcopy(content)
        spoil(spoiled)
        path.write_text(json.dumps(spoiled))
        with pytest.raises(ValueError, match=text):
            Statistics.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"statistics\.json: no readable JSON"):
        Statistics.load(path)


def test_N06_statistics_of_other_data_or_transforms_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    statistics_of(DATA).save(path)
    load = lambda data, transform, n, foreign=False: load_statistics(str(path), data, transform, n, foreign, "THE COMMAND")  # noqa: E731

    assert load(DATA, stream(DATA), len(DATA))[1] == []
    for data, transform, n, text in (
        (MemoryDataset((9, 6, 13)), stream(DATA), 28, "other data"),
        (DATA, stream(DATA, (0, 1)), len(DATA), "delta_action_dims [] -> (0, 1)"),
        (DATA, StreamTransform(5, (), "observation.state", "action"), len(DATA), "horizon 4 -> 5"),
        (DATA, stream(DATA), len(DATA) - 1, "num_samples 27 -> 26"),
    ):
        statistics, findings = load(data, transform, n)
        assert statistics is None
        assert text in findings[0].what
        assert "THE COMMAND" in findings[0].fix
        statistics, findings = load(data, transform, n, foreign=True)
        assert statistics is not None
        assert [f.severity for f in findings] == ["warning"]
    narrow = MemoryDataset(state_dim=7)
    assert "5 state dimensions, the dataset 7" in str(load(narrow, stream(narrow), 27, True)[1][0])


def test_N02_range_check_names_dimensions() -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (1000, 3))
    rows[:300, 1] = -3200.0
    rows[:10, 2] = 1.6
    names = {"state": ["a", "b", "c"]}
    table, findings = range_table({"state": rows}, names, limit=0.2)
    assert [row["outside"] for row in table] == [0.0, 0.3, 0.01]
    assert table[1]["max"] == 3200.0
    assert len(findings) == 1
    assert "1 dimension(s)" in findings[0].what
    assert "b (30% outside, max 3200)" in findings[0].what
    (rare,) = range_table({"state": rows}, names, limit=0.3)[1]
    assert rare.severity == "warning"
    assert "b (max 3200)" in rare.what
    assert range_table({"state": rows[300:]}, names, limit=0.0)[1] == []
    assert "a (" in range_table({"state": np.where(rows == rows[5, 0], np.nan, rows)}, names, limit=1.0)[1][-1].what


def test_N04_windows_that_hold_a_nonfinite_value() -> None:
    data = MemoryDataset()
    data.actions_ND[5, 1] = np.nan
    data.state_ND[12, 0] = np.inf
    expected = [not (np.isfinite(data[i].actions_TD).all() and np.isfinite(data[i].state_D).all()) for i in range(len(data))]
    assert sum(expected) == 5
    assert windows_with_nonfinite(data, 4).tolist() == expected
