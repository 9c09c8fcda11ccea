# SPDX-License-Identifier: Apache-2.0
"""Rows: tables of one trainable row per id, on one rank or divided among several."""
