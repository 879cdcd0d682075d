"""One step of the eager runner: gradient semantics against autograd, and the refusal of non-finite steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from training_fixtures import build_run, take_steps, tiny_config

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.data.batch import Batch
from megatron_vla.parallel.data_parallel import DirectGradients, MegatronDataParallel, gradient_of
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training.loop import TrainingRun, train
from megatron_vla.training.nonfinite import NonFiniteError


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


def poisoned(run: TrainingRun, bad_step: int) -> None:
    """The supply's actions become NaN for one sample of the second micro-batch of step `bad_step` (counted from 1)."""
    honest = run.supply.iterator

    def iterator(consumed_samples: int, *rest: int) -> Iterator[Batch]:
        for number, batch in enumerate(honest(consumed_samples, *rest)):
            position = consumed_samples + 2 * number
            if position == (bad_step - 1) * 4 + 2:
                actions = batch.actions_BTA.clone()
                actions[1, 0, 0] = float("nan")
                batch = dataclasses.replace(
                    batch, actions_BTA=actions, action_is_valid_BTA=torch.ones_like(batch.action_is_valid_BTA)
                )
            yield batch

    run.supply.iterator = iterator  # type: ignore[method-assign]


@pytest.mark.parametrize("strategy", ["megatron_ddp", "torch_ddp"])
def test_loss_and_gradient_are_sum_over_global_count(groups: ParallelGroups, strategy: str) -> None:
    """Against one autograd pass over both micro-batches, with different numbers of valid elements in each."""
    run = build_run(tiny_config("--fp64", "--clip-grad", "0", "--data-parallel-strategy", strategy), groups)
    batches = list(run.supply.iterator(0, 0, 1, 1, False))
    batches[1].action_is_valid_BTA[:, 3:] = False
    parameters = [entry.parameter for entry in run.state.optimizer.trainable]
    results = []
    for batch in batches:
        output, loss_func = run.family.forward_step(iter([batch]), run.state.module)
        results.append(loss_func(output))
    count = sum(int(r[1]) for r in results)
    assert int(results[0][1]) != int(results[1][1])
    loss = (results[0][0] + results[1][0]) / count
    expected = torch.autograd.grad(loss, parameters)
    metrics = run.runner.step(iter(batches), 0.0)
    assert float(metrics.loss) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert int(metrics.num_valid) == count
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert float(metrics.gradient_norm) == pytest.approx(float(norm), rel=1e-10)
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(gradient_of(parameter), wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("strategy", ["megatron_ddp", "torch_ddp"])
def test_nonfinite_step_and_all_later_ones_change_nothing(groups: ParallelGroups, strategy: str) -> None:
    run = build_run(tiny_config("--data-parallel-strategy", strategy), groups)
    poisoned(run, bad_step=2)
    batches = run.supply.iterator(0, 0, 1, 4, False)
    flags, snapshots = [], []
    for _ in range(4):
        flags.append(bool(run.runner.step(batches, 1e-3).is_finite))
        snapshots.append(
            [t.clone() for t in (*run.state.module.state_dict().values(), *run.state.optimizer.state_tensors().values())]
        )
    assert flags == [True, False, False, False]
    for later in snapshots[1:]:
        assert all(torch.equal(a, b) for a, b in zip(snapshots[0], later, strict=True))


def test_N05_nonfinite_loss_names_iteration_samples_and_module(groups: ParallelGroups) -> None:
    """Found at the log interval (step 5), reported for step 3 with its own samples."""
    run = build_run(tiny_config(), groups)
    ids = [batch.sample_index_B.tolist() for batch in run.supply.iterator(8, 0, 1, 1, False)]
    poisoned(run, bad_step=3)
    with pytest.raises(NonFiniteError) as caught:
        train(run)
    text = str(caught.value)
    assert run.state.iteration == 5
    assert "iteration 3:" in text and f"micro-batch 1, samples {ids[1]}" in text and "micro-batch 0" not in text
    assert f"batch field actions_BTA is not finite for sample(s) [{ids[1][1]}]" in text
    assert "first non-finite module" in text and "--no-check-for-nan-in-loss-and-grad" in text


def test_N05_first_nonfinite_module_is_the_faulty_one(groups: ParallelGroups) -> None:
    run = build_run(tiny_config("--log-interval", "1"), groups)
    with torch.no_grad():
        run.state.module.get_parameter("action_in_proj.bias")[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"first non-finite module: action_in_proj \(\w+\); its input was finite"):
        train(run)


def test_unchecked_run_goes_on(groups: ParallelGroups) -> None:
    run = build_run(tiny_config("--no-check-for-nan-in-loss-and-grad", "--train-iters", "6"), groups)
    poisoned(run, bad_step=2)
    train(run)
    assert run.state.iteration == 6


def test_batch_without_a_valid_element_has_loss_zero_and_no_update_from_its_gradient(groups: ParallelGroups) -> None:
    run = build_run(tiny_config("--weight-decay", "0"), groups)
    batches = list(run.supply.iterator(0, 0, 1, 1, False))
    for batch in batches:
        batch.action_is_valid_BTA[:] = False
    before = [t.clone() for t in run.state.module.state_dict().values()]
    metrics = run.runner.step(iter(batches), 1e-3)
    assert float(metrics.loss) == 0.0 and bool(metrics.is_finite)
    assert all(torch.equal(a, b) for a, b in zip(before, run.state.module.state_dict().values(), strict=True))


def test_torch_ddp_refuses_to_claim_fp32_accumulation_of_bf16(groups: ParallelGroups) -> None:
    with pytest.raises(ValueError, match="--no-accumulate-allreduce-grads-in-fp32"):
        build_run(tiny_config("--bf16", "--data-parallel-strategy", "torch_ddp"), groups)


def test_loss_falls(groups: ParallelGroups) -> None:
    run = build_run(
        tiny_config("--mock-num-samples", "4", "--no-shuffle", "--lr-decay-style", "constant", "--lr", "3e-3"), groups
    )
    losses = take_steps(run, 20)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("precision", ["--fp64", "--bf16"])
def test_gradients_without_a_buffer_are_those_of_the_buffer(groups: ParallelGroups, precision: str) -> None:
    """One micro-batch per step: the fp32 buffer holds the same numbers, so four updates end in the same bits."""
    config = tiny_config(precision, "--micro-batch-size", "4", "--global-batch-size", "4")
    direct, buffered = build_run(config, groups), build_run(config, groups, with_buffers=True)
    assert isinstance(direct.runner.model, DirectGradients) and not isinstance(buffered.runner.model, DirectGradients)
    assert take_steps(direct, 4) == take_steps(buffered, 4)
    expected = buffered.state.optimizer.state_tensors()
    found = direct.state.optimizer.state_tensors()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("with_buffers", [False, True])
def test_a_parameter_that_a_step_does_not_reach_has_gradient_zero(groups: ParallelGroups, with_buffers: bool) -> None:
    """Also when the last step left a gradient in its buffer."""
    config = tiny_config("--micro-batch-size", "4", "--global-batch-size", "4")
    run = build_run(config, groups, with_buffers=with_buffers)
    take_steps(run, 1)
    run.runner.model.zero_gradients()
    run.runner.model.finish_gradients()
    assert all(int(gradient.count_nonzero()) == 0 for gradient in run.state.optimizer.gradients())


def test_nothing_of_the_last_step_is_left_in_the_buffers(groups: ParallelGroups) -> None:
    """They are not zeroed: of a step's two micro-batches, the first overwrites and the second adds."""
    config = tiny_config("--micro-batch-size", "2", "--global-batch-size", "4")
    clean, soiled = build_run(config, groups), build_run(config, groups)
    assert isinstance(soiled.runner.model, MegatronDataParallel)
    for buffer in soiled.runner.model.wrapped.buffers:
        buffer.grad_data.fill_(float("nan"))
    assert take_steps(soiled, 2) == take_steps(clean, 2)
    pairs = zip(clean.state.optimizer.gradients(), soiled.state.optimizer.gradients(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
