# SPDX-License-Identifier: Apache-2.0
"""Runs inside the training loops of other libraries. Each module needs the library it is named after."""
