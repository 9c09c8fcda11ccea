# SPDX-License-Identifier: Apache-2.0
"""Data: features, tokens, images, graphs, and batches of them in a seeded order."""
