"""Searches, cards and ledgers ask dp-accounting for the same numbers dozens of times, and it takes its time."""

import functools

from dp_accounting.rdp import rdp_privacy_accountant


def remember_rdp():
    """In this process dp-accounting computes the Rényi DP of a Poisson draw once; its answers stay the same."""
    computed = functools.cache(rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian)

    def remembered(q, noise_multiplier, orders):
        return computed(q, noise_multiplier, tuple(orders)).copy()

    rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian = remembered
