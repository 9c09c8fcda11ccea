# SPDX-License-Identifier: Apache-2.0
"""Integrations: runs inside other libraries' training loops. Each module needs the library it is named after."""
