# SPDX-License-Identifier: Apache-2.0
"""Data: features, tokens, images and graphs, and batches of them in a seeded order."""
