# SPDX-License-Identifier: Apache-2.0
"""Training: a step as a transaction, batch plans, checkpoints, weights that stay on disk."""
