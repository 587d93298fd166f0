"""Weights and the errors of block types, for tests."""

import torch


def gaussian(rows, width, seed=0):
    return 0.02 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def student(rows, width, freedom, seed=0):
    """Heavy tails: Student's t with few degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(freedom + 1, rows, width, generator=generator)
    return 0.02 * normal[0] / normal[1:].square().mean(0).sqrt()


def importance(width, seed=5):
    return torch.exp(torch.randn(width, generator=torch.Generator().manual_seed(seed)))


def awkward(width=512):
    """Rows that break careless code, by name."""
    generator = torch.Generator().manual_seed(9)
    noise = torch.randn(width, generator=generator)
    outlier, half_zero = torch.zeros(width), noise.clone()
    outlier[37] = 3.0
    half_zero.view(-1, 64)[:, :32] = 0
    return {
        "zeros": torch.zeros(width),
        "negative zeros": torch.full((width,), -0.0),
        "mixed zeros": torch.zeros(width) * noise.sign(),
        "a negative constant": torch.full((width,), -0.75),
        "a positive constant": torch.full((width,), 0.75),
        "one outlier": outlier,
        "an outlier in noise": 0.01 * noise + 50 * outlier,
        "groups of zeros": half_zero,
        "positive": noise.abs() + 0.1,
        "negative": -noise.abs() - 0.1,
        "subnormal halves": 1e-6 * noise,
        "below halves": 1e-9 * noise,
        "subnormal floats": 1e-40 * noise,
        "beyond halves": 1e8 * noise,
        "near the largest float": 1e37 * noise,
    }
