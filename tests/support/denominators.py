"""Sums of exponentials of both sides: nearly equal, and too far apart for a ratio."""

import torch


def denominators():
    """Teacher's and student's sums, and the KL of rows without a moment, in float64."""
    near = torch.linspace(50.0, 70.0, 500)
    l_t = torch.cat([near, torch.tensor([1e30, 1e-24, 3.0, 8.0])])
    l_s = torch.cat([near * (1 + 1e-6), torch.tensor([1e-24, 1e30, 8.0, 3.0])])
    return l_t, l_s, l_s.double().log() - l_t.double().log()


def check_denominators(value, expected):
    # two logarithms of 50 to 70 are off by up to 4.8e-7, one of a ratio near 1 by 1.2e-7
    assert float((value - expected)[:500].abs().max()) < 2e-7
    # the mass is the sum times 2^-(its logarithm), whose last digit is 4e-6 at 1e30
    torch.testing.assert_close(value[500:].double(), expected[500:], rtol=1e-5, atol=0.0)
