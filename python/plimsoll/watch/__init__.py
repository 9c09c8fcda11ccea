# SPDX-License-Identifier: Apache-2.0
"""Watch: whose memory grows, where it was allocated and who holds it."""
