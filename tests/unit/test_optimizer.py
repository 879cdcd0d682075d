"""AdamW against torch.optim.AdamW in fp64, and what torch's lacks: main parameters, decay-only parameters, refused steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.kernels.adamw.reference import Coefficients, adamw_update, skips_untouched
from megatron_vla.training import optimizer as optimizer_module
from megatron_vla.training.gradient import clip_factor, gradient_norm
from megatron_vla.training.optimizer import AdamW

CONFIG = OptimizerConfig(adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.01)
SHAPES = ((7, 5), (11,), (3, 2, 4), ())


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def named(values: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", p) for i, p in enumerate(values)]


def gradients_of_step(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 10 ** (step % 5 - 2) for shape in SHAPES]


def learning_rate(step: int) -> float:
    return 1e-2 / (1 + step)


def largest_relative_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float(((a - b).abs() / b.abs().clamp(min=1e-12)).max()) for a, b in zip(ours, theirs, strict=True))


def run_both(
    dtype: torch.dtype, steps: int, clip: float, scale: float
) -> tuple[AdamW, torch.optim.AdamW, list[Tensor], list[Tensor]]:
    """Same parameters and gradients through our optimizer (gradients times 1/scale, scale folded in) and torch's."""
    mine, reference = parameters(dtype), parameters(dtype)
    ours = AdamW(named(mine), CONFIG)
    theirs = torch.optim.AdamW(reference, lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, foreach=False)
    for step in range(steps):
        grads = gradients_of_step(step, dtype)
        for p, g in zip(reference, grads, strict=True):
            p.grad = g.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(reference, clip)
        theirs.param_groups[0]["lr"] = learning_rate(step)
        theirs.step()
        raw = [g / scale for g in grads]
        norm = gradient_norm(raw) * scale
        ours.advance(learning_rate(step))
        ours.step(raw, scale * clip_factor(norm, clip))
    return ours, theirs, [p.detach() for p in mine], [p.detach() for p in reference]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_fp64_equals_torch_adamw_over_50_steps(clip: float) -> None:
    ours, theirs, mine, reference = run_both(torch.float64, 50, clip, scale=1 / 37)
    assert largest_relative_difference(mine, reference) <= 1e-12
    moments = [theirs.state[p]["exp_avg_sq"] for p in theirs.param_groups[0]["params"]]
    assert largest_relative_difference([e.exp_avg_sq for e in ours.trainable if e.exp_avg_sq is not None], moments) <= 1e-12
    assert ours.param_groups[0]["step"] == 50


def test_fp32_stays_within_rounding_of_torch_adamw() -> None:
    _, _, mine, reference = run_both(torch.float32, 50, 0.0, scale=1.0)
    # 50 steps of lr-sized updates near 1: a few units in the last place of fp32.
    assert max(float((a - b).abs().max()) for a, b in zip(mine, reference, strict=True)) <= 5e-7


def test_pieces_do_not_change_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, whole, _ = run_both(torch.float32, 5, 1.0, scale=1.0)
    monkeypatch.setattr(optimizer_module, "PIECE_ELEMENTS", 4)
    _, _, cut, _ = run_both(torch.float32, 5, 1.0, scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_bf16_parameters_follow_their_fp32_main_parameters() -> None:
    start = [p.detach().to(torch.bfloat16) for p in parameters(torch.float64)]
    low = [nn.Parameter(p.clone()) for p in start]
    high = [nn.Parameter(p.float()) for p in start]
    ours = AdamW(named(low), CONFIG)
    reference = AdamW(named(high), CONFIG)
    for step in range(30):
        grads = [g.to(torch.bfloat16) for g in gradients_of_step(step, torch.float32)]
        for optimizer, given in ((ours, grads), (reference, [g.float() for g in grads])):
            optimizer.advance(1e-4)
            optimizer.step(given, torch.tensor(0.5))
    for entry, parameter, wanted in zip(ours.parameters, low, high, strict=True):
        assert entry.main.dtype == torch.float32 and torch.equal(entry.main, wanted)
        assert torch.equal(parameter, wanted.to(torch.bfloat16))
    # Steps of 1e-4 vanish in bf16 near 1: only the main parameters can have moved this little.
    assert any(not torch.equal(e.main, e.main.to(torch.bfloat16).float()) for e in ours.parameters)


def test_decay_only_parameters_decay_and_nothing_else() -> None:
    live, zero, dead = (nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64)) for _ in range(3))
    zero.requires_grad_(False)
    dead.requires_grad_(False)
    zero.decay_only = True  # type: ignore[attr-defined]
    ours = AdamW([("live", live), ("zero", zero), ("dead", dead)], CONFIG)
    reference = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    theirs = torch.optim.AdamW([reference], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(3):
        ours.advance(0.1)
        ours.step([torch.ones(4, dtype=torch.float64)], torch.tensor(1.0))
        reference.grad = torch.zeros(4, dtype=torch.float64)  # what the released trainer gives such a parameter
        theirs.step()
    assert torch.allclose(zero, reference, rtol=1e-15, atol=0)
    assert float(zero[0].detach()) == pytest.approx(2.0 * (1 - 0.1 * 0.01) ** 3, rel=1e-15)
    assert torch.equal(dead, torch.full((4,), 2.0, dtype=torch.float64))
    assert sorted(ours.state_tensors()) == ["exp_avg.live", "exp_avg_sq.live"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refused_step_changes_nothing(dtype: torch.dtype) -> None:
    values = parameters(dtype)
    frozen = nn.Parameter(torch.ones(3))
    frozen.requires_grad_(False)
    frozen.decay_only = True  # type: ignore[attr-defined]
    ours = AdamW([*named(values), ("zero", frozen)], CONFIG)
    ours.advance(1e-2)
    ours.step(gradients_of_step(0, dtype), torch.tensor(1.0))
    before = {name: t.clone() for name, t in ours.state_tensors().items()}
    before_values = [p.detach().clone() for p in [*values, frozen]]
    ours.advance(1e-2)
    masked = [torch.zeros_like(g) for g in gradients_of_step(1, dtype)]
    ours.step(masked, torch.tensor(0.0), is_finite=torch.tensor(False))
    assert all(torch.equal(before[name], t) for name, t in ours.state_tensors().items())
    assert all(torch.equal(a, b) for a, b in zip(before_values, [*values, frozen], strict=True))
    ours.step(gradients_of_step(1, dtype), torch.tensor(1.0), is_finite=torch.tensor(True))
    assert not torch.equal(before_values[0], values[0])


def test_refused_step_keeps_the_sign_of_an_untouched_zero() -> None:
    parameter = nn.Parameter(torch.tensor([-0.0, 0.0, 1.0]))
    ours = AdamW([("table", parameter)], CONFIG)
    ours.advance(1e-2)
    ours.step([torch.zeros(3)], torch.tensor(0.0), is_finite=torch.tensor(False))
    assert torch.equal(parameter.detach().view(torch.int32), torch.tensor([-0.0, 0.0, 1.0]).view(torch.int32))


def test_gradient_norm_of_bf16_is_accumulated_in_fp64() -> None:
    gradients = [torch.full((1000,), 0.01, dtype=torch.bfloat16), torch.full((10,), 3.0, dtype=torch.bfloat16)]
    exact = torch.cat([g.double() for g in gradients]).norm()
    assert gradient_norm(gradients).dtype == torch.float64
    assert float(gradient_norm(gradients)) == pytest.approx(float(exact), rel=1e-14)


def test_clip_factor_is_torchs() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for gradient in ([3.0, 4.0, 0.0], [0.1, 0.0, 0.0]):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        mine = torch.tensor(gradient, dtype=torch.float64) * clip_factor(norm, 1.0)
        assert torch.allclose(mine, parameter.grad, rtol=1e-15, atol=0)
    assert float(clip_factor(torch.tensor(50.0), 0.0)) == 1.0


def test_fused_kernel_gives_the_same_update_and_skips_a_refused_step() -> None:
    """The kernel exists on CPU too, where it is only used here."""
    plain, fused = AdamW(named(parameters(torch.float32)), CONFIG), AdamW(named(parameters(torch.float32)), CONFIG)
    assert not plain.is_fused
    fused.is_fused = True
    for step in range(20):
        for ours in (plain, fused):
            ours.advance(learning_rate(step))
            ours.step(gradients_of_step(step, torch.float32), torch.tensor(0.37), torch.tensor(True))
    assert largest_relative_difference([p.main for p in fused.trainable], [p.main for p in plain.trainable]) <= 1e-5
    before = {name: tensor.clone() for name, tensor in fused.state_tensors().items()}
    weights = [p.main.clone() for p in fused.parameters]
    fused.advance(1e-2)
    fused.step([torch.full(shape, torch.nan) for shape in SHAPES], torch.tensor(0.0), torch.tensor(False))
    assert all(torch.equal(before[name], tensor) for name, tensor in fused.state_tensors().items())
    assert all(torch.equal(w, p.main) for w, p in zip(weights, fused.parameters, strict=True))


# Every kind of number that a main parameter may be.
NUMBERS = (0.0, -0.0, 1.0, -2.5e-3, 1e-45, -1e-45, 1.2e-38, 3e38, float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize(
    ("is_identity", "changed"),
    [
        (True, {}),
        (True, {"negative_step_size": -0.0}),  # learning rate 0
        (True, {"decay": 1 - 5e-5 * 1e-10}),  # rounds to 1 in fp32
        (True, {"scale": -1e30}),
        (False, {"decay": 1 - 1e-6}),
        (False, {"scale": float("nan")}),
        (False, {"scale": float("inf")}),
        (False, {"eps": 0.0}),
        (False, {"negative_step_size": 0.0}),  # would turn -0 into +0
        (False, {"bias_correction2_sqrt": 0.0}),
    ],
)
def test_where_nothing_was_touched_the_update_changes_no_bit(is_identity: bool, changed: dict[str, float]) -> None:
    """The condition under which the kernel skips, against the update itself: gradients of both zeros, moments of +0."""
    values = {"decay": 1.0, "scale": 0.37, "eps": 1e-8, "negative_step_size": -1e-3, "bias_correction2_sqrt": 0.3, **changed}
    beta1, beta2, scale, eps = torch.tensor(0.9), torch.tensor(0.95), torch.tensor(values["scale"]), values["eps"]
    decay, root, step = (torch.tensor(values[n]) for n in ("decay", "bias_correction2_sqrt", "negative_step_size"))
    coefficients = Coefficients(decay, beta1, beta2, root, step)
    main = torch.tensor(NUMBERS * 2)
    gradient = torch.tensor([0.0] * len(NUMBERS) + [-0.0] * len(NUMBERS)) * scale
    state = [main.clone(), torch.zeros_like(main), torch.zeros_like(main)]
    adamw_update([state[0]], [gradient], [state[1]], [state[2]], coefficients, (0.9, 0.95), eps)
    before = [main, torch.zeros_like(main), torch.zeros_like(main)]
    same = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, state, strict=True))
    assert bool(skips_untouched(coefficients, scale, eps)) == is_identity == same


def test_who_reads_or_writes_the_state_makes_the_kernel_forget() -> None:
    """It skips what it believes to be zero: every way to live moments must reset that."""

    class Kernel:
        resets = 0

        def forget_moments(self) -> None:
            self.resets += 1

    ours = AdamW(named(parameters(torch.bfloat16)), CONFIG)
    kernel = Kernel()
    ours._kernels = {True: kernel}  # type: ignore[dict-item]
    for number, call in enumerate(
        (lambda: list(ours.state_shards()), ours.state_tensors, ours.write_weights, ours.refresh_main)
    ):
        call()
        assert kernel.resets == number + 1
