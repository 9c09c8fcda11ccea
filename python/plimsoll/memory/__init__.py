# SPDX-License-Identifier: Apache-2.0
"""Memory: the governor and its limit, leases, clean-ups."""
