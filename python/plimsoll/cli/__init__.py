# SPDX-License-Identifier: Apache-2.0
"""Command line: the program `plimsoll`, and its commands that are in Python."""
