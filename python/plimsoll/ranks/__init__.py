# SPDX-License-Identifier: Apache-2.0
"""Ranks: the processes of one run, sums of their gradients, virtual workers, tiles that they share. Independent of tables and runs."""
