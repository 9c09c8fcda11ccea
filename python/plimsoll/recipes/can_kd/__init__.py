# SPDX-License-Identifier: Apache-2.0
"""The recipe `can-kd`: intrusion detection on CAN-bus graphs, a teacher and a student of it."""
