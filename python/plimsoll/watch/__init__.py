# SPDX-License-Identifier: Apache-2.0
"""Watch: finds growing memory, the line that allocates it, and its holder."""
