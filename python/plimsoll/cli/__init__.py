# SPDX-License-Identifier: Apache-2.0
"""The command line: the program `plimsoll`, and its commands written in Python."""
