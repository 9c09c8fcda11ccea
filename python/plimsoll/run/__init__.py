# SPDX-License-Identifier: Apache-2.0
"""Run: the lifecycle of a training run: folder, commits, resumption, status."""
