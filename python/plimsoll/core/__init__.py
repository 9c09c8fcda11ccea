# SPDX-License-Identifier: Apache-2.0
"""Core: arrays, folders, random states, the way to torch. Imports no other room."""
