# SPDX-License-Identifier: Apache-2.0
"""The recipe `cosir`: import_pairs() makes its input; it trains in C++ (src/recipes/cosir)."""
