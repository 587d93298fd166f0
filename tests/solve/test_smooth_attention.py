"""SmoothAttention in float64: scores stay as they are, and every factor is the power of its pair's peak."""

import pytest
import torch

from llmcompress.solve.smooth_attention import smoothing

HEADS, SHARE, DIM, LENGTH = 2, 3, 8, 5


def made(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def rotate(x, layout, rotated):
    """Rotary embedding of x [heads, length, dim], its first `rotated` channels, pair by pair in plain loops."""
    out = x.clone()
    for pair in range(rotated // 2):
        first, second = (pair, pair + rotated // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        angle = torch.arange(x.shape[1], dtype=torch.float64) * 10.0 ** (-pair / 2)
        out[..., first] = x[..., first] * angle.cos() - x[..., second] * angle.sin()
        out[..., second] = x[..., second] * angle.cos() + x[..., first] * angle.sin()
    return out


def scores(q, k):
    return torch.einsum("hsld,hmd->hslm", q.view(HEADS, SHARE, LENGTH, DIM), k)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotated", [DIM, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_scaling_before_the_rotation_leaves_every_score_as_it_was(layout, rotated, shared):
    q, k = made(HEADS * SHARE, LENGTH, DIM), made(HEADS, LENGTH, DIM) * torch.logspace(-1, 1, DIM).double()
    peaks = rotate(k, layout, rotated).abs().amax(dim=1)
    factors = smoothing(peaks, layout, rotated=rotated, shared=shared)
    before = scores(rotate(q, layout, rotated), rotate(k, layout, rotated))
    by_query = factors.repeat_interleave(SHARE, dim=0)[:, None]
    after = scores(rotate(q * by_query, layout, rotated), rotate(k / factors[:, None], layout, rotated))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert (factors.amax(1) / factors.amin(1)).min() > 2  # they do something
    assert not shared or torch.equal(factors[0], factors[1])


def test_untied_factors_would_change_scores():
    q, k = made(HEADS * SHARE, LENGTH, DIM), made(HEADS, LENGTH, DIM) * torch.logspace(-1, 1, DIM).double()
    factors = smoothing(rotate(k, "half", DIM).abs().amax(dim=1), "none")
    before = scores(rotate(q, "half", DIM), rotate(k, "half", DIM))
    by_query = factors.repeat_interleave(SHARE, dim=0)[:, None]
    after = scores(rotate(q * by_query, "half", DIM), rotate(k / factors[:, None], "half", DIM))
    assert (after - before).abs().max() > 0.01


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_factors_are_powers_of_the_greater_peak_of_a_pair_with_mean_one(alpha):
    peaks = made(HEADS, DIM).abs() + 0.1
    for layout, rotated in (("half", 4), ("interleaved", DIM), ("none", None)):
        found = smoothing(peaks, layout, rotated=rotated, alpha=alpha)
        for head in range(HEADS):
            joint = [float(peak) for peak in peaks[head]]
            for pair in range((rotated or 0) // 2):
                places = (pair, pair + rotated // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
                for place in places:
                    joint[place] = max(float(peaks[head, other]) for other in places)
            wanted = torch.tensor(joint, dtype=torch.float64) ** alpha
            torch.testing.assert_close(found[head], wanted / wanted.mean())
    assert smoothing(peaks, "half").mean(dim=1).sub(1).abs().max() < 1e-12


def test_silent_channels_and_heads_stay_finite():
    peaks = torch.tensor([[0.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    found = smoothing(peaks, "half")
    assert bool(torch.isfinite(found).all())
    assert float(found.min()) > 0
    assert found[1].tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="pairs"):
        smoothing(peaks, "half", rotated=3)
